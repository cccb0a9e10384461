"""A disk that is full: one message with the place, the bytes needed and those free; the last good checkpoint stays."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from forge.checkpoint import verify
from tests.reliability.runs import App, newest

CHECKPOINT = 4_100_000
"""Bytes of a toy checkpoint, about: 0.26 million parameters of 16 bytes."""


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 20 MB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def free(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def test_a_disk_that_runs_full_ends_the_run_with_one_message_and_the_last_good_checkpoint(small_disk):
    folder = small_disk / "run"
    app = App(folder, "--training.steps", "1000", "--checkpoint.interval", "2", "--eval.samples", "0")
    try:
        app.until(lambda: newest(folder) >= 2)
        (small_disk / "other").write_bytes(bytes(free(small_disk) - 1_000_000))
        assert app.process.wait(60) == 1
    finally:
        app.end()
    told = app.output[app.output.index("The run failed") :]
    assert f"no room for a checkpoint in {folder / 'checkpoints'}: it needs" in told
    assert "bytes" in told
    assert "Traceback" not in app.output
    good = folder / "checkpoints" / f"step-{newest(folder)}"
    assert f"Last good checkpoint: {good}" in told
    verify(good)
    assert list((folder / "checkpoints").glob("*.partial")) == []
