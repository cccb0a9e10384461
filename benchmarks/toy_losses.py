"""How many steps every built-in loss needs to learn the toy task, on the whole real stack.

    python -m benchmarks.toy_losses [--json FILE]

Runs `apps/grpo/toy.yaml` once for each loss and prints the first step from which the mean reward of three steps in a
row is above 0.9.
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


def run(loss: str, folder: Path) -> dict[str, Any]:
    """One run; steps to the goal (None: not reached), the last reward, and the wall time in seconds."""
    command = [
        *(sys.executable, "-m", "apps.grpo.main", "--config", "apps/grpo/toy.yaml", "--loss", loss),
        *("--training.steps", str(STEPS), "--eval.samples", "0", "--output_dir", str(folder / loss)),
    ]
    started = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / loss / "metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["reward/mean"] for line in lines]
    means = [sum(rewards[i : i + 3]) / 3 for i in range(len(rewards) - 2)]
    reached = next((i + 1 for i, mean in enumerate(means) if mean > GOAL), None)
    return {"loss": loss, "steps": reached, "last_reward": rewards[-1], "seconds": time.monotonic() - started}


def main() -> None:
    options = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = [run(loss, Path(scratch)) for loss in LOSSES]
    columns = {
        "loss": "loss",
        "steps": "steps to 0.9",
        "last_reward": "last reward:.3f",
        "seconds": "seconds:.0f",
    }
    report("toy_losses", rows, columns=columns, json_path=options.json)


if __name__ == "__main__":
    main()
