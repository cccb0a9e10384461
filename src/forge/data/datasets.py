"""From a data set to samples: train stream and held-out problems.

A row becomes a `Sample`: the conversation around the question, rendered and tokenized once. `SampleStream` yields them
for ever, shuffled anew in each epoch, and can be put back to any point of that road.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from forge.data.chat import ChatFormat
from forge.data.errors import DataError
from forge.data.sources import IndexedRows, Row, Source, StreamedRows, problem_reader
from forge.data.splits import Opener, R, hold_out, text_key

__all__ = ["DataError", "Sample", "SampleStream", "build_datasets", "text_key"]

logger = logging.getLogger(__name__)

_SHUFFLE_BLOCK = 1000  # rows of a stream that are shuffled among themselves


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
    epoch: int = 0
    """In which pass over the data set it came, counted from 0."""


S = TypeVar("S")


class SampleStream(Generic[R, S]):
    """Endless samples, epoch after epoch; each epoch in an order of its own, made from the seed.

    Consumes: rows of a source. Produces: samples. Waits for: the disk or the hub when streaming. Ends: never.

    Args:
        source: where the rows come from.
        make: row → sample, or the reason why it is dropped, such as too_long.
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
        source: Source[R],
        *,
        make: Callable[[R], S | str],
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

    def __iter__(self) -> SampleStream[R, S]:
        return self

    def __next__(self) -> S:
        while True:
            for row in self._rows:
                self._position += 1
                sample = self._use(row)
                if not isinstance(sample, str):
                    self._used_in_epoch += 1
                    return sample
                self.dropped[sample] += 1
            self._begin_next_epoch()

    @property
    def epoch(self) -> float:
        """Passes over the rows so far; of streamed rows, whose number is not known, whole ones only."""
        size = self._source.size if isinstance(self._source, IndexedRows) else math.inf
        return self._epoch + self._position / size

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

    def check(self, samples: int = 1) -> None:
        """Make the first samples, without moving on.

        Raises:
            DataError: there are none; and what making one raises.
        """
        state, dropped = self.state_dict(), self.dropped.copy()
        for _ in range(samples):
            next(self)
            if self._epoch > state["epoch"]:
                break
        self.load_state_dict(state)
        self.dropped = dropped

    def _use(self, row: R | str) -> S | str:
        if isinstance(row, str):
            return row
        return "held_out" if text_key(row.text) in self._excluded else self._make(row)

    def _begin_next_epoch(self) -> None:
        if self._used_in_epoch == 0:
            raise DataError(_why_empty(self.dropped))
        self._epoch, self._position, self._used_in_epoch = self._epoch + 1, 0, 0
        self._rows = self._read()

    def _read(self) -> Iterator[R | str]:
        """The rows of this epoch from the current position on."""
        if isinstance(self._source, IndexedRows):
            order = list(range(self._source.size))
            self._mix(order, 0)
            return map(self._source.get, itertools.islice(order, self._position, None))
        return self._read_stream(self._source)

    def _read_stream(self, source: StreamedRows[R]) -> Iterator[R | str]:
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
) -> tuple[SampleStream[Row, Sample], list[Sample]]:
    """The training stream and the held-out samples, which are never trained on (compared by the question's text).

    See `forge.data.splits.Opener` for which problems are held out.

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

    def make(row: Row) -> Sample | str:
        try:
            prompt, ids = chat.render(row.question)
        except DataError as error:
            raise DataError(f"{row.id}: {error}") from error
        if len(ids) > max_prompt_tokens:
            return "too_long"
        return Sample(id=row.id, prompt=prompt, prompt_ids=ids, target=row.target, question=row.text)

    opener = Opener(
        from_problem=lambda row: row, reader=lambda label: problem_reader(dataset.columns, label), seed=seed
    )
    source, candidates = opener.train_and_held_out(dataset, samples=evaluation.samples, split=evaluation.split)
    held_out = hold_out(candidates, make, samples=evaluation.samples)
    if len(held_out) < evaluation.samples:
        logger.warning("eval.samples is %d, but only %d problems could be held out", evaluation.samples, len(held_out))
    train = SampleStream(source, make=make, excluded=held_out, seed=seed, shuffle=dataset.shuffle)
    try:
        train.check()
    except DataError as error:
        limit = (
            f" The limit is {max_prompt_tokens} tokens of a prompt, what training.seq_len leaves beside "
            "grpo.max_new_tokens."
        )
        raise DataError(f"{error}{limit if train.dropped['too_long'] else ''}") from None
    return train, list(held_out.values())


_REASONS = {
    "too_long": "too long",
    "held_out": "held out for evaluation",
    "incomplete": "without a question or an answer",
    "no_assistant": "without an assistant turn",
    "nothing_trained": "of which truncation left nothing to train on",
}


def _why_empty(dropped: Counter[str]) -> str:
    if not dropped:
        return "The data set is empty: it has no rows."
    counts = ", ".join(f"{number} {_REASONS.get(reason, reason)}" for reason, number in dropped.items())
    return f"No row of the data set can be trained on: {counts}."
