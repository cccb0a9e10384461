"""The rows of a data set that are trained on, and those that are held out of it."""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from forge.data.sources import (
    IndexedRows,
    Row,
    RowReader,
    Source,
    StreamedRows,
    reasoning_gym_rows,
    table_rows,
    toy_rows,
)

_TRIES = 20  # generated problems that are looked at for one held-out problem, since a task may repeat itself


class HasText(Protocol):
    """A row of any kind; two of the same text are the same row."""

    @property
    def text(self) -> str: ...


R = TypeVar("R", bound=HasText)
S = TypeVar("S")


def text_key(text: str) -> str:
    """What two texts have in common if they are the same but for case and spacing."""
    return hashlib.sha256(" ".join(text.casefold().split()).encode("utf-8", "surrogatepass")).hexdigest()


class Opener(Generic[R]):
    """Opens data sets as rows of one kind.

    Args:
        from_problem: a generated problem → a row.
        reader: what rows are called in messages → a reader for `table_rows`.
        seed: of generated problems.
    """

    def __init__(self, *, from_problem: Callable[[Row], R], reader: Callable[[str], RowReader[R]], seed: int) -> None:
        self._from_problem = from_problem
        self._reader = reader
        self._seed = seed

    def train_and_held_out(
        self, source: Any, *, samples: int, split: str | None, split_is_required: bool = True
    ) -> tuple[Source[R], Iterable[R | str]]:
        """(rows to train on, candidates for `samples` rows that are not).

        Candidates are: of a generated task, problems made from other numbers; else the rows of `split`, or of the data
        set's test or validation split; else rows that a hash of their text picks (of a stream, the first ones). They do
        not depend on the seed, so that runs can be compared.

        Args:
            source: a `forge.config.SourceConfig`.
            samples: how many are wanted; 0 gives none.
            split: the split to take them from; None looks for one.
            split_is_required: False passes over a `split` that the data set does not have.

        Raises:
            DataError: the data set cannot be had, has no such split or columns, or is empty.
        """
        if is_generated(source):
            return self._generated(source, size=source.size), in_order(self.all_held_out(source, samples=samples))
        from forge.data.files import HELD_OUT_SPLITS, Tables

        tables = Tables(source.path, name=source.name, streaming=source.streaming)
        train = self._table(tables, source, source.split, size=source.size)
        if not samples:
            return train, []
        others = [name for name in HELD_OUT_SPLITS if name in tables.splits and name != source.split]
        wanted = split if split_is_required or split in tables.splits else None
        wanted = wanted or next(iter(others), None)
        if wanted is None or wanted == source.split:
            return train, _set_aside(train, samples=samples)
        return train, in_order(self._table(tables, source, wanted, size=None))

    def all_held_out(self, source: Any, *, samples: int) -> Source[R]:
        """Every row of a data set that is there for validation alone; of a generated task, enough for `samples`."""
        if source.path == "toy":
            return self._generated(source, size=2 * samples, held_out=True)
        if source.path == "reasoning_gym":
            return self._generated(source, size=max(1, _TRIES * samples), held_out=True)
        from forge.data.files import Tables

        tables = Tables(source.path, name=source.name, streaming=source.streaming)
        return self._table(tables, source, source.split, size=source.size)

    def _generated(self, source: Any, *, size: int | None, held_out: bool = False) -> IndexedRows[R]:
        if source.path == "toy":
            problems = toy_rows(size=size, held_out=held_out)
        else:
            problems = reasoning_gym_rows(source.name, source.parameters, size=size, seed=self._seed, held_out=held_out)

        def get(index: int) -> R | str:
            problem = problems.get(index)
            return problem if isinstance(problem, str) else self._from_problem(problem)

        return IndexedRows(size=problems.size, get=get)

    def _table(self, tables: Any, source: Any, split: str, *, size: int | None) -> Source[R]:
        table, label = tables.open(split), tables.label(split)
        if size is not None:
            table = table.take(size) if source.streaming else table.select(range(min(size, len(table))))
        return table_rows(table, reader=self._reader(label), label=label)


def hold_out(
    candidates: Iterable[R | str], make: Callable[[R], S | str], *, samples: int, taken: Iterable[str] = ()
) -> dict[str, S]:
    """The first `samples` candidates that can be used, each another text, by the key of their text.

    Args:
        candidates: rows, or reasons why they cannot be used.
        make: row → sample, or the reason why it cannot be used.
        samples: how many.
        taken: keys of texts that are held out already.
    """
    chosen: dict[str, S] = {}
    seen = set(taken)
    for row in candidates if samples else []:
        if isinstance(row, str) or (key := text_key(row.text)) in seen:
            continue
        sample = make(row)
        if not isinstance(sample, str):
            chosen[key] = sample
            seen.add(key)
            if len(chosen) == samples:
                break
    return chosen


def is_generated(source: Any) -> bool:
    """Whether a data set is made by a program instead of read."""
    return source.path in ("toy", "reasoning_gym")


def in_order(source: Source[R]) -> Iterator[R | str]:
    """Every row once."""
    if isinstance(source, StreamedRows):
        return source.read(0)
    return map(source.get, range(source.size))


def _set_aside(source: Source[R], *, samples: int) -> Iterable[R | str]:
    """Rows of the training data to hold out: at most half of them, picked by their text so that the order is no matter.

    Twice as many as asked for come out, since some may repeat another or be too long.
    """
    if isinstance(source, StreamedRows):
        return itertools.islice(source.read(0), 2 * samples)
    rows = (row for row in map(source.get, range(source.size)) if not isinstance(row, str))
    by_key = {text_key(row.text): row for row in rows}
    return [by_key[key] for key in heapq.nsmallest(min(2 * samples, len(by_key) // 2), by_key)]
