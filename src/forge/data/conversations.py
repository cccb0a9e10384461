"""Rows of any of the usual forms → conversations, checked so that a mistake is told by the number of its row.

Forms: `messages` (or `conversations`) with {role, content} or ShareGPT's {from, value}; prompt and completion;
instruction, input and output (Alpaca); plain text. Problems of reasoning-gym become conversations with worked answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge.data.errors import DataError
from forge.data.sources import Row, RowReader, did_you_mean, find_column

ROLES = ("system", "user", "assistant", "tool")

_OTHER_NAMES = {"human": "user", "gpt": "assistant"}  # ShareGPT's roles
_USUAL = {  # columns by what they hold
    "messages": ("messages", "conversations"),
    "prompt": ("prompt", "question", "problem"),
    "completion": ("completion", "response", "answer", "solution"),
    "instruction": ("instruction",),
    "input": ("input",),
    "output": ("output",),
    "text": ("text",),
    "tools": ("tools",),
}
_NEEDED = {  # columns that make a form, in the order in which `auto` tries them
    "messages": ("messages",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}

Message = dict[str, Any]
"""{"role": one of ROLES, "content": text}, perhaps with tool_calls, name or what else a template reads."""


class InvalidRow(DataError):
    """A row that is no conversation; `reason` is the word that such rows are counted by."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(kw_only=True, slots=True)
class Conversation:
    """What is trained on, before it is tokenized: messages, or plain text."""

    id: str
    """Which row of which data set, the same in every run: chats.jsonl/7."""
    messages: list[Message]
    """Empty for plain text."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the tools that the assistant may call."""
    plain: str | None = None
    """The text of a row that is no conversation."""

    @property
    def text(self) -> str:
        """All that is said. Conversations that are equal in it are the same."""
        if self.plain is not None:
            return self.plain
        # A table may hold dates and the like among the arguments.
        calls = [json.dumps(m["tool_calls"], sort_keys=True, default=str) for m in self.messages if "tool_calls" in m]
        return "\n".join([*(f"{m['role']}: {m['content']}" for m in self.messages), *calls])


def conversation_reader(source: Any, *, label: str, needs_assistant: bool = True) -> RowReader[Conversation]:
    """For `forge.data.sources.table_rows`.

    Args:
        source: a `forge.config.SFTSourceConfig`.
        label: what the rows are called in messages.
        needs_assistant: False takes conversations in which only others speak.

    Raises, once the columns are known:
        DataError: the columns of that form are not there; the message lists those that are.
        InvalidRow: for a row, if `source.invalid_rows` is "error".
    """

    def reader(existing: Sequence[str]) -> Callable[[Mapping[str, Any], int], Conversation | str]:
        form = _form(source, existing, label)
        found = {use: _column(use, source.columns, existing, label) for use in _NEEDED[form]}
        for use in ("input", "tools"):  # taken if they are there
            wanted = getattr(source.columns, use)
            if wanted or _USUAL[use][0] in existing:
                found[use] = _column(use, source.columns, existing, label)

        def read(values: Mapping[str, Any], index: int) -> Conversation | str:
            row = {use: values.get(column) for use, column in found.items()}
            try:
                conversation = _conversation(form, row, source.system_prompt, where=f"row {index} of {label}")
                if needs_assistant and form != "text":
                    _check_assistant(conversation, where=f"row {index} of {label}")
            except InvalidRow as error:
                if source.invalid_rows == "drop":
                    return error.reason
                raise InvalidRow(f"{error} Fix: {MEND}", reason=error.reason) from None
            conversation.id = f"{label}/{index}"
            return conversation

        return read

    return reader


MEND = "mend or remove the row, or set invalid_rows: drop for this data set, which drops and counts such rows."


def worked_problem(problem: Row, *, system_prompt: str | None = None) -> Conversation:
    """A generated problem with its solution: what a reward for <think> and <answer> tags would score best.

    The thinking is the working of a chain of sums, and left out of other tasks, whose working is not known. The toy
    task is answered with the first letters of the alphabet.
    """
    if problem.id.startswith("toy/"):
        from forge.testing.toy_task import solution

        answer = solution(problem.target)
    else:
        steps = worked_sum(problem.text)
        answer = f"<think>{steps}</think> " * (steps is not None) + f"<answer>{problem.target}</answer>"
    messages = [{"role": "user", "content": problem.text}, {"role": "assistant", "content": answer}]
    return Conversation(id=problem.id, messages=_with_system(messages, system_prompt))


def worked_sum(question: str) -> str | None:
    """The running sums of a question that ends in a chain of them; None if it does not.

    >>> worked_sum("State the final answer to the following arithmetic problem: 45 - 12 + 3 =")
    '45 - 12 = 33, 33 + 3 = 36'
    """
    chain = re.search(r"(?:^| )(-?\d+(?: [+-] -?\d+)+) =$", question)
    if chain is None:
        return None
    first, *rest = chain[1].split(" ")
    total, steps = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(term) if sign == "+" else total - int(term)
        steps.append(f"{total} {sign} {term} = {result}")
        total = result
    return ", ".join(steps)


