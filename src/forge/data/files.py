"""Opening a data set of files through `datasets`: local json, jsonl, parquet and csv, folders, and hub ids."""

from __future__ import annotations

import codecs
import contextlib
import json
import logging
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge.data.errors import DataError
from forge.data.sources import did_you_mean

FORMATS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv"}
HELD_OUT_SPLITS = ("test", "validation", "valid", "dev")
_PROBE_SECONDS = 15.0


class Tables:
    """The splits of one data set.

    Args:
        path: a local file or folder, or a hub id.
        name: the subset of a hub data set; None is the only one, or "main" where there are several.
        streaming: read rows when they are needed.

    Raises:
        DataError: nothing is there, the hub cannot be reached, or there are several subsets and none was chosen.
    """

    def __init__(self, path: str, *, name: str | None = None, streaming: bool = False) -> None:
        self._streaming = streaming
        self._local = Path(path).expanduser()
        self.path = path
        self._is_saved = False
        self._arguments: dict[str, Any] = {}
        if self._local.exists():
            self._open_local(name)
        elif _looks_local(path):
            raise DataError(f"dataset.path {path!r}: there is no such file or folder.")
        else:
            check_hub(path)
            self._arguments = {"path": path, "name": self._subset(name)}
        self.splits: list[str] = self._find_splits()

    def label(self, split: str) -> str:
        """What the rows of a split are called in ids and messages."""
        if self._arguments.get("data_files"):
            return self._local.name
        return f"{self._local.name if self._local.exists() else self.path}/{split}"

    def open(self, split: str) -> Any:
        """The split as a `datasets.Dataset`, or an `IterableDataset` when streaming.

        Raises:
            DataError: no such split, or a damaged file (for JSON lines, the message has the line number).
        """
        if split not in self.splits:
            raise DataError(
                f"dataset.path {self.path!r} has no split {split!r}: it has {', '.join(self.splits)}"
                f"{did_you_mean(split, self.splits)}"
            )
        with self._clear_errors():
            if self._is_saved:
                import datasets

                saved = datasets.load_from_disk(str(self._local))
                table = saved[split] if isinstance(saved, datasets.DatasetDict) else saved
                return table.to_iterable_dataset() if self._streaming else table
            for file in self._json_files():
                refuse_null_rows(file)
            return _load(**self._arguments, split=split, streaming=self._streaming)

    def _open_local(self, name: str | None) -> None:
        if name is not None:
            raise DataError(f"dataset.name {name!r} is for hub data sets and reasoning_gym; {self.path!r} is local.")
        if self._local.is_dir():
            self._is_saved = any((self._local / file).exists() for file in ("dataset_dict.json", "state.json"))
            self._arguments = {"path": str(self._local)}
            return
        format_ = FORMATS.get(self._local.suffix)
        if format_ is None:
            raise DataError(f"dataset.path {self.path!r} must end in one of {', '.join(FORMATS)}, or be a folder.")
        self._arguments = {"path": format_, "data_files": {"train": str(self._local)}}

    def _subset(self, name: str | None) -> str | None:
        import datasets

        if name is not None:
            return name
        with self._clear_errors():
            subsets = datasets.get_dataset_config_names(self.path)
        if len(subsets) > 1 and "main" not in subsets and "default" not in subsets:
            raise DataError(
                f"dataset.path {self.path!r} has several subsets. Fix: set dataset.name to one of {', '.join(subsets)}."
            )
        return next((subset for subset in ("default", "main") if subset in subsets), None)

    def _find_splits(self) -> list[str]:
        import datasets

        if self._is_saved:
            file = self._local / "dataset_dict.json"
            return list(json.loads(file.read_text())["splits"]) if file.exists() else ["train"]
        if "data_files" in self._arguments:
            return ["train"]
        with self._clear_errors():
            return [
                str(s) for s in datasets.get_dataset_split_names(self._arguments["path"], self._arguments.get("name"))
            ]

    @contextlib.contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """Turns what `datasets` raises into one message, with file and line where JSON is damaged."""
        try:
            yield
        except DataError:
            raise
        except Exception as error:  # dozens of classes, of `datasets`, pyarrow, pandas and huggingface_hub
            if is_unreachable(error):
                raise DataError(_unreachable(self.path, error)) from error
            if self._local.is_file() and not self._local.read_bytes().strip():
                raise DataError(f"dataset.path {self.path!r} is empty: it has no rows.") from error
            first = str(error.__cause__ or error).strip().partition("\n")[0]
            raise DataError(
                self._bad_json_line(error)
                or f"dataset.path {self.path!r} cannot be read: {type(error).__name__}: {first}"
            ) from error

    def _bad_json_line(self, error: BaseException) -> str | None:
        """The first line of the local JSON-lines files that is not a JSON object, or lacks a key that others have."""
        if isinstance(error, OSError):  # then the files themselves cannot be read, and say so
            return None
        for file in self._json_files():
            if problem := find_bad_line(file):
                return problem
            # `datasets` takes the keys of the first line for those of all.
            if isinstance(error, KeyError) and error.args and (problem := _line_without(file, error.args[0])):
                return problem
        return None

    def _json_files(self) -> list[Path]:
        """Of a local data set; none of one on the hub."""
        files = [self._local] if self._local.is_file() else sorted(self._local.rglob("*"))
        return [file for file in files if FORMATS.get(file.suffix) == "json" and file.is_file()]


