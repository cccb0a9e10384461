"""From a data set to samples: train stream and held-out problems.

A row becomes a `Sample`: the conversation around the question, rendered and tokenized once. `SampleStream` yields them
for ever, shuffled anew in each epoch, and can be put back to any point of that road.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from forge.data.chat import ChatFormat
from forge.data.errors import DataError
from forge.data.sources import IndexedRows, Row, Source, StreamedRows, reasoning_gym_rows, table_rows, toy_rows

__all__ = ["DataError", "Sample", "SampleStream", "build_datasets"]

logger = logging.getLogger(__name__)

_SHUFFLE_BLOCK = 1000  # rows of a stream that are shuffled among themselves
_TRIES = 20  # generated problems that are looked at for one held-out problem, since a task may repeat itself


@dataclass(kw_only=True, slots=True)
class Sample:
    """One problem, ready for the generator."""

    id: str
    """Which problem of which data set, the same in every run: chain_sum/123."""
    prompt: str
    """The rendered conversation, chat template included."""
    prompt_ids: list[int]
    target: str
    question: str
    """The user's words alone, without system prompt, examples and template."""


class SampleStream:
    """Endless samples, epoch after epoch; each epoch in an order of its own, made from the seed.

    Consumes: rows of a source. Produces: samples. Waits for: the disk or the hub when streaming. Ends: never.

    Args:
        source: where the rows come from.
        make: row → sample, or None where the prompt is too long.
        excluded: keys (see `text_key`) of questions never to be yielded, those that are held out.
        seed: of the order.
        shuffle: False keeps the rows in order.

    Attributes:
        dropped: how many rows were passed over so far, by reason: too_long, held_out, incomplete.

    Raises:
        DataError: a whole epoch had no row that can be used.

    Example:
        >>> train, held_out = build_datasets(config.dataset, config.eval, tokenizer, seed=1, max_prompt_tokens=512)
        >>> next(train).id
        'chain_sum/4711'
        >>> train.state_dict()
        {'epoch': 0, 'position': 1, 'seed': 1}
    """

    def __init__(
        self,
        source: Source,
        *,
        make: Callable[[Row], Sample | None],
        excluded: Iterable[str] = (),
        seed: int,
        shuffle: bool = True,
    ) -> None:
        self._source = source
        self._make = make
        self._excluded = frozenset(excluded)
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0  # rows of this epoch that are behind us, used or not
        self._used_in_epoch = 0
        self._rows = self._read()
        self.dropped: Counter[str] = Counter()

    def __iter__(self) -> SampleStream:
        return self

    def __next__(self) -> Sample:
        while True:
            for row in self._rows:
                self._position += 1
                sample = self._use(row)
                if sample is not None:
                    self._used_in_epoch += 1
                    return sample
            self._begin_next_epoch()

    def state_dict(self) -> dict[str, int]:
        """Where the stream stands, for JSON."""
        return {"epoch": self._epoch, "position": self._position, "seed": self._seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to where `state_dict` was taken: the next sample is the one that followed then.

        Raises:
            DataError: the state is of another seed or of a longer data set.
        """
        if state["seed"] != self._seed:
            raise DataError(f"training.seed must stay {state['seed']} for a run to be resumed, got {self._seed}.")
        if isinstance(self._source, IndexedRows) and state["position"] > self._source.size:
            raise DataError(
                f"The data set has {self._source.size} rows, but the run to be resumed had read {state['position']}: "
                "it is another data set. Fix: the original dataset settings, or a new output_dir."
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._used_in_epoch = self._position  # rows before us were used: their epoch is not an empty one
        self._rows = self._read()

    def check_not_empty(self) -> None:
        """Look for the first sample, without moving on.

        Raises:
            DataError: there is none.
        """
        state, dropped = self.state_dict(), self.dropped.copy()
        next(self)
        self.load_state_dict(state)
        self.dropped = dropped

    def _use(self, row: Row | None) -> Sample | None:
        if row is None:
            self.dropped["incomplete"] += 1
        elif text_key(row.text) in self._excluded:
            self.dropped["held_out"] += 1
        elif (sample := self._make(row)) is None:
            self.dropped["too_long"] += 1
        else:
            return sample
        return None

    def _begin_next_epoch(self) -> None:
        if self._used_in_epoch == 0:
            raise DataError(_why_empty(self.dropped))
        self._epoch, self._position, self._used_in_epoch = self._epoch + 1, 0, 0
        self._rows = self._read()

    def _read(self) -> Iterator[Row | None]:
        """The rows of this epoch from the current position on."""
        if isinstance(self._source, IndexedRows):
            order = list(range(self._source.size))
            self._mix(order, 0)
            return map(self._source.get, itertools.islice(order, self._position, None))
        return self._read_stream(self._source)

    def _read_stream(self, source: StreamedRows) -> Iterator[Row | None]:
        # Blocks, not a sliding buffer: what comes next is known from the block's number alone, so resuming is exact.
        start = self._position - self._position % _SHUFFLE_BLOCK
        behind = self._position - start
        rows = source.read(start)
        while block := list(itertools.islice(rows, _SHUFFLE_BLOCK)):
            self._mix(block, start)
            yield from block[behind:]
            start, behind = start + len(block), 0

    def _mix(self, items: list[Any], block: int) -> None:
        if self._shuffle:
            random.Random(f"{self._seed}/{self._epoch}/{block}").shuffle(items)


def build_datasets(
    dataset: Any, evaluation: Any, tokenizer: Any, *, seed: int, max_prompt_tokens: int
) -> tuple[SampleStream, list[Sample]]:
    """The training stream and the held-out samples, which are never trained on (compared by the question's text).

    Held-out problems are: for a generated task, problems made from other numbers; else rows of `eval.split`, or of the
    data set's test or validation split; else rows that a hash of their text picks (of a stream, the first ones). They
    do not depend on the seed, so that runs can be compared.

    Args:
        dataset: the config's `dataset` section.
        evaluation: the config's `eval` section.
        tokenizer: a Hugging Face tokenizer.
        seed: of the order, and of generated problems.
        max_prompt_tokens: longer prompts are dropped and counted.

    Raises:
        DataError: the data set cannot be had, has no such columns, or has no usable row.
    """
    chat = ChatFormat(
        tokenizer,
        system_prompt=dataset.system_prompt,
        examples=[(example.prompt, example.response) for example in dataset.examples],
        prompt_template=dataset.prompt_template,
        chat_template=dataset.chat_template,
    )

    def make(row: Row) -> Sample | None:
        prompt, ids = chat.render(row.question)
        if len(ids) > max_prompt_tokens:
            return None
        return Sample(id=row.id, prompt=prompt, prompt_ids=ids, target=row.target, question=row.text)

    source, candidates = _open(dataset, evaluation, seed=seed)
    held_out = _hold_out(candidates, make, samples=evaluation.samples)
    if len(held_out) < evaluation.samples:
        logger.warning("eval.samples is %d, but only %d problems could be held out", evaluation.samples, len(held_out))
    keys = {text_key(sample.question) for sample in held_out}
    train = SampleStream(source, make=make, excluded=keys, seed=seed, shuffle=dataset.shuffle)
    try:
        train.check_not_empty()
    except DataError as error:
        limit = f" The limit is {max_prompt_tokens} tokens, what training.seq_len leaves beside grpo.max_new_tokens."
        raise DataError(f"{error}{limit if train.dropped['too_long'] else ''}") from None
    return train, held_out


def text_key(text: str) -> str:
    """What two questions have in common if they are the same but for case and spacing."""
    return hashlib.sha256(" ".join(text.casefold().split()).encode("utf-8", "surrogatepass")).hexdigest()


def _open(dataset: Any, evaluation: Any, *, seed: int) -> tuple[Source, Iterable[Row | None]]:
    """(rows to train on, rows that may be held out)."""
    wanted, size = evaluation.samples, dataset.size
    if dataset.path == "toy":
        return toy_rows(size=size, held_out=False), _in_order(toy_rows(size=2 * wanted, held_out=True))
    if dataset.path == "reasoning_gym":
        generated, other = (
            reasoning_gym_rows(dataset.name, dataset.parameters, size=rows, seed=seed, held_out=held_out)
            for rows, held_out in ((size, False), (max(1, _TRIES * wanted), True))
        )
        return generated, _in_order(other)
    from forge.data.files import HELD_OUT_SPLITS, Tables

    tables = Tables(dataset.path, name=dataset.name, streaming=dataset.streaming)
    table = tables.open(dataset.split)
    if size is not None:
        table = table.take(size) if dataset.streaming else table.select(range(min(size, len(table))))
    source = table_rows(table, columns=dataset.columns, label=tables.label(dataset.split))
    if isinstance(source, IndexedRows) and source.size == 0:
        raise DataError(f"{tables.label(dataset.split)} is empty: it has no rows.")
    other_splits = [split for split in HELD_OUT_SPLITS if split in tables.splits and split != dataset.split]
    held_out_split = evaluation.split or next(iter(other_splits), None)
    if not wanted:
        return source, []
    if held_out_split is None or held_out_split == dataset.split:
        return source, _set_aside(source, samples=wanted)
    label = tables.label(held_out_split)
    return source, _in_order(table_rows(tables.open(held_out_split), columns=dataset.columns, label=label))


def _in_order(source: Source) -> Iterator[Row | None]:
    if isinstance(source, StreamedRows):
        return source.read(0)
    return map(source.get, range(source.size))


def _set_aside(source: Source, *, samples: int) -> Iterable[Row | None]:
    """Rows of the training data to hold out: at most half of them, picked by their text so that the order is no matter.

    Twice as many as asked for come out, since some may repeat another or be too long.
    """
    if isinstance(source, StreamedRows):
        return itertools.islice(source.read(0), 2 * samples)
    rows = filter(None, map(source.get, range(source.size)))
    by_key = {text_key(row.text): row for row in rows}
    return [by_key[key] for key in heapq.nsmallest(min(2 * samples, len(by_key) // 2), by_key)]


def _hold_out(candidates: Iterable[Row | None], make: Callable[[Row], Sample | None], *, samples: int) -> list[Sample]:
    """The first `samples` distinct candidates that can be used."""
    chosen: dict[str, Sample] = {}
    rows = iter(candidates)
    while len(chosen) < samples and (row := next(rows, _END)) is not _END:
        if row is None or (key := text_key(row.text)) in chosen:
            continue
        if (sample := make(row)) is not None:
            chosen[key] = sample
    return list(chosen.values())


_END: Any = object()


def _why_empty(dropped: Counter[str]) -> str:
    if not dropped:
        return "The data set is empty: it has no rows."
    reasons = {
        "too_long": "with a prompt that is too long",
        "held_out": "held out for evaluation",
        "incomplete": "without a question or an answer",
    }
    counts = ", ".join(f"{number} {reasons[reason]}" for reason, number in dropped.items())
    return f"No row of the data set can be trained on: {counts}."
