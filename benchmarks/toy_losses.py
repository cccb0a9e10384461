"""How many steps every built-in loss needs to learn the toy task, on the whole real stack.

    python -m benchmarks.toy_losses [--losses grpo dapo ...] [--json FILE]

Runs `apps/grpo/toy.yaml` once for each loss and prints the first step from which the mean reward of three steps in a
row is above 0.9. The learning rate is one that all of them bear: without any clipping, as `reinforce` is by default,
the 3e-3 of the config can end in one answer for everything.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import parser, report

LOSSES = ("simple_grpo", "grpo", "dr_grpo", "dapo", "cispo", "gspo", "sapo", "reinforce")
GOAL = 0.9
STEPS = 150  # a loss that has not learned it by then has not learned it
LEARNING_RATE = 1e-3


def run(loss: str, folder: Path) -> dict[str, Any]:
    """One run; steps to the goal (None: not reached), the last reward, and the wall time in seconds.

    A run that ends because nothing is left to learn from has its rewards, too.
    """
    command = [
        *(sys.executable, "-m", "apps.grpo.main", "--config", "apps/grpo/toy.yaml", "--loss", loss),
        *("--training.steps", str(STEPS), "--training.learning_rate", str(LEARNING_RATE), "--eval.samples", "0"),
        *("--output_dir", str(folder / loss)),
    ]
    started = time.monotonic()
    subprocess.run(command, stdout=subprocess.DEVNULL)  # why it failed stands on stderr
    lines = (folder / loss / "metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["reward/mean"] for line in lines]
    means = [sum(rewards[i : i + 3]) / 3 for i in range(len(rewards) - 2)]
    reached = next((i + 1 for i, mean in enumerate(means) if mean > GOAL), None)
    row = {"loss": loss, "steps": reached, "last_reward": rewards[-1], "seconds": time.monotonic() - started}
    print(row, flush=True)
    return row


def main() -> None:
    command_line = parser(__doc__)
    command_line.add_argument("--losses", nargs="+", default=LOSSES, choices=LOSSES)
    options = command_line.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = [run(loss, Path(scratch)) for loss in options.losses]
    columns = {
        "loss": "loss",
        "steps": "steps to 0.9",
        "last_reward": "last reward:.3f",
        "seconds": "seconds:.0f",
    }
    report("toy_losses", rows, columns=columns, json_path=options.json)


if __name__ == "__main__":
    main()
