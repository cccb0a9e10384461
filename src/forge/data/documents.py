"""From data sets to documents: tokens, which of them are trained, and the endless stream of them that a run consumes.

A row becomes a `Conversation` (`forge.data.conversations`), that becomes token ids with the assistant's turns
(`forge.data.chat_masks`), and those, cut to seq_len, are a `Document`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forge.data.chat_masks import ChatMasks
from forge.data.conversations import MEND, Conversation, InvalidRow, conversation_reader, worked_problem
from forge.data.datasets import SampleStream
from forge.data.errors import DataError
from forge.data.sources import IndexedRows, RowReader
from forge.data.splits import Opener, hold_out, in_order, is_generated

logger = logging.getLogger(__name__)

_CHECKED_ROWS = 100_000  # rows that are read before the start, to find one that is no conversation (some 10 s)
_CHECKED_SAMPLES = 100  # samples that are tokenized before the start


@dataclass(kw_only=True, slots=True)
class Document:
    """One sample of fine-tuning."""

    id: str
    """Which row of which data set, the same in every run: chats.jsonl/7."""
    token_ids: list[int]
    trained: list[bool]
    """Of each token, whether it is a target. Never of the first, which nothing predicts."""
    prompt_length: int = 0
    """Tokens before the assistant's last turn, generation prompt included; 0 where there is none."""
    truncated: bool = False
    """Whether it was cut to seq_len."""

    @property
    def prompt_ids(self) -> list[int]:
        """What the assistant's last turn answers."""
        return self.token_ids[: self.prompt_length]


class DocumentMaker:
    """Conversation → document.

    Args:
        masks: the tokenizer with its template.
        train_on: "assistant", "last_assistant" or "all". Plain text is trained whole.
        seq_len: the most tokens of a document.
        truncate: the side that a longer one is cut at, "right" or "left", or "drop".

    Example: of seven tokens, the last two of them the assistant's, cut at the left to four
        >>> maker = DocumentMaker(masks, train_on="assistant", seq_len=4, truncate="left")
        >>> maker(conversation).trained
        [False, False, True, True]
    """

    def __init__(self, masks: ChatMasks, *, train_on: str, seq_len: int, truncate: str) -> None:
        self._masks = masks
        self._train_on = train_on
        self._seq_len = seq_len
        self._truncate = truncate
        self.shortest_too_long: int | None = None
        """Tokens of the shortest conversation that was longer than seq_len."""

    def __call__(self, conversation: Conversation) -> Document | str:
        """The document, or why there is none: too_long, nothing_trained.

        Raises:
            InvalidRow: see `ChatMasks.encode`.
        """
        everything = self._train_on == "all" or conversation.plain is not None
        ids, turns = self._masks.encode(conversation, needs_turns=not everything)
        trained = [everything] * len(ids)
        for start, end in turns[-1:] if self._train_on == "last_assistant" else turns:
            trained[start:end] = [True] * (end - start)
        excess = max(0, len(ids) - self._seq_len)
        if excess:
            self.shortest_too_long = min(len(ids), self.shortest_too_long or len(ids))
            if self._truncate == "drop":
                return "too_long"
        cut = excess if self._truncate == "left" else 0
        ids, trained = ids[cut : cut + self._seq_len], trained[cut : cut + self._seq_len]
        trained[:1] = [False] * len(trained[:1])
        if True not in trained:
            return "nothing_trained"
        starts = [start - cut for start, _ in turns if 0 < start - cut < len(ids)]
        return Document(
            id=conversation.id,
            token_ids=ids,
            trained=trained,
            prompt_length=starts[-1] if starts else 0,
            truncated=excess > 0,
        )


class DocumentStream:
    """Endless documents of one data set or of several, mixed by weight; each is shuffled anew in each of its epochs.

    Consumes: rows. Produces: documents. Waits for: the disk or the hub when streaming. Ends: never.

    The next document comes from the data set that is furthest behind its share, so that every stretch of the stream
    holds the sets in their proportions.

    Args:
        streams: one for each data set.
        weights: the shares, relative to each other.

    Attributes:
        truncated: how many documents were cut to seq_len so far.
    """

    def __init__(self, streams: Sequence[SampleStream[Conversation, Document]], *, weights: Sequence[float]) -> None:
        self._streams = list(streams)
        self._weights = list(weights)
        self._taken = [0] * len(weights)
        self.truncated = 0

    def __iter__(self) -> DocumentStream:
        return self

    def __next__(self) -> Document:
        sets = range(len(self._streams))
        chosen = min(sets, key=lambda i: ((self._taken[i] + 1) / self._weights[i], i))
        document = next(self._streams[chosen])
        self._taken[chosen] += 1
        self.truncated += document.truncated
        return document

    @property
    def epoch(self) -> float:
        """Passes over the (first) data set so far; of streamed rows, whose number is not known, whole ones only."""
        return self._streams[0].epoch

    @property
    def dropped(self) -> Counter[str]:
        """How many rows were passed over so far, by reason: too_long, nothing_trained, held_out, or what is invalid."""
        return sum((stream.dropped for stream in self._streams), Counter())

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, for JSON."""
        return {"sets": [stream.state_dict() for stream in self._streams], "taken": list(self._taken)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state_dict` was taken: the next document is the one that followed then.

        Raises:
            DataError: the state is of other data sets or of another seed.
        """
        if len(state["sets"]) != len(self._streams):
            raise DataError(
                f"The run to be resumed mixed {len(state['sets'])} data sets, and dataset with dataset.mix now names "
                f"{len(self._streams)}. Fix: the original dataset settings, or a new output_dir."
            )
        for stream, one in zip(self._streams, state["sets"], strict=True):
            stream.load_state_dict(one)
        self._taken = list(state["taken"])


