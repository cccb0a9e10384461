"""`make bench`: every benchmark, one after the other; meant to take under 15 minutes on two idle cores. Options:

    python -m benchmarks [NAME ...] [--json_dir DIR]      each one's rows also as DIR/NAME.json

Named alone a benchmark runs in full; among all of them `grpo_vs_trl` runs once instead of three times, and fewer
steps, and `sft_packing` has fewer samples. On request only: `toy_losses`, eight runs of the whole program, `soak`, a
quarter of an hour of kills, `controller_kills`, twelve starts, and `scale_sim`, thousands of simulated replicas. Run
them on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

# With the arguments that keep the whole under 15 minutes; None: on request only.
NAMES: dict[str, list[str] | None] = {
    "trainer_step": [],
    "sft_packing": ["--samples", "8"],
    "weight_sync": [],
    "rollout_overhead": [],
    "attention_cpu": [],
    "logprobs_memory": [],
    "grpo_vs_trl": ["--repetitions", "1", "--steps", "3"],
    "toy_losses": None,
    "soak": None,
    "controller_kills": None,
    "scale_sim": None,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--json_dir", type=Path, default=Path("runs/bench"), help="default: %(default)s")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        print(f"no benchmark is called {', '.join(unknown)}; there are: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    chosen: dict[str, list[str]] = {name: [] for name in options.names} or {
        n: a for n, a in NAMES.items() if a is not None
    }
    failed = []
    for name, arguments in chosen.items():
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
        command += ["--json", str((options.json_dir / f"{name}.json").resolve())]
        if subprocess.run(command, cwd=Path(__file__).parents[1]).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
