"""The soak of `benchmarks/soak.py`, two minutes of it: a run loses a process of every kind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak import VICTIMS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_loses_processes_of_every_kind_learns_its_task_and_loses_nothing(tmp_path):
    command = [sys.executable, "-m", "benchmarks.soak", "--steps", "60", "--pause", "4", "7", "--kills", "4"]
    result = subprocess.run(
        [*command, "--folder", str(tmp_path / "s")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    killed = {line.split("SIGKILL to ")[1].split("/")[0] for line in result.stdout.splitlines() if "SIGKILL" in line}
    assert killed == set(VICTIMS), result.stdout