def _form(source: Any, existing: Sequence[str], label: str) -> str:
    """The form of the rows: the one that is configured, that of the columns that are, or that of those that exist."""
    if source.format != "auto":
        return str(source.format)
    for form, needed in _NEEDED.items():
        if any(getattr(source.columns, use) for use in needed):
            return form
    for form, needed in _NEEDED.items():
        if all(any(name in existing for name in _USUAL[use]) for use in needed):
            return form
    forms = "; ".join(" and ".join(" or ".join(_USUAL[use]) for use in needed) for needed in _NEEDED.values())
    raise DataError(
        f"{label} has none of the columns of a conversation ({forms}): it has {', '.join(existing)}. "
        "Fix: name them in dataset.columns, such as dataset.columns.messages."
    )


def _column(use: str, columns: Any, existing: Sequence[str], label: str) -> str:
    return find_column(use, getattr(columns, use), _USUAL[use], existing, label)


def _conversation(form: str, row: Mapping[str, Any], system_prompt: str | None, *, where: str) -> Conversation:
    if form == "text":
        return Conversation(id="", messages=[], plain=_text(row["text"], where, "the text"))
    if form == "messages":
        messages = _messages(row["messages"], where)
    elif form == "alpaca":
        task = _text(row["instruction"], where, "the instruction")
        about = row.get("input")
        if about is not None and not isinstance(about, str):
            _text(about, where, "the input")
        messages = [
            {"role": "user", "content": f"{task}\n\n{about}" if about and about.strip() else task},
            {"role": "assistant", "content": _text(row["output"], where, "the output")},
        ]
    else:
        messages = [
            message
            for use, role in (("prompt", "user"), ("completion", "assistant"))
            for message in (
                _messages(row[use], where)
                if isinstance(row[use], list)
                else [{"role": role, "content": _text(row[use], where, f"the {use}")}]
            )
        ]
    return Conversation(id="", messages=_with_system(messages, system_prompt), tools=_tools(row.get("tools"), where))


def _messages(raw: Any, where: str) -> list[Message]:
    if not isinstance(raw, list) or not raw:
        raise InvalidRow(f"{where} must hold a list of {{role, content}}, got {raw!r:.100}.", reason="no_messages")
    return [_message(message, f"{where}, message {number}") for number, message in enumerate(raw)]


def _message(raw: Any, where: str) -> Message:
    if not isinstance(raw, Mapping):
        raise InvalidRow(f"{where} must be {{role, content}}, got {raw!r:.100}.", reason="no_messages")
    # What is missing in one row is None in a table where another row has it.
    message = {name: _without_nulls(value) for name, value in raw.items() if value is not None}
    role = message.pop("from", None)
    role = message.get("role", _OTHER_NAMES.get(role, role) if isinstance(role, str) else role)
    if role not in ROLES:
        hint = did_you_mean(role, ROLES) if isinstance(role, str) else "."
        raise InvalidRow(f"{where} must have a role of {', '.join(ROLES)}, got {role!r}{hint}", reason="wrong_role")
    content = message.pop("value", None)
    content = message.get("content", content)
    calls = message.get("tool_calls") or None
    message.pop("tool_calls", None)
    if calls is not None:
        if not isinstance(calls, list):
            raise InvalidRow(f"{where}: tool_calls must be a list, got {calls!r:.100}.", reason="tool_calls")
        message["tool_calls"] = [_tool_call(call, where) for call in calls]
        content = "" if content is None else content
    if not isinstance(content, str) or (not calls and role in ("user", "assistant")):
        content = _text(content, where, f"the {role}'s content")
    return {**message, "role": role, "content": content}


def _text(value: Any, where: str, what: str) -> str:
    if not isinstance(value, str):
        raise InvalidRow(f"{where}: {what} must be text, got {value!r:.100}.", reason="not_text")
    if not value.strip():
        raise InvalidRow(f"{where}: {what} must not be empty, got {value!r:.100}.", reason="empty")
    return value


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """A call as chat templates take it: with its arguments as a mapping, not as JSON text."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRow(
            f"{where}: a tool call must be {{function: {{name, arguments}}}}, got {call!r:.100}.", reason="tool_calls"
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidRow(f"{where}: a tool call's arguments are not JSON: {error}.", reason="tool_calls") from None
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _tools(raw: Any, where: str) -> list[dict[str, Any]] | None:
    if isinstance(raw, str):
        try:
            raw = json.loads(raw) if raw.strip() else None
        except (ValueError, RecursionError) as error:
            raise InvalidRow(f"{where}: tools are not JSON: {error}.", reason="tools") from None
    if not raw:
        return None
    if not isinstance(raw, list) or not all(map(_is_tool, raw)):
        raise InvalidRow(f"{where}: tools must be a list of JSON schemas, got {raw!r:.100}.", reason="tools")
    return [_without_nulls(tool) for tool in raw]


def _is_tool(raw: Any) -> bool:
    function = raw.get("function", raw) if isinstance(raw, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str | None)


def _check_assistant(conversation: Conversation, *, where: str) -> None:
    if not any(message["role"] == "assistant" for message in conversation.messages):
        raise InvalidRow(
            f"{where} has no assistant turn, so there is nothing to train on: its roles are "
            f"{', '.join(message['role'] for message in conversation.messages)}.",
            reason="no_assistant",
        )


def _with_system(messages: list[Message], system_prompt: str | None) -> list[Message]:
    if system_prompt and messages[0]["role"] != "system":
        return [{"role": "system", "content": system_prompt}, *messages]
    return messages


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
