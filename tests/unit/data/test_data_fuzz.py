"""Whatever a data set's file holds: rows, or one error in words that says where; never another exception or a hang."""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from forge.config import SFTDatasetConfig, SFTEvalConfig, SFTSourceConfig
from forge.config.sections import DatasetConfig, EvalConfig
from forge.data.chat import ChatFormat
from forge.data.chat_masks import ChatMasks
from forge.data.conversations import conversation_reader
from forge.data.datasets import build_datasets
from forge.data.documents import DocumentMaker, build_documents
from forge.data.errors import DataError
from forge.data.sources import problem_reader
from forge.testing.tiny_model import make_byte_tokenizer

QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=60)
FILES = settings(QUIET, max_examples=20)  # each opens a file through `datasets`, some 20 ms

ODD = [
    "",
    " ",
    "\ud800",
    "\x00",
    "\u2028",
    "\ufeff",
    "<|im_end|>",
    "{{ x }}",
    "{% generation %}",
    "0000-01-01 00:00:00",
]
TEXTS = st.text(max_size=8) | st.sampled_from([*ODD, "user", "assistant", "system", "tool"])
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | TEXTS
KEYS = st.sampled_from(
    ["role", "content", "from", "value", "tool_calls", "function", "name", "arguments", "messages", "text"]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = VALUES | st.just(datetime(2020, 1, 1)) | VALUES.map(lambda v: json.dumps(v)) | st.just("[" * 9999)
CALLS = st.fixed_dictionaries(
    {}, optional={"function": VALUES, "name": TEXTS, "arguments": ARGUMENTS}
) | st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": TEXTS}, optional={"arguments": ARGUMENTS})})
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"]) | VALUES},
        optional={"content": TEXTS | VALUES, "tool_calls": st.lists(CALLS, max_size=2) | VALUES, "name": VALUES},
    ),
    max_size=4,
)
TOOLS = st.lists(CALLS, max_size=2) | VALUES | VALUES.map(lambda v: json.dumps(v)) | st.just("9" * 5000)
COLUMNS = ["prompt", "question", "messages", "answer", "completion", "instruction", "input", "output", "text", "tools"]
ROWS = st.dictionaries(st.sampled_from(COLUMNS), VALUES | MESSAGES, max_size=5) | st.fixed_dictionaries(
    {"messages": MESSAGES}, optional={"tools": TOOLS}
)


@cache
def tokenizer(*, template: bool) -> Any:
    made = make_byte_tokenizer()
    if not template:
        made.chat_template = None
    return made


def unless_refused(act: Any, *, says: str = "") -> Any:
    """What `act` returns; None where it ends with an error in words that has `says` in it."""
    try:
        return act()
    except DataError as error:
        message = str(error)
    assert says in message
    assert len(message) < 1500
    return None


@QUIET
@given(row=ROWS, template=st.booleans())
@example(
    row={"prompt": [{"role": ["user"], "content": "x"}, {"role": "user", "content": "x"}], "answer": 1}, template=False
)
@example(row={"prompt": "\ud800", "answer": "a"}, template=True)
def test_any_row_is_a_problem_or_is_dropped_or_refused(row: dict[str, Any], template: bool) -> None:
    columns = DatasetConfig().columns

    def make() -> Any:
        return problem_reader(columns, "rows.jsonl")(list(row))(row, 7)

    problem = unless_refused(make, says="rows.jsonl")
    if problem is None or problem == "incomplete":
        return
    chat = ChatFormat(tokenizer(template=template), system_prompt="s", prompt_template="Q: {prompt}")
    rendered = unless_refused(lambda: chat.render(problem.question))
    assert isinstance(problem.target, str)
    if rendered is not None:
        assert all(isinstance(token, int) for token in rendered[1])


@QUIET
@given(row=ROWS, template=st.booleans(), train_on=st.sampled_from(["assistant", "last_assistant", "all"]))
@example(row={"messages": [{"role": "assistant", "content": "a", "tool_calls": 5}]}, template=True, train_on="all")
@example(
    row={
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": {"at": datetime(2020, 1, 1)}}}],
            }
        ]
    },
    template=True,
    train_on="all",
)
@example(row={"prompt": "q", "completion": "a", "tools": [{"function": "f"}]}, template=True, train_on="assistant")
@example(row={"prompt": "q", "completion": "a", "tools": [{"name": 5}]}, template=True, train_on="assistant")
@example(row={"prompt": "q", "completion": "a", "tools": "[" * 9999}, template=True, train_on="assistant")
@example(row={"text": "\ud800"}, template=True, train_on="all")
def test_any_row_is_a_document_or_is_dropped_or_refused(row: dict[str, Any], template: bool, train_on: str) -> None:
    for invalid in ("error", "drop"):
        source = SFTSourceConfig(path="rows.jsonl", invalid_rows=invalid)

        def read(source: SFTSourceConfig = source) -> Any:
            return conversation_reader(source, label="rows.jsonl", needs_assistant=train_on != "all")(list(row))(row, 7)

        conversation = unless_refused(read, says="rows.jsonl")
    if conversation is None or isinstance(conversation, str):
        return
    assert isinstance(conversation.text, str)
    masks = ChatMasks(tokenizer(template=template))
    maker = DocumentMaker(masks, train_on=train_on, seq_len=64, truncate="right")
    document = unless_refused(lambda: maker(conversation))
    if document is not None and not isinstance(document, str):
        assert len(document.token_ids) == len(document.trained) <= 64
        assert True in document.trained


