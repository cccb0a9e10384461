"""The `forge` command.

    forge worker --listen ADDRESS:PORT     lets runs on other machines start processes here
    forge estimate CONFIG [--key value]    what a config would take: model, placement, memory and compute per device
    forge doctor [--config CONFIG]         what this machine has: GPUs, driver, versions, RDMA, data

Exit status: 0 done; 1 `forge doctor` found something that will not work; 2 wrong input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from forge.config import exit_on_user_error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="forge", description="Tools around the training programs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    worker = commands.add_parser("worker", help="let runs on other machines start processes here")
    worker.add_argument(
        "--listen",
        default="127.0.0.1:0",
        metavar="ADDRESS:PORT",
        help="where to listen (default: 127.0.0.1 and any free port). An address that other machines reach needs the "
        "same FORGE_SECRET on both sides.",
    )
    arguments = parser.parse_args(argv)
    with exit_on_user_error():
        if arguments.command == "worker":
            from forge.launcher import run_worker

            run_worker(arguments.listen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
