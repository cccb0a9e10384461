"""What a resumable moment is, and writing it whole.

`checkpoints/step-N/` holds
    state.json      the controller's part: step, data position, finished but untrained groups
    trainer/        the trainer's part: weights, optimizer moments, in safetensors shards
    hf/             the weights as a Hugging Face folder
    manifest.json   every other file with its size and checksum; written last

A checkpoint is written into `step-N.partial`, flushed, and renamed: it is there whole or not at all. Nothing in it is a
pickle.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import xxhash

MANIFEST = "manifest.json"
STATE = "state.json"
_ROOM = 1.05
"""Free space asked for, as a multiple of a checkpoint's tensors: the logs grow meanwhile, and the state has a size."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class TornCheckpoint(RuntimeError):
    """A checkpoint's files are not those that its manifest lists."""


class DiskFull(RuntimeError):
    """There is no room for a checkpoint. The message is complete: place, bytes needed, bytes free, what to do."""

    def __init__(self, folder: Path, *, needed: int, free: int) -> None:
        super().__init__(
            f"no room for a checkpoint in {folder}: it needs {needed:,} bytes ({needed / 2**30:.2f} GiB), and {free:,} "
            "are free. Free some space, lower checkpoint.keep_latest_k, or choose an output_dir on a larger disk."
        )


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
        folder: usually `<output_dir>/checkpoints`; made when the first one is written.
        keep_latest_k: older ones are removed once a new one is whole.

    Example:
        >>> checkpoints = Checkpoints(Path("runs/a/checkpoints"), keep_latest_k=2)
        >>> partial = checkpoints.begin(10)          # the actors write their parts in there
        >>> checkpoints.commit(10, state={"step": 10})
        >>> checkpoints.latest()
        PosixPath('runs/a/checkpoints/step-10')
    """

    def __init__(self, folder: Path, *, keep_latest_k: int) -> None:
        self._folder = folder
        self._keep = keep_latest_k
        self._passed_over: list[Path] = []
        self.torn: list[str] = []
        """Why a newer checkpoint was passed over by `latest`."""

    def check_room(self, needed: int) -> None:
        """Whether `needed` bytes can be written.

        Raises:
            DiskFull: they cannot.
        """
        there = self._folder
        while not there.exists():
            there = there.parent
        free = shutil.disk_usage(there).free
        if free < _ROOM * needed:
            raise DiskFull(self._folder, needed=int(_ROOM * needed), free=free)

    def begin(self, step: int, *, needed: int = 0) -> Path:
        """An empty folder to write the parts of step `step` into, `needed` bytes together.

        Raises:
            DiskFull: there is no room for them.
        """
        partial = self._folder / f"step-{step}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        self.check_room(needed)
        partial.mkdir(parents=True)
        return partial

    def abandon(self, step: int, error: BaseException, *, needed: int) -> BaseException:
        """Removes what was written of step `step`; returns what to raise: `DiskFull` where that was the reason."""
        shutil.rmtree(self._folder / f"step-{step}.partial", ignore_errors=True)
        if not is_disk_full(error):
            return error
        return DiskFull(self._folder, needed=int(_ROOM * needed), free=shutil.disk_usage(self._folder).free)

    def commit(self, step: int, *, state: Any, best: int | None = None) -> Path:
        """Adds the controller's state, flushes everything to disk, and gives the checkpoint its name.

        Args:
            state: what JSON can hold, and dataclasses.
            best: the step of the best checkpoint so far, which is kept beside the latest; `best` in the folder is a
                link to it.
        """
        partial, final = self._folder / f"step-{step}.partial", self._folder / f"step-{step}"
        (partial / STATE).write_text(json.dumps(state, default=_fields_of))
        files = [p for p in sorted(partial.rglob("*")) if p.is_file()]
        manifest = {str(p.relative_to(partial)): {"bytes": p.stat().st_size, "xxh3": _checksum(p)} for p in files}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in [*files, partial / MANIFEST, *(p for p in partial.rglob("*") if p.is_dir()), partial]:
            _flush(path)
        if final.exists():  # of a step that was saved before: it stays until the new one has its name
            os.replace(final, self._folder / f"step-{step}.replaced")
        os.replace(partial, final)
        _flush(self._folder)
        whole = [path for path in self._all() if path not in self._passed_over]
        if best is not None and (self._folder / f"step-{best}").is_dir():
            self._link_best(f"step-{best}")
            whole = [path for path in whole if path.name != f"step-{best}" or path == final]
        for old in [*whole[: -self._keep], *self._passed_over, *self._folder.glob("step-*.*")]:
            shutil.rmtree(old, ignore_errors=True)
        self._passed_over = []
        return final

    def _link_best(self, name: str) -> None:
        fresh = self._folder / "best.new"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(name)
        os.replace(fresh, self._folder / "best")

    def latest(self) -> Path | None:
        """The newest checkpoint whose files are intact; torn ones are named in `self.torn`."""
        self.torn, self._passed_over = [], []
        for replaced in self._folder.glob("step-*.replaced"):  # killed between the two renames of `commit`
            if not (final := replaced.with_suffix("")).exists():
                os.replace(replaced, final)
        for path in reversed(self._all()):
            try:
                verify(path)
            except TornCheckpoint as error:
                self.torn.append(str(error))
                self._passed_over.append(path)
                continue
            return path
        return None

    def _all(self) -> list[Path]:
        found = [p for p in self._folder.glob("step-*") if p.name.removeprefix("step-").isdigit()]
        return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def verify(path: Path) -> None:
    """Compares every file with the manifest.

    Raises:
        TornCheckpoint: names the file, what was expected and what is there.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise TornCheckpoint(f"{path} has no readable {MANIFEST}: {error}") from None
    for name, expected in manifest.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else -1
        if size != expected["bytes"]:
            raise TornCheckpoint(f"{file} should have {expected['bytes']} bytes and has {max(size, 0)}")
        if _checksum(file) != expected["xxh3"]:
            raise TornCheckpoint(f"{file} has the right size and other content than when it was written")


def load_state(path: Path) -> dict[str, Any]:
    """The controller's part of a checkpoint; dataclasses come back as dicts."""
    state: dict[str, Any] = json.loads((path / STATE).read_text())
    return state


def is_disk_full(error: BaseException | None) -> bool:
    """Whether a full disk is behind the error; libraries wrap it, or tell it in words alone."""
    while error is not None:
        if isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in _FULL):
            return True
        if os.strerror(errno.ENOSPC).lower() in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def _fields_of(value: Any) -> dict[str, Any]:
    """One level of a dataclass; json comes back for what is in it."""
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
