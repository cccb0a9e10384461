"""How many steps every built-in loss needs to learn the toy task, on the whole real stack.

    python -m benchmarks.toy_losses [--json FILE]

Runs `apps/grpo/toy.yaml` once for each loss and prints the first step from which the mean reward of three steps in a
row is above 0.9.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the results as well")
    arguments = parser.parse_args()
    table = Table("loss", "steps to 0.9", "last reward", "seconds", title="toy task, every built-in loss")
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for loss in LOSSES:
            result = run(loss, Path(scratch))
            results.append(result)
            table.add_row(loss, str(result["steps"] or "-"), f"{result['last_reward']:.3f}", f"{result['seconds']:.0f}")
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
