"""`make bench`: every benchmark, one after the other. `python -m benchmarks NAME ...` picks some."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NAMES = ("attention_cpu", "logprobs_memory", "toy_losses")


def main() -> int:
    chosen = sys.argv[1:] or NAMES
    unknown = [name for name in chosen if name not in NAMES]
    if unknown:
        print(f"no benchmark is called {', '.join(unknown)}; there are: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    failed = []
    for name in chosen:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=Path(__file__).parents[1]).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
