"""The `forge` command.

    forge worker --listen ADDRESS:PORT     lets runs on other machines start processes here
    forge estimate CONFIG [--key value]    what a config would take: model, placement, memory and compute per device
    forge doctor [--config CONFIG]         what this machine has: GPUs, driver, versions, RDMA, data

Exit status: 0 done; 1 `forge doctor` found something that will not work; 2 wrong input.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from forge.config import GRPOConfig, exit_on_user_error, load_config
from forge.types import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    arguments, rest = _parser().parse_known_args(argv)
    if rest and arguments.command != "estimate":
        _parser().error(f"unrecognized arguments: {' '.join(rest)}")
    with exit_on_user_error():
        if arguments.command == "worker":
            from forge.launcher import run_worker

            run_worker(arguments.listen)
        elif arguments.command == "estimate":
            return _estimate(arguments.config, arguments.app, rest)
        else:
            return _doctor(arguments.config)
    return 0


def _parser() -> argparse.ArgumentParser:
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
    estimate = commands.add_parser("estimate", help="what a config would take; the app's --dry_run")
    estimate.add_argument("config", metavar="CONFIG", help="the YAML file; overrides may follow, --training.steps 10")
    estimate.add_argument("--app", default=None, choices=("grpo", "sft"), help="default: sft for files below apps/sft")
    doctor = commands.add_parser("doctor", help="what this machine has, and what of it will not work")
    doctor.add_argument("--config", default=None, metavar="CONFIG", help="also look for the data set of this config")
    return parser


def _estimate(config: str, app: str | None, overrides: Sequence[str]) -> int:
    """The app's own `--dry_run`."""
    app = app or ("sft" if "sft" in Path(config).parts else "grpo")
    sys.path.insert(0, os.getcwd())  # as `python -m` does: the apps, and rewards of the user's own
    try:
        program = importlib.import_module(f"apps.{app}.main")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("apps"):
            raise
        raise UserError(f"there is no apps/{app}/main.py in {os.getcwd()}: start forge from the repository.") from None
    sys.argv = [f"apps.{app}.main", "--config", config, "--dry_run", *overrides]
    status: int = program.main()
    return status


def _doctor(config: str | None) -> int:
    from forge.doctor import examine

    dataset = load_config(GRPOConfig, config).dataset if config else None
    found = examine(dataset)
    for finding in found:
        print(finding)
    return int(any(finding.problem for finding in found))


if __name__ == "__main__":
    sys.exit(main())
