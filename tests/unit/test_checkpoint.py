"""Checkpoints are whole or not there."""

import errno
import json
import shutil
from dataclasses import dataclass

import pytest

from forge.checkpoint import Checkpoints, DiskFull, TornCheckpoint, is_disk_full, load_state, verify


def write(checkpoints: Checkpoints, step: int, content: str = "weights"):
    partial = checkpoints.begin(step)
    (partial / "trainer").mkdir()
    (partial / "trainer" / "a.safetensors").write_text(content)
    return checkpoints.commit(step, state={"step": step})


def test_the_newest_is_found_and_carries_the_state(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_latest_k=3)
    write(checkpoints, 9)
    write(checkpoints, 10)
    assert checkpoints.latest() == tmp_path / "step-10"  # by number: as text, step-9 comes last
    assert load_state(tmp_path / "step-10") == {"step": 10}


def test_a_checkpoint_that_was_being_written_is_not_there(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_latest_k=3)
    write(checkpoints, 1)
    (checkpoints.begin(2) / "half").write_text("ha")
    assert checkpoints.latest() == tmp_path / "step-1"


def test_older_ones_are_removed_only_when_the_new_one_is_whole(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_latest_k=2)
    for step in (1, 2, 3):
        write(checkpoints, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-2", "step-3"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "trainer" / "a.safetensors").write_text("w"), "should have 7 bytes and has 1"),
        (lambda p: (p / "trainer" / "a.safetensors").write_text("WEIGHTS"), "other content"),
        (lambda p: (p / "trainer" / "a.safetensors").unlink(), "should have 7 bytes and has 0"),
        (lambda p: (p / "manifest.json").write_text("{"), "no readable manifest.json"),
    ],
)
def test_a_torn_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path, damage, message):
    checkpoints = Checkpoints(tmp_path, keep_latest_k=2)
    write(checkpoints, 1)
    damage(write(checkpoints, 2))
    with pytest.raises(TornCheckpoint, match=message):
        verify(tmp_path / "step-2")
    assert checkpoints.latest() == tmp_path / "step-1"
    (torn,) = checkpoints.torn
    assert message in torn


def test_a_torn_checkpoint_takes_no_place_among_those_that_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_latest_k=1)
    write(checkpoints, 10)
    torn = tmp_path / "step-20"
    torn.mkdir()
    assert checkpoints.latest() == tmp_path / "step-10"
    write(checkpoints, 12)
    assert checkpoints.latest() == tmp_path / "step-12"
    assert [p.name for p in tmp_path.iterdir()] == ["step-12"]


def test_saving_a_step_again_keeps_the_old_one_until_the_new_one_is_there(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep_latest_k=1)
    write(checkpoints, 5, "old")
    moves = []

    def replace_once(source, target):
        moves.append(target)
        if len(moves) == 2:
            raise KeyboardInterrupt  # killed between the two renames
        source.rename(target)

    monkeypatch.setattr("forge.checkpoint.os.replace", replace_once)
    with pytest.raises(KeyboardInterrupt):
        write(checkpoints, 5, "new")
    monkeypatch.undo()
    found = Checkpoints(tmp_path, keep_latest_k=1).latest()
    assert (found / "trainer" / "a.safetensors").read_text() == "old"


def test_the_manifest_lists_every_file(tmp_path):
    path = write(Checkpoints(tmp_path, keep_latest_k=1), 5)
    assert set(json.loads((path / "manifest.json").read_text())) == {"state.json", "trainer/a.safetensors"}


@dataclass(slots=True)
class Inner:
    values: list[float]


@dataclass(slots=True)
class Outer:
    step: int
    inner: Inner


def test_a_state_may_hold_dataclasses_and_keeps_every_digit(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_latest_k=1)
    checkpoints.begin(3)
    path = checkpoints.commit(3, state=Outer(3, Inner([0.1, -1e-300])))
    assert load_state(path) == {"step": 3, "inner": {"values": [0.1, -1e-300]}}


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_latest_k=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(DiskFull, match=r"run/checkpoints: it needs 2,100 bytes .* and 1,000 are free.*output_dir"):
        checkpoints.begin(3, needed=2000)
    assert not (tmp_path / "run").exists()
    checkpoints.check_room(900)


def test_a_disk_that_fills_up_while_writing_is_told_as_such_and_frees_what_was_written(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_latest_k=1)
    write(checkpoints, 1)
    (checkpoints.begin(2) / "half").write_text("ha")
    cause = RuntimeError("SafetensorError: I/O error: No space left on device (os error 28)")
    told = checkpoints.abandon(2, cause, needed=10**15)
    assert isinstance(told, DiskFull)
    assert "1,050,000,000,000,000 bytes" in str(told)
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    other = ValueError("something else")
    assert checkpoints.abandon(2, other, needed=1) is other


def test_a_full_disk_is_recognised_behind_other_errors():
    wrapped = RuntimeError("writing failed")
    wrapped.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert is_disk_full(wrapped)
    assert not is_disk_full(OSError(errno.EACCES, "Permission denied"))
