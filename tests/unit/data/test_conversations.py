from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from forge.config import SFTColumnsConfig, SFTSourceConfig
from forge.data.conversations import Conversation, InvalidRow, conversation_reader, worked_problem, worked_sum
from forge.data.errors import DataError
from forge.data.rewards import MathReward, ThinkingReward
from forge.data.sources import Row, reasoning_gym_rows, toy_rows
from forge.testing import toy_reward

SYSTEM = {"role": "system", "content": "s"}
USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def read(values: Mapping[str, Any], *, needs_assistant: bool = True, **config: Any) -> Any:
    """One row, number 7 of rows.jsonl."""
    source = SFTSourceConfig(path="rows.jsonl", **config)
    make = conversation_reader(source, label="rows.jsonl", needs_assistant=needs_assistant)(list(values))
    return make(values, 7)


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in conversation.messages]


ANSWERED = [("user", "q"), ("assistant", "a")]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"messages": [USER, ASSISTANT], "id": 3}, ANSWERED),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, ANSWERED),
        ({"prompt": "q", "completion": "a"}, ANSWERED),
        ({"question": "q", "answer": "a"}, ANSWERED),
        (
            {"prompt": [{"role": "system", "content": "s"}, USER], "completion": [ASSISTANT]},
            [("system", "s"), *ANSWERED],
        ),
        ({"instruction": "q", "output": "a"}, ANSWERED),
        ({"instruction": "q", "input": " ", "output": "a"}, ANSWERED),
        ({"instruction": "q", "input": None, "output": "a"}, ANSWERED),
        (
            {"instruction": "q", "input": "3, 4", "output": "a", "text": "both"},
            [("user", "q\n\n3, 4"), ("assistant", "a")],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_the_form_is_found_by_the_columns(values: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    conversation = read(values)
    assert turns(conversation) == expected
    assert conversation.id == "rows.jsonl/7"


def test_plain_text_is_no_conversation() -> None:
    conversation = read({"text": "Once upon a time", "url": "u"})
    assert (conversation.plain, conversation.messages) == ("Once upon a time", [])


def test_the_form_and_the_columns_may_be_named() -> None:
    values = {"messages": [USER, ASSISTANT], "text": "t", "ask": "x", "say": "y"}
    assert read(values, format="text").plain == "t"
    columns = SFTColumnsConfig(prompt="ask", completion="say")
    assert turns(read(values, columns=columns)) == [("user", "x"), ("assistant", "y")]
    assert read(values, format="text", columns=SFTColumnsConfig(text="say")).plain == "y"


def test_a_system_prompt_stands_first_unless_the_row_has_its_own() -> None:
    own = {"messages": [{"role": "system", "content": "mine"}, USER, ASSISTANT]}
    assert turns(read({"prompt": "q", "completion": "a"}, system_prompt="s")) == [("system", "s"), *ANSWERED]
    assert turns(read(own, system_prompt="s"))[0] == ("system", "mine")


def test_a_tool_call_is_read_from_mapping_or_json_and_nulls_of_a_table_are_left_out() -> None:
    # A table gives every row the keys that any row has.
    call = {"id": None, "function": {"name": "add", "arguments": '{"a": 1}'}}
    other = {"id": "x", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    values = {
        "messages": [
            {**USER, "tool_calls": None, "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call, other]},
            {"role": "tool", "content": "", "tool_calls": []},
            {**ASSISTANT, "tool_calls": None},
        ],
        "tools": '[{"type": "function", "function": {"name": "add", "description": null}}]',
    }
    conversation = read(values)
    called = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert conversation.messages == [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [called, {"id": "x", **called}],
        },
        {"role": "tool", "content": ""},
        ASSISTANT,
    ]
    assert conversation.tools == [{"type": "function", "function": {"name": "add"}}]


WRONG = {
    "no assistant turn": (
        {"messages": [USER, USER]},
        "no_assistant",
        "row 7 of rows.jsonl has no assistant turn.*are user",
    ),
    "wrong role": (
        {"messages": [USER, {"role": "asistant", "content": "a"}]},
        "wrong_role",
        "row 7 of rows.jsonl, message 1 must have a role of system, .* got 'asistant'; did you mean assistant",
    ),
    "no role": ({"messages": [{"content": "q"}, ASSISTANT]}, "wrong_role", "message 0 must have a role .* got None"),
    "sharegpt role": ({"conversations": [{"from": "bot", "value": "q"}]}, "wrong_role", "got 'bot'"),
    "number": ({"messages": [USER, {"role": "assistant", "content": 5}]}, "not_text", "content must be text, got 5"),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ASSISTANT]},
        "not_text",
        r"message 0: the user's content must be text, got \[\{'type': 'text'",
    ),
    "null content": (
        {"messages": [USER, {"role": "assistant", "content": None}]},
        "not_text",
        "must be text, got None",
    ),
    "number of a system": ({"messages": [{"role": "system", "content": 1}, ASSISTANT]}, "not_text", "system's content"),
    "empty answer": ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, "empty", "must not be empty, got"),
    "empty question": (
        {"messages": [{"role": "user", "content": ""}, ASSISTANT]},
        "empty",
        "the user's content must not",
    ),
    "empty completion": ({"prompt": "q", "completion": ""}, "empty", "the completion must not be empty"),
    "null prompt": ({"prompt": None, "completion": "a"}, "not_text", "the prompt must be text, got None"),
    "empty output": ({"instruction": "i", "output": ""}, "empty", "the output must not be empty"),
    "number as input": ({"instruction": "i", "input": 3, "output": "o"}, "not_text", "the input must be text, got 3"),
    "blank text": ({"text": "  "}, "empty", "the text must not be empty"),
    "no list": ({"messages": "q"}, "no_messages", r"must hold a list of \{role, content\}, got 'q'"),
    "no messages": ({"messages": []}, "no_messages", r"got \[\]"),
    "list of text": ({"messages": ["q", "a"]}, "no_messages", r"message 0 must be \{role, content\}, got 'q'"),
    "tool call without name": (
        {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {}}}]}]},
        "tool_calls",
        "a tool call must be {function: {name, arguments}}",
    ),
    "arguments": (
        {"messages": [USER, {**ASSISTANT, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "tool_calls",
        "arguments are not JSON",
    ),
    "tools": ({"messages": [USER, ASSISTANT], "tools": "["}, "tools", "tools are not JSON"),
    "tools as text": ({"messages": [USER, ASSISTANT], "tools": '"add"'}, "tools", "must be a list of JSON schemas"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_row_that_is_no_conversation_is_named(name: str) -> None:
    values, reason, message = WRONG[name]
    with pytest.raises(InvalidRow, match=message) as error:
        read(values)
    assert error.value.reason == reason
    assert "row 7 of rows.jsonl" in str(error.value)
    assert "Fix: mend or remove the row, or set invalid_rows: drop" in str(error.value)
    assert read(values, invalid_rows="drop") == reason


def test_without_an_assistant_everything_else_can_be_trained() -> None:
    assert turns(read({"messages": [USER]}, needs_assistant=False)) == [("user", "q")]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {},
            "has none of the columns of a conversation .*it has foo, bar. Fix: name them in dataset.columns",
        ),
        ({"format": "alpaca"}, "no column instruction: it has foo, bar. Fix: set dataset.columns.instruction"),
        ({"columns": SFTColumnsConfig(messages="fo")}, "columns.messages must be .* got 'fo': .*did you mean foo"),
        ({"format": "text", "columns": SFTColumnsConfig(text="foo", tools="x")}, "columns.tools must be a column"),
    ],
)
def test_a_missing_column_is_told_with_those_that_exist(config: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read({"foo": 1, "bar": 2}, **config)


@pytest.mark.parametrize(
    ("question", "working"),
    [
        ("State the answer: 45 - 12 =", "45 - 12 = 33"),
        ("State the answer: 3 - 8 + 10 - -2 =", "3 - 8 = -5, -5 + 10 = 5, 5 - -2 = 7"),
        ("-3 + 1 =", "-3 + 1 = -2"),
        ("State the answer: 45 =", None),
        ("What is 2 * 3 =", None),
        ("How many animals have 4 legs?", None),
    ],
)
def test_sums_are_worked_out_step_by_step(question: str, working: str | None) -> None:
    assert worked_sum(question) == working


def test_worked_problems_earn_the_full_reward() -> None:
    sums = reasoning_gym_rows("chain_sum", {"allow_negation": True, "max_terms": 4}, size=50, seed=3, held_out=False)
    for index in range(50):
        problem = sums.get(index)
        assert isinstance(problem, Row)
        conversation = worked_problem(problem, system_prompt="Think.")
        assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
        answer = conversation.messages[-1]["content"]
        assert MathReward()(problem.text, answer, problem.target) == 1.0
        assert ThinkingReward()(problem.text, answer, problem.target) == 1.0
        assert answer.startswith(f"<think>{problem.text.partition(': ')[2].split(' ')[0]} ")
        assert answer.endswith(f"= {problem.target}</think> <answer>{problem.target}</answer>")


def test_other_tasks_are_answered_in_tags_alone_and_the_toy_task_in_letters() -> None:
    legs = reasoning_gym_rows("leg_counting", {}, size=1, seed=3, held_out=False).get(0)
    toy = toy_rows(size=2, held_out=False).get(1)
    assert isinstance(legs, Row)
    assert isinstance(toy, Row)
    assert worked_problem(legs).messages[-1]["content"] == f"<answer>{legs.target}</answer>"
    answer = worked_problem(toy).messages[-1]["content"]
    assert (answer, toy_reward("", answer, toy.target)) == ("ABCD", 1.0)
