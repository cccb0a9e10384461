"""What a child process runs before anything else: its log file, its name, who may interrupt it. Then Monarch's main.

Started as `python -m forge.service._bootstrap` by the provisioner, which sets the variables that are read here.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import runpy
import signal

LOG_FILE = "FORGE_PROC_LOG"
"""Where stdout and stderr go; unset: where the parent's go."""
NAME = "FORGE_PROC_NAME"
"""Prefix of log lines, such as "generator/0"."""
LOG_LEVEL = "FORGE_LOG_LEVEL"
"""Level of Python's logging in the child, "WARNING" if unset."""


def main() -> None:
    if path := os.environ.get(LOG_FILE):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.close(target)
    # Ctrl-C and `kill -TERM -<group>` go to the controller, which decides what to finish first.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SLURM sends it to every process of a job that asked for it
    if "SLURM_JOB_ID" in os.environ:  # scancel sends SIGTERM to every process of the job
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    logging.basicConfig(
        level=os.environ.get(LOG_LEVEL, "WARNING").upper(),
        format=f"[{os.environ.get(NAME, 'actor')}] %(levelname)s %(name)s: %(message)s",
    )
    from monarch.actor import config

    config.prefix_python_logs_with_actor = False  # our prefix says it shorter
    runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
