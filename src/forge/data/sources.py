"""Where rows come from: a reasoning-gym task, the toy task, local files, or the Hugging Face hub.

A source gives rows by number (`IndexedRows`) or, when streaming, in the order of the files (`StreamedRows`). In place
of a row that cannot be used stands the reason, in a word by which it is counted. What a row is, the caller decides: a
`Row` here, a conversation in `forge.data.conversations`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, TypeVar

from forge.data.errors import DataError

R = TypeVar("R")

Question = str | list[dict[str, str]]
"""The user's question, or a conversation that ends with it."""

PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "messages")
TARGET_COLUMNS = ("answer", "target", "solution", "label")

DEFAULT_SIZE = 10_000  # problems of a generated task
# A task makes problem i from the number seed + i. Held-out problems have numbers that training does not reach, and the
# same ones whatever the run's seed is, so that runs can be compared. All stay under 2**32, NumPy's limit.
_HELD_OUT_SEED = 3_000_000_000
_SEED_SPACING = 1_000_003  # so that runs with neighbouring seeds share no problem
_TOY_TRAINING_STARTS = 1000  # the problems before that one are held out


@dataclass(kw_only=True, slots=True)
class Row:
    """One problem, before it is put into a conversation."""

    id: str
    question: Question
    target: str

    @property
    def text(self) -> str:
        """The question as text: of a conversation, all that the user says."""
        if isinstance(self.question, str):
            return self.question
        return "\n".join(message["content"] for message in self.question if message["role"] == "user")


@dataclass(kw_only=True, slots=True)
class IndexedRows(Generic[R]):
    """Rows by number. `get` gives a row, or the reason why it cannot be used."""

    size: int
    get: Callable[[int], R | str]


@dataclass(kw_only=True, slots=True)
class StreamedRows(Generic[R]):
    """Rows in order. `read(start)` begins at row number `start`; a reason stands for a row that cannot be used."""

    read: Callable[[int], Iterator[R | str]]


Source = IndexedRows[R] | StreamedRows[R]
RowReader = Callable[[Sequence[str]], Callable[[Mapping[str, Any], int], R | str]]
"""The names of a table's columns → (the values of a row, its number) → the row, or why it cannot be used."""


def toy_rows(*, size: int | None, held_out: bool) -> IndexedRows[Row]:
    """The toy task of `forge.testing`."""
    from forge.testing.toy_task import problem

    first = 0 if held_out else _TOY_TRAINING_STARTS

    def get(index: int) -> Row:
        question, target = problem(first + index)
        return Row(id=_generated_id("toy", index, held_out=held_out), question=question, target=target)

    return IndexedRows(size=size or DEFAULT_SIZE, get=get)


