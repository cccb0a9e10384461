"""Kills the controller of the toy run at seeded random moments, starts it again each time, and compares with a run that
was left alone: the loss curve must be the same, bit for bit.

    python -m benchmarks.controller_kills [--kills 10] [--seed 0] [--json FILE]

Strictly on-policy (training.max_staleness: 0). Every third kill comes while a checkpoint is being written; the others
when a random number of steps is done, counted from the last checkpoint, or a random time after the start.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.reliability.runs import App, curve, evaluations, ledger, newest

STEPS, INTERVAL = 40, 3
OVERRIDES = (
    "--training.max_staleness", "0", "--training.steps", str(STEPS), "--checkpoint.interval", str(INTERVAL),
    "--eval.samples", "8", "--eval.interval", "7",
)  # fmt: skip
LONGEST_START = 12.0  # seconds: a random moment up to here may fall into the start of the processes


def kill_once(app: App, number: int, rng: random.Random) -> dict[str, Any]:
    """Waits for the moment and kills; says which it was."""
    folder, began, from_step = app.folder, time.monotonic(), newest(app.folder)
    kind = ("saving", "step", "time")[number % 3]
    left = STEPS - from_step
    if kind == "saving" and left > INTERVAL:
        app.until_saving(after=from_step)
    elif kind == "step" and left > 1:
        app.until_step(from_step + rng.randint(1, min(left - 1, INTERVAL + 1)))
    else:
        kind = "time"
        deadline = time.monotonic() + rng.uniform(0.5, LONGEST_START)
        app.until(lambda: time.monotonic() >= deadline)
    partial = any((folder / "checkpoints").glob("step-*.partial"))
    app.kill()
    return {
        "kill": number + 1,
        "moment": kind,
        "resumed_from": from_step,
        "newest_after": newest(folder),
        "while_saving": partial,
        "seconds": time.monotonic() - began,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the results as well")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as scratch:
        whole, broken = Path(scratch) / "whole", Path(scratch) / "broken"
        App(whole, *OVERRIDES).finish(timeout=600)
        kills = []
        for number in range(arguments.kills):
            kills.append(kill_once(App(broken, *OVERRIDES), number, rng))
            print(json.dumps(kills[-1]), flush=True)
        App(broken, *OVERRIDES).finish(timeout=600)
        same = {
            "loss_curve": curve(broken) == curve(whole),
            "evaluations": evaluations(broken) == evaluations(whole),
            "ledger": ledger(broken) == ledger(whole),
        }
        steps = len(curve(broken))
    table = Table("kill", "moment", "resumed from", "newest after", "while saving", title="SIGKILL of the controller")
    for k in kills:
        table.add_row(*(str(k[c]) for c in ("kill", "moment", "resumed_from", "newest_after", "while_saving")))
    Console().print(table)
    print(f"{steps} steps; identical to the uninterrupted run: {same}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"seed": arguments.seed, "kills": kills, "steps": steps, "same": same}))
    return 0 if all(same.values()) and steps == STEPS else 1


if __name__ == "__main__":
    sys.exit(main())