GOOD = b'{"question": "q", "answer": "a"}\n'
LINES = st.lists(
    st.sampled_from([GOOD, b'{"question": "r", "answer": "b"}\n', GOOD, GOOD])
    | st.binary(max_size=30)
    | st.text(alphabet='{}[]":,\\u0d89q1e.-+tfn \n\r', max_size=30).map(str.encode)
    | (ROWS | VALUES).map(lambda v: json.dumps(v, default=str).encode() + b"\n"),
    max_size=5,
).map(b"".join)


@FILES
@given(content=LINES, streaming=st.booleans())
@example(content=GOOD + b"[" * 9999, streaming=False)
@example(content=GOOD + b'{"question": ' + b"1" * 5000 + b', "answer": "a"}\n', streaming=False)
@example(content=b'{"question": "0000-01-01 00:00:00", "answer": "a"}\n' * 3, streaming=False)
@example(content=b"\xef\xbb\xbf" + GOOD, streaming=True)
@example(content=GOOD + b'{"question": "q"}\n', streaming=True)
@example(content=b"null\n", streaming=False)
def test_any_file_gives_problems_or_one_error_that_names_it(tmp_path: Path, content: bytes, streaming: bool) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    dataset, evaluation = DatasetConfig(path=str(path), streaming=streaming), EvalConfig(samples=1)

    def build() -> Any:
        train, _ = build_datasets(dataset, evaluation, tokenizer(template=True), seed=1, max_prompt_tokens=200)
        return list(islice(train, 3))

    samples = unless_refused(build)
    assert samples is None or all(isinstance(sample.target, str) for sample in samples)


@FILES
@given(content=LINES, streaming=st.booleans())
@example(
    content=b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\\ud800", "n": 1}]}\n'
    * 3,
    streaming=False,
)
def test_any_file_gives_documents_or_one_error_that_names_it(tmp_path: Path, content: bytes, streaming: bool) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    dataset = SFTDatasetConfig(path=str(path), streaming=streaming)

    def build() -> Any:
        evaluation = SFTEvalConfig(samples=1)
        train, _ = build_documents(dataset, eval=evaluation, tokenizer=tokenizer(template=True), seq_len=64, seed=1)
        return list(islice(train, 3))

    documents = unless_refused(build)
    assert documents is None or all(len(document.token_ids) <= 64 for document in documents)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + b"[" * 9999 + b"\n", "line 2: is nested too deeply"),
        (GOOD + b'{"question": ' + b"1" * 5000 + b"}\n", "line 2: holds a number that is not finite, or too long"),
        (GOOD + b'{"question": "\\ud800"}\n', r"line 2: holds '\\ud800', half of a character"),
        (GOOD + b'{"question": "q"}\n', "line 2: has no 'answer'. Give it one, null if there is no value"),
        (GOOD + b"\n" + GOOD, "line 2: is empty. Remove the line"),
        (b"\xef\xbb\xbf" + GOOD, "line 1: begins with a byte-order mark"),
        (b" null\n" + GOOD, "line 1: must be a JSON object, got null"),
        (GOOD * 3 + b"null\n", "line 4: must be a JSON object, got null"),
        (b"[\n null, " + GOOD + b"]", "line 2: must be a JSON object, got null"),
        (GOOD + b"\x00\n", "line 2: not valid JSON"),
        (b'{"question": "0000-01-01 00:00:00", "answer": "a"}\n', "Reading row 0 of rows.jsonl failed: OverflowError"),
        (
            b'{"question": [{"role": 5, "content": "x"}, {"role": "user", "content": "x"}], "answer": "a"}\n',
            "row 0 of rows.jsonl holds",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_told_by_line_or_row(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        build_datasets(
            DatasetConfig(path=str(path)), EvalConfig(samples=0), tokenizer(template=True), seed=1, max_prompt_tokens=99
        )