def reasoning_gym_rows(
    name: str | None, parameters: Mapping[str, Any], *, size: int | None, seed: int, held_out: bool
) -> IndexedRows[Row]:
    """Problems of a reasoning-gym task, each made when it is asked for.

    Raises:
        DataError: no such task, or parameters that it does not take.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name is None or name not in DATASETS:
        raise DataError(f"dataset.name must be a reasoning-gym task, got {name!r}{did_you_mean(str(name), DATASETS)}")
    reserved = {"size", "seed"} & set(parameters)
    if reserved:
        raise DataError(
            f"dataset.parameters must not set {', '.join(sorted(reserved))}: use dataset.size and training.seed."
        )
    rows = size or DEFAULT_SIZE
    first = _HELD_OUT_SEED if held_out else seed * _SEED_SPACING % 2**31
    try:
        task = reasoning_gym.create_dataset(name, size=rows, seed=first, **parameters)
        task[0]
    except Exception as error:  # each task checks its parameters in its own way
        raise DataError(f"dataset.parameters {dict(parameters)!r} do not fit the task {name}: {error}") from error

    def get(index: int) -> Row:
        entry = task[index]
        answer = entry["answer"]
        return Row(
            id=_generated_id(name, index, held_out=held_out),
            question=entry["question"],
            target="" if answer is None else str(answer),
        )

    return IndexedRows(size=rows, get=get)


def _generated_id(name: str, index: int, *, held_out: bool) -> str:
    return f"{name}/held-out/{index}" if held_out else f"{name}/{index}"


def table_rows(table: Any, *, reader: RowReader[R], label: str) -> Source[R]:
    """Rows of a `datasets` table, streamed or not.

    Args:
        table: a `datasets.Dataset` or `IterableDataset`.
        reader: makes the rows.
        label: what the rows are called in messages.

    Raises:
        DataError: the table is empty; and what `reader` raises.
    """
    from datasets import Dataset

    if isinstance(table, Dataset):
        if len(table) == 0:
            raise DataError(f"{label} is empty: it has no rows.")
        make = reader(table.column_names)

        def get(index: int) -> R | str:
            try:
                values = table[index]
            except Exception as error:  # a date that Python does not have, a picture that is damaged
                raise DataError(f"Reading row {index} of {label} failed: {type(error).__name__}: {error}") from error
            return make(values, index)

        return IndexedRows(size=len(table), get=get)

    names = table.column_names or list(next(iter(_guarded(iter(table), label)), {}))
    if not names:
        raise DataError(f"{label} is empty: it has no rows.")
    make = reader(names)

    def read(start: int) -> Iterator[R | str]:
        rows = _guarded(iter(table.skip(start)), label)
        return (make(row, index) for index, row in zip(count(start), rows, strict=False))

    return StreamedRows(read=read)


def problem_reader(columns: Any, label: str) -> RowReader[Row]:
    """For `table_rows`: a row is a question and its answer.

    columns: has `prompt` and `target`, the names of columns or None to find them.
    Raises, once the names are known:
        DataError: no such column; the message lists those that exist.
    """

    def reader(existing: Sequence[str]) -> Callable[[Mapping[str, Any], int], Row | str]:
        prompt = find_column("prompt", columns.prompt, PROMPT_COLUMNS, existing, label)
        target = find_column("target", columns.target, TARGET_COLUMNS, existing, label)
        return lambda values, index: _row(values, index, prompt, target, label)

    return reader


def _guarded(rows: Iterator[dict[str, Any]], label: str) -> Iterator[dict[str, Any]]:
    try:
        yield from rows
    except Exception as error:  # a connection that broke, a damaged file: `datasets` has no class for them
        raise DataError(f"Reading {label} failed: {type(error).__name__}: {error}") from error


def find_column(use: str, wanted: str | None, usual: Sequence[str], existing: Sequence[str], label: str) -> str:
    """The column to take: the wanted one, or the first of the usual ones that exists.

    Raises:
        DataError: there is none; the message lists those that exist.
    """
    if wanted is not None:
        if wanted in existing:
            return wanted
        raise DataError(
            f"dataset.columns.{use} must be a column of {label}, got {wanted!r}: it has {', '.join(existing)}"
            f"{did_you_mean(wanted, existing)}"
        )
    found = next((name for name in usual if name in existing), None)
    if found is None:
        raise DataError(
            f"{label} has no column {' or '.join(usual)}: it has {', '.join(existing)}. "
            f"Fix: set dataset.columns.{use} to one of them."
        )
    return found


def _row(values: Mapping[str, Any], index: int, prompt: str, target: str, label: str) -> Row | str:
    question, answer = values.get(prompt), values.get(target)
    if isinstance(question, list):
        _check_conversation(question, prompt, f"row {index} of {label}")
    elif question is not None:
        question = str(question)
        question = question if question.strip() else None
    if not question or answer is None:
        return "incomplete"
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
    return Row(id=f"{label}/{index}", question=question, target=text)


def _check_conversation(messages: list[Any], column: str, where: str) -> None:
    rule = "must be text or a list of {role, content} that ends with the user's turn"
    said = [(m.get("role"), m.get("content")) if isinstance(m, Mapping) else (None, None) for m in messages]
    if not said or said[-1][0] != "user" or not all(isinstance(part, str) for pair in said for part in pair):
        raise DataError(f"Column {column} {rule}, but {where} holds {messages!r:.200}.")


def did_you_mean(value: str, known: Any) -> str:
    """
    >>> did_you_mean("chain_sun", ["chain_sum", "gsm_symbolic"])
    '; did you mean chain_sum?'
    """
    import difflib

    close = difflib.get_close_matches(value, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else "."