def refuse_null_rows(file: Path) -> None:
    """pyarrow 26 ends the process (SIGSEGV) where the first row of a block is null, so none may be.

    Raises:
        DataError: with the number of the line.
    """
    if not file.stat().st_size:
        return
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        first = re.match(rb"\s*(\[?)\s*(null)?", content)
        assert first is not None
        start = first.start(2)
        if start < 0 and not first[1]:  # a document may have a null in a line of its own, deep within
            start = content.find(b"\nnull") + 1 or -1
        if start >= 0:
            line = content[:start].count(b"\n") + 1
            raise DataError(f"{file}, line {line}: must be a JSON object, got null. Remove it.")


def find_bad_line(file: Path) -> str | None:
    """Where a file of JSON lines is damaged, in one sentence; None if it is sound, or is one JSON document.

    >>> find_bad_line(Path("rows.jsonl"))       # {"a": 1} in the first line, {"a": in the second
    'rows.jsonl, line 2: not valid JSON: Expecting value at column 7. Fix or remove the line.'
    """
    blank = None
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1 and line.lstrip()[:1] == b"[":
                return _bad_document(file)
            if not line.strip():
                blank = blank or number
            elif problem := _problem_of(line):
                return f"{file}, line {number}: {problem}"
    return f"{file}, line {blank}: is empty. Remove the line." if blank else None


def _problem_of(line: bytes) -> str | None:
    """What is wrong with one line of JSON lines: what JSON does not allow, and what `datasets` does not take."""
    if line.startswith(codecs.BOM_UTF8):
        return "begins with a byte-order mark. Save the file as UTF-8 without one."
    try:
        record = json.loads(line.decode())
        if not isinstance(record, dict):
            return f"must be a JSON object, got {line.strip()[:80]!r}."
        json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
    except json.JSONDecodeError as error:
        return f"not valid JSON: {error.msg} at column {error.colno}. Fix or remove the line."
    except UnicodeDecodeError as error:
        return f"not valid UTF-8: {error.reason} at byte {error.start}."
    except UnicodeEncodeError as error:
        return f"holds {error.object[error.start]!r}, half of a character. Fix or remove the line."
    except RecursionError:
        return "is nested too deeply. Fix or remove the line."
    except ValueError:
        return "holds a number that is not finite, or too long. Fix or remove the line."
    return None


def _line_without(file: Path, key: str) -> str | None:
    """The first line that does not have `key`."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            record = json.loads(line) if line.strip() else {key: None}
            if isinstance(record, dict) and key not in record:
                return f"{file}, line {number}: has no {key!r}. Give it one, null if there is no value."
    return None


def _bad_document(file: Path) -> str | None:
    try:
        json.loads(file.read_bytes().decode())
    except json.JSONDecodeError as error:
        return f"{file}, line {error.lineno}: not valid JSON: {error.msg} at column {error.colno}."
    except UnicodeDecodeError as error:
        return f"{file}: not valid UTF-8: {error.reason} at byte {error.start}."
    except (ValueError, RecursionError) as error:
        return f"{file}: {error}."
    return None


def _load(**arguments: Any) -> Any:
    import datasets

    logger = logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return datasets.load_dataset(**arguments)
    finally:
        logger.setLevel(level)


def _looks_local(path: str) -> bool:
    return Path(path).suffix in FORMATS or path.startswith((".", "/", "~")) or path.count("/") > 1


def check_hub(path: str) -> None:
    """Make sure that the hub has the data set, or that a copy of it is in the local cache.

    `datasets` itself would first print a page of retries, for half a minute.
    Raises:
        DataError: one message that names the id and what to do.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    if any(_cached_copies(path)):
        return
    if constants.HF_HUB_OFFLINE:
        raise DataError(_unreachable(path, "HF_HUB_OFFLINE is set"))
    try:
        HfApi().dataset_info(path, timeout=_PROBE_SECONDS)
    except HFValidationError as error:
        raise DataError(f"dataset.path {path!r} is neither a local file or folder nor a hub id: {error}") from error
    except RepositoryNotFoundError as error:
        raise DataError(
            f"dataset.path {path!r}: the hub has no such data set, or it is private or gated. "
            "Check the spelling, or log in with `hf auth login`."
        ) from error
    except Exception as error:  # every way in which a network can fail
        raise DataError(_unreachable(path, error)) from error


def _cached_copies(path: str) -> Iterator[Path]:
    import datasets
    from huggingface_hub import constants

    yield from Path(constants.HF_HUB_CACHE).glob(f"datasets--{path.replace('/', '--')}/snapshots/*")
    yield from Path(datasets.config.HF_DATASETS_CACHE).glob(f"{path.replace('/', '___')}/*")


def is_unreachable(error: BaseException) -> bool:
    """Whether an error of `datasets` means that the hub could not be reached."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ConnectionError | TimeoutError) or type(seen).__name__ in (
            "ConnectError",
            "ConnectTimeout",
            "LocalEntryNotFoundError",
            "OfflineModeIsEnabled",
            "ReadTimeout",
        ):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _unreachable(path: str, reason: object) -> str:
    text = str(reason).strip().partition("\n")[0]
    return (
        f"dataset.path {path!r}: the Hugging Face hub cannot be reached ({text}), and there is no local copy. "
        "Fix: connect to the network, or set dataset.path to a local json, jsonl or parquet file or a folder of them."
    )
