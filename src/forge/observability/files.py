"""The run folder's files of lines: opened with a clear word to the user, cut back when a run resumes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from forge.config.errors import ConfigError
from forge.config.rules import output_problems


def make_folder(folder: Path) -> Path:
    """Makes `folder` and its parents.

    Raises:
        ConfigError: it cannot be made or written to; the message names the folder and the reason.
    """
    problems = list(output_problems(str(folder)))
    if problems:
        raise ConfigError(problems)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def strict_json(record: Mapping[str, Any]) -> str:
    """One line of strict JSON. NaN and infinity, which JSON does not have, become null.

    >>> strict_json({"step": 1.0, "loss": float("nan")})
    '{"step": 1, "loss": null}'
    """
    line = json.dumps(_plain(record), ensure_ascii=False, allow_nan=False)
    # Half of a character, as a sampled byte sequence or a file's name may hold, fits into no UTF-8 file.
    line = line.encode("utf-8", "replace").decode("utf-8")
    return _OTHER_LINE_BREAKS.sub(lambda match: f"\\u{ord(match.group()):04x}", line)


_OTHER_LINE_BREAKS = re.compile("[\x85\u2028\u2029]")  # at which str.splitlines() would cut a JSON object in two


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


class JsonLines:
    """A file with one JSON object a line, each on disk for a reader as soon as `write` returns.

    Args:
        path: made with its folder if it is not there; appended to if it is.
        resume_step: the step that a resumed run continues from. Lines of later steps are dropped first, because those
            steps are done again, and so is a last line that was cut off. None starts a new file.

    Raises:
        ConfigError: the folder cannot be written to.
    """

    def __init__(self, path: Path, *, resume_step: int | None) -> None:
        make_folder(path.parent)
        self._path = path
        self._file = _open(path, resume_step)

    def rewind(self, resume_step: int | None) -> None:
        """Drops the lines of later steps, as opening the file does: the run goes on from that step."""
        self._file.close()
        self._file = _open(self._path, resume_step)

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds one line; `record` holds a `step`, by which a resumed run knows what to keep."""
        line = strict_json(record) + "\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:  # which does not say where
            with contextlib.suppress(OSError):  # it would try to write the rest once more
                self._file.close()
            reason = f"{error.strerror}, {len(line.encode())} bytes were to be added"
            raise OSError(error.errno, reason, str(self._path)) from error

    def flush_to_disk(self) -> None:
        """Returns when what was written would survive the machine."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _open(path: Path, resume_step: int | None) -> TextIO:
    if resume_step is None:
        path.unlink(missing_ok=True)
    elif path.exists():
        keep_until(path, resume_step)
    return path.open("a", encoding="utf-8")


def keep_until(path: Path, step: int) -> None:
    """Drops the lines of steps after `step`, and those that are no JSON object. The file is replaced in one move.

    Example:
        steps 1, 2, 3, and half a line of 4, kept until 2 → steps 1, 2
    """
    aside = path.with_name(path.name + ".partial")
    with path.open(encoding="utf-8", errors="replace") as old, aside.open("w", encoding="utf-8") as new:
        new.writelines(line for line in old if _step_of(line) <= step)
        new.flush()
        os.fsync(new.fileno())
    os.replace(aside, path)


def _step_of(line: str) -> float:
    """The line's step; infinity where it has none, a torn line included."""
    try:
        record = json.loads(line)
    except ValueError:
        return math.inf
    step = record.get("step") if isinstance(record, dict) and line.endswith("\n") else None
    return step if isinstance(step, int | float) else math.inf
