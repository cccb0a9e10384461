"""ChatMasks: a conversation → token ids, and which of them the assistant wrote.

The conversation is rendered once, whole, by the model's chat template, and tokenized once, so that the ids are those of
`apply_chat_template`. Where the assistant's turns are in the text is found in one of three ways:

1. The template marks them with {% generation %}.
2. The conversation is rendered up to each turn, with the generation prompt, and up to its end: what was added is the
   turn. That holds where each rendering begins with the one before.
3. Some templates render a turn otherwise once others follow (Qwen3 leaves out what an earlier turn thought). Then turns
   are found by the texts that open and close them, taken from a conversation of two words; what is in the whole
   rendering is trained. Where their number does not fit, the conversation is refused.

A turn reaches from behind the generation prompt to the end-of-turn token, which is part of it: a model that was not
trained on it never stops. What the template writes behind that token (ChatML's line break) is not, since nobody samples
it. A template without such a token ends its turns by whatever it writes there, which is then trained.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

from forge.data.chat import plain_text
from forge.data.conversations import Conversation, InvalidRow, Message
from forge.data.errors import DataError, check_characters

Span = tuple[int, int]
"""[start, end)"""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]


class ChatMasks:
    """Tokenizes conversations.

    Args:
        tokenizer: a fast Hugging Face tokenizer (one that knows which characters a token stands for).
        chat_template: a Jinja template to use instead of the tokenizer's. Without any, messages are joined as plain
            text (see `forge.data.chat.plain_text`), and the last answer ends with the end-of-text token.

    Raises:
        DataError: the tokenizer is a slow one.

    Example:
        >>> masks = ChatMasks(tokenizer)
        >>> ids, turns = masks.encode(conversation)
        >>> [tokenizer.decode(ids[start:end]) for start, end in turns]
        ['16<|im_end|>']
    """

    def __init__(self, tokenizer: Any, *, chat_template: str | None = None) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"{type(tokenizer).__name__} does not tell which characters a token stands for, so the assistant's "
                "tokens cannot be found. Fix: a model folder with a tokenizer.json, which gives a fast tokenizer."
            )
        self._tokenizer = tokenizer
        self._template = chat_template
        self._has_template = bool(chat_template or getattr(tokenizer, "chat_template", None))
        self._special = tuple({*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()})
        self._end = tokenizer.eos_token or ""
        bos = tokenizer.bos_token_id
        self._start = [bos] if bos is not None and tokenizer("x")["input_ids"][:1] == [bos] else []
        self._bos = bos
        self._marks: tuple[str, str] | None = None

    def encode(self, conversation: Conversation, *, needs_turns: bool = True) -> tuple[list[int], list[Span]]:
        """(token ids, [start, end) of each of the assistant's turns); plain text has none.

        Args:
            conversation: what to tokenize.
            needs_turns: False gives no turns where the template does not tell them, instead of raising.

        Raises:
            InvalidRow: the template cannot render the conversation, or does not tell where the assistant speaks; or the
                text cannot be tokenized.
        """
        spans: list[Span]
        if conversation.plain is not None:
            text, spans = conversation.plain.removesuffix(self._end) + self._end, []
        elif self._has_template:
            text, spans = self._rendered(conversation, needs_turns)
        else:
            text, spans = self._joined(conversation.messages)
        try:
            check_characters(text)
        except DataError as error:
            raise InvalidRow(str(error), reason="not_text") from None
        start = [] if conversation.plain is None and self._has_template else self._start  # a template writes its own
        return self._tokens(text, spans, start)

    def _tokens(self, text: str, spans: list[Span], start: list[int]) -> tuple[list[int], list[Span]]:
        """A token belongs to a turn if it stands for any character of it."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids: list[int] = start + encoded["input_ids"]
        offsets = [(0, 0)] * len(start) + encoded["offset_mapping"]
        if self._bos is not None and ids[:2] == [self._bos, self._bos]:
            ids, offsets = ids[1:], offsets[1:]
        begins, ends = [first for first, _ in offsets], [last for _, last in offsets]
        return ids, [(bisect_right(ends, first), bisect_left(begins, last)) for first, last in spans]

    def _rendered(self, conversation: Conversation, needs_turns: bool) -> tuple[str, list[Span]]:
        messages, tools = conversation.messages, conversation.tools
        template = self._tokenizer.get_chat_template(self._template, tools)
        if _GENERATION.search(template):
            text, spans = self._marked(conversation, template)
        else:
            text = self._render(messages, tools)
            found = self._by_prefixes(text, messages, tools)
            spans = self._by_marks(text, messages, needs_turns) if found is None else found
            spans = [(start, self._end_of_turn(text, start, end)) for start, end in spans]
        _check_tools(conversation, text)
        return text, [(start, end) for start, end in spans if start < end]

    def _render(self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tools, tokenize=False, add_generation_prompt=prompt, chat_template=self._template
                )
            )
        except Exception as error:  # Jinja's errors, and whatever the template raises itself
            raise InvalidRow(
                f"The chat template cannot render {messages!r:.300}: {error}", reason="not_rendered"
            ) from error

    def _marked(self, conversation: Conversation, template: str) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                [conversation.messages],
                tools=conversation.tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:  # as in _render
            raise InvalidRow(
                f"The chat template cannot render {conversation.messages!r:.300}: {error}", reason="not_rendered"
            ) from error
        return texts[0], list(spans[0])

    def _by_prefixes(self, text: str, messages: Sequence[Message], tools: Any) -> list[Span] | None:
        """The assistant's turns by rendering the messages before and up to each; None where that does not hold."""
        spans = []
        for number in _assistant_turns(messages):
            try:
                before = self._render(messages[:number], tools, prompt=True)
                after = text if number == len(messages) - 1 else self._render(messages[: number + 1], tools)
            except InvalidRow:  # there are templates that want a user's turn first, or last
                return None
            if not (text.startswith(after) and after.startswith(before)):
                return None
            spans.append((len(before), len(after)))
        return spans

    def _by_marks(self, text: str, messages: Sequence[Message], needs_turns: bool) -> list[Span]:
        """The assistant's turns by the texts that open and close one."""
        opening, closing = self._opening_and_closing()
        turns = len(_assistant_turns(messages))
        if not opening or not closing or text.count(opening) != turns:
            if not needs_turns:
                return []
            raise InvalidRow(
                "The chat template does not show where the assistant speaks: it has no {% generation %} marks, renders "
                f"earlier turns in another way once others follow, and {opening!r}, which should open each of the "
                f"assistant's {turns} turns, is there {text.count(opening) if opening else 0} times. Use a template "
                "with {% generation %} marks (dataset.chat_template), or dataset.train_on: all.",
                reason="not_marked",
            )
        spans, end = [], 0
        for _ in range(turns):
            start = text.index(opening, end) + len(opening)
            end = text.find(closing, start)
            end = len(text) if end < 0 else end + len(closing)
            spans.append((start, end))
        return spans

    def _opening_and_closing(self) -> tuple[str, str]:
        if self._marks is None:
            asked, prompted = self._render(_PROBE[:1]), self._render(_PROBE[:1], prompt=True)
            answered = self._render(_PROBE)
            opens = prompted.startswith(asked) and answered.startswith(prompted)
            closing = answered[len(prompted) :].rpartition("y")[2].strip() if opens else ""
            self._marks = (prompted[len(asked) :] if opens else "", closing)
        return self._marks

    def _end_of_turn(self, text: str, start: int, end: int) -> int:
        """`end` without the layout behind an end-of-turn token."""
        bare = text[start:end].rstrip()
        return start + len(bare) if bare.endswith(self._special) else end

    def _joined(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """For a base model: plain text, with the end-of-text token behind the answer at the end."""
        spans = []
        for number in _assistant_turns(messages):
            start = len(plain_text(messages[:number]))
            spans.append((start, start + len(messages[number]["content"])))
        text = plain_text(messages)
        if messages[-1]["role"] == "assistant":
            start, end = spans.pop()
            text = text[:end] + self._end
            spans.append((start, len(text)))
        return text, spans


def _assistant_turns(messages: Sequence[Message]) -> list[int]:
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def _check_tools(conversation: Conversation, text: str) -> None:
    """A template that knows no tools leaves them out without a word, and the model would learn to say nothing."""
    called = [call["function"]["name"] for m in conversation.messages for call in m.get("tool_calls", [])]
    offered = [tool.get("function", tool).get("name") for tool in conversation.tools or []]
    missing = [name for name in [*called, *offered] if name and name not in text]
    if missing:
        raise InvalidRow(
            f"The chat template leaves out tools: {conversation.id} has {missing[0]!r}, its rendering has not. Use "
            "a template that renders tools (dataset.chat_template).",
            reason="tools",
        )
