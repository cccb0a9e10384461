"""The data sections of supervised fine-tuning: which data sets, and what of them is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from forge.config.fields import PositiveFloat
from forge.config.sections import EvalConfig, SourceConfig


@dataclass(kw_only=True, slots=True)
class SFTColumnsConfig:
    """Columns by what they hold; null finds them by their usual names."""

    messages: str | None = None
    """The column with the conversation, a list of {role, content}; null finds messages or conversations."""
    prompt: str | None = None
    """The column with what the user says; null finds prompt, question or problem."""
    completion: str | None = None
    """The column with what the assistant answers; null finds completion, response, answer or solution."""
    instruction: str | None = None
    """Alpaca: the column with the task; null is instruction."""
    input: str | None = None
    """Alpaca: the column with what the task is about, which may be empty; null is input, if there is one."""
    output: str | None = None
    """Alpaca: the column with the answer; null is output."""
    text: str | None = None
    """The column with plain text; null is text."""
    tools: str | None = None
    """The column with the tools that the template shows, JSON schemas; null is tools, if there is one."""


@dataclass(kw_only=True, slots=True)
class SFTSourceConfig(SourceConfig):
    """One data set of conversations. `reasoning_gym` and `toy` are problems with worked answers."""

    format: Literal["auto", "messages", "prompt_completion", "alpaca", "text"] = "auto"
    """What a row is: messages, a prompt and its completion, instruction, input and output, or plain text, which is
    trained whole and without a chat template. auto finds out by the columns."""
    columns: SFTColumnsConfig = field(default_factory=SFTColumnsConfig)
    invalid_rows: Literal["error", "drop"] = "error"
    """What to do with a row that is no conversation (a wrong role, no answer, content that is not text): end the run
    before it starts, or drop it and count it."""
    weight: PositiveFloat = 1.0
    """This data set's share of the training samples, relative to the others of the mix, whatever their sizes."""


@dataclass(kw_only=True, slots=True)
class SFTDatasetConfig(SFTSourceConfig):
    """What to train on: a data set, or several.

    Example:
        >>> SFTDatasetConfig(path="chats.jsonl", weight=3.0, mix=[SFTSourceConfig(path="books.parquet")])
    """

    mix: list[SFTSourceConfig] = field(default_factory=list)
    """Further data sets, mixed in by their weights."""
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """The tokens that are learned: those of the assistant, of its last turn only, or every token."""
    truncate: Literal["right", "left", "drop"] = "right"
    """What happens to a sample of more than training.seq_len tokens: cut its right end or its left, or leave it out."""
    shuffle: bool = True
    """Shuffle anew in every epoch, with training.seed."""
    chat_template: str | None = None
    """A Jinja chat template; null is the tokenizer's own."""

    @property
    def sources(self) -> list[SFTSourceConfig]:
        """Every data set of the mix, this one first."""
        return [self, *self.mix]


@dataclass(kw_only=True, slots=True)
class SFTEvalConfig(EvalConfig):
    dataset: SFTSourceConfig | None = None
    """A data set of its own to validate on; null takes the split, or sets samples aside from each training set."""
