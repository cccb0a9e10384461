"""ChatFormat: a question → the conversation that is put to the model, as text and as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forge.data.errors import DataError, check_characters

Message = dict[str, str]
"""{"role": "system", "user" or "assistant", "content": text}"""


class ChatFormat:
    """How every question of a data set is put: system prompt, worked examples, template.

    The text is made by the tokenizer's chat template and tokenized once. With a tokenizer that has none (a base model),
    the parts are joined as plain text: system prompt, each example's prompt and response, the prompt; a blank line
    between turns, a line break between a prompt and its response.

    Args:
        tokenizer: a Hugging Face tokenizer.
        system_prompt: the system message, unless the question brings one of its own.
        examples: (prompt, response) pairs, shown as earlier turns.
        prompt_template: text around each question and each example's prompt; {prompt} stands for it.
        chat_template: a Jinja template to use instead of the tokenizer's.

    Example:
        >>> chat = ChatFormat(tokenizer, system_prompt="Be brief.", examples=[("1 + 1", "2")])
        >>> [message["content"] for message in chat.messages("2 + 2")]
        ['Be brief.', '1 + 1', '2', '2 + 2']
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system_prompt: str | None = None,
        examples: Sequence[tuple[str, str]] = (),
        prompt_template: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        if prompt_template is not None and "{prompt}" not in prompt_template:
            raise DataError(
                f"dataset.prompt_template must contain {{prompt}}, where the question goes, got {prompt_template!r}."
            )
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._examples = list(examples)
        self._prompt_template = prompt_template or "{prompt}"
        self._chat_template = chat_template or getattr(tokenizer, "chat_template", None)

    def render(self, question: str | Sequence[Mapping[str, Any]]) -> tuple[str, list[int]]:
        """The prompt as text and as token ids; a start token stands in it at most once.

        Raises:
            DataError: the template cannot render the conversation, or its text cannot be tokenized.
        """
        messages = self.messages(question)
        if self._chat_template is None:
            text = plain_text(messages)
            return text, self._encode(text, add_special_tokens=True)
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, chat_template=self._chat_template
            )
        except Exception as error:  # Jinja's errors, and whatever the template raises itself
            raise DataError(f"The chat template cannot render {messages!r:.300}: {error}") from error
        return text, self._encode(text, add_special_tokens=False)  # the template writes its own

    def messages(self, question: str | Sequence[Mapping[str, Any]]) -> list[Message]:
        """The conversation, ending with the user's turn that is to be answered."""
        own = [{"role": "user", "content": question}] if isinstance(question, str) else [dict(m) for m in question]
        own[-1]["content"] = self._framed(own[-1]["content"])
        system = [own.pop(0)] if own[0]["role"] == "system" else []
        if not system and self._system_prompt:
            system = [{"role": "system", "content": self._system_prompt}]
        shown = []
        for prompt, response in self._examples:
            shown += [{"role": "user", "content": self._framed(prompt)}, {"role": "assistant", "content": response}]
        return [*system, *shown, *own]

    def _framed(self, prompt: str) -> str:
        return self._prompt_template.replace("{prompt}", prompt)  # not str.format: templates hold \boxed{}

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        check_characters(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        start = self._tokenizer.bos_token_id
        return ids[1:] if start is not None and ids[:2] == [start, start] else ids


def plain_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Messages for a model without a chat template.

    >>> plain_text([{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"},
    ...              {"role": "user", "content": "2 + 2 ="}])
    '1 + 1 =\\n2\\n\\n2 + 2 =\\n'
    """
    ends = {"user": "\n", "assistant": "\n\n", "system": "\n\n"}
    return "".join(message["content"] + ends.get(message["role"], "\n") for message in messages)