def build_documents(
    dataset: Any, *, eval: Any, tokenizer: Any, seq_len: int, seed: int
) -> tuple[DocumentStream, list[Document]]:
    """The training stream, and the held-out documents, which are never trained on (compared by their text).

    Held out are rows of `eval.dataset`, or of each data set its share of `eval.samples`: see
    `forge.data.splits.Opener` for which, with `eval.split` as the split. They do not depend on the seed, so that runs
    can be compared.

    Args:
        dataset: a `forge.config.SFTDatasetConfig`.
        eval: a `forge.config.SFTEvalConfig`.
        tokenizer: a fast Hugging Face tokenizer.
        seq_len: the most tokens of a document.
        seed: of the order, and of generated problems.

    Raises:
        DataError: a data set cannot be had, has no such columns, no usable row, or one that is no conversation; the
            template cannot render a conversation, or does not tell where the assistant speaks.

    Example:
        >>> config = SFTDatasetConfig(path="chats.jsonl")
        >>> evaluation = SFTEvalConfig(samples=8)
        >>> documents, held_out = build_documents(config, eval=evaluation, tokenizer=tokenizer, seq_len=512, seed=1)
        >>> next(documents).id
        'chats.jsonl/4711'
    """
    maker = DocumentMaker(
        ChatMasks(tokenizer, chat_template=dataset.chat_template),
        train_on=dataset.train_on,
        seq_len=seq_len,
        truncate=dataset.truncate,
    )
    needs_assistant = dataset.train_on != "all"
    sets = [_Set(config, maker, needs_assistant=needs_assistant, seed=seed) for config in dataset.sources]
    own = _Set(eval.dataset, maker, needs_assistant=needs_assistant, seed=seed) if eval.dataset else None
    shares = [0] * len(sets) if own else _shares(eval.samples, [config.weight for config in dataset.sources])
    opened = []
    held_out: dict[str, Document] = {}
    if own and eval.samples:
        rows = own.opener.all_held_out(eval.dataset, samples=eval.samples)
        held_out = hold_out(in_order(rows), own.make, samples=eval.samples)
    for number, (one, samples) in enumerate(zip(sets, shares, strict=True)):
        source, candidates = one.opener.train_and_held_out(
            one.config, samples=samples, split=eval.split, split_is_required=number == 0
        )
        if isinstance(source, IndexedRows) and not is_generated(one.config):
            for index in range(min(source.size, _CHECKED_ROWS)):
                source.get(index)  # raises where a row is no conversation, now rather than hours later
        held_out |= hold_out(candidates, one.make, samples=samples, taken=held_out)
        opened.append(source)
    if len(held_out) < eval.samples:
        logger.warning("eval.samples is %d, but only %d could be held out", eval.samples, len(held_out))
    streams = [
        SampleStream(source, make=one.make, excluded=held_out, seed=seed, shuffle=dataset.shuffle)
        for one, source in zip(sets, opened, strict=True)
    ]
    for stream in streams:
        _check(stream, maker, dataset.truncate, seq_len)
    return DocumentStream(streams, weights=[config.weight for config in dataset.sources]), list(held_out.values())


class _Set:
    """One data set of the mix: how it is opened, and its rows made into documents."""

    def __init__(self, config: Any, maker: DocumentMaker, *, needs_assistant: bool, seed: int) -> None:
        self.config = config
        self._maker = maker
        self._needs_assistant = needs_assistant
        self.opener = Opener(
            from_problem=lambda problem: worked_problem(problem, system_prompt=config.system_prompt),
            reader=self._reader,
            seed=seed,
        )

    def _reader(self, label: str) -> RowReader[Conversation]:
        return conversation_reader(self.config, label=label, needs_assistant=self._needs_assistant)

    def make(self, conversation: Conversation) -> Document | str:
        try:
            return self._maker(conversation)
        except InvalidRow as error:
            if self.config.invalid_rows == "drop":
                return error.reason
            raise InvalidRow(f"{conversation.id}: {error} Fix: {MEND}", reason=error.reason) from error


def _check(stream: SampleStream[Conversation, Document], maker: DocumentMaker, truncate: str, seq_len: int) -> None:
    """Makes the first samples, so that what is wrong with all of them is told before the start."""
    try:
        stream.check(_CHECKED_SAMPLES)
    except InvalidRow:
        raise
    except DataError as error:
        shortest = maker.shortest_too_long
        if not shortest:
            raise
        raise DataError(
            f"{error} training.seq_len is {seq_len} tokens, and the shortest of the long samples has {shortest}. "
            f"Fix: --training.seq_len {shortest}, or --dataset.truncate {'right' if truncate != 'right' else 'left'}."
        ) from None


def _shares(samples: int, weights: Sequence[float]) -> list[int]:
    """`samples` dealt out by weight, the largest remainders rounded up.

    >>> _shares(10, [3.0, 1.0])
    [8, 2]
    """
    exact = [samples * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    for i in sorted(range(len(weights)), key=lambda i: shares[i] - exact[i])[: samples - sum(shares)]:
        shares[i] += 1
    return shares
