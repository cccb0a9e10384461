from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config.sections import ColumnsConfig, DatasetConfig, EvalConfig, ExampleConfig
from forge.data.datasets import DataError, Sample, SampleStream, build_datasets, text_key
from forge.data.sources import IndexedRows, Row, StreamedRows
from forge.testing.tiny_model import make_byte_tokenizer

ADDITION = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_byte_tokenizer()


@pytest.fixture
def build(tokenizer: Any) -> Any:
    def build(samples: int = 4, seed: int = 1, limit: int = 500, split: str | None = None, **dataset: Any) -> Any:
        evaluation = EvalConfig(samples=samples, split=split)
        return build_datasets(DatasetConfig(**dataset), evaluation, tokenizer, seed=seed, max_prompt_tokens=limit)

    return build


def write_rows(file: Path, number: int, *, start: int = 0, **extra: Any) -> str:
    rows = [{"question": f"q{index}", "answer": str(index)} | extra for index in range(start, start + number)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def questions(stream: SampleStream, number: int) -> list[str]:
    return [sample.question for sample in islice(stream, number)]


# --- generated tasks


def test_a_reasoning_gym_task_gives_prompts_and_targets(build: Any) -> None:
    train, held_out = build(
        path="reasoning_gym",
        name="chain_sum",
        parameters=ADDITION,
        examples=[ExampleConfig(prompt="1 + 1 =", response="<answer>2</answer>")],
    )
    sample = next(train)
    assert sample.id.startswith("chain_sum/")
    assert sample.prompt.endswith(f"{sample.question}<|im_end|>\n<|im_start|>assistant\n")
    assert "<answer>2</answer>" in sample.prompt
    sum_ = sample.question.rpartition(":")[2].strip(" =")
    assert sum(int(part) for part in sum_.replace("- ", "+ -").split("+")) == int(sample.target)
    assert [other.id for other in held_out[:1]] == ["chain_sum/held-out/0"]


def test_held_out_problems_are_never_trained_on_and_the_same_for_every_seed(build: Any) -> None:
    # 1 digit, 2 terms: there are at most 200 questions, so that a stream of 2000 repeats each of them.
    small = {"path": "reasoning_gym", "name": "chain_sum", "parameters": {"max_terms": 2, "max_digits": 1}}
    train, held_out = build(samples=20, size=2000, **small)
    trained = set(questions(train, 1500))
    assert len({sample.question for sample in held_out}) == 20
    assert len(trained) > 100
    assert not trained & {sample.question for sample in held_out}
    assert train.dropped["held_out"] > 0
    assert build(samples=20, seed=2, **small)[1] == held_out


def test_another_seed_gives_other_problems_in_another_order(build: Any) -> None:
    task = {"path": "reasoning_gym", "name": "chain_sum", "parameters": {"min_digits": 6, "max_digits": 6}}
    one, two = (set(questions(build(seed=seed, size=100, **task)[0], 100)) for seed in (1, 2))
    assert not one & two


def test_the_toy_task_needs_no_parameters(build: Any) -> None:
    train, held_out = build(path="toy", samples=3)
    assert [sample.question for sample in held_out] == ["letters 0", "LETTERS 1", "letters 2"]
    assert next(train).target in ("lower", "upper")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"name": "chain_sun"}, "must be a reasoning-gym task, got 'chain_sun'; did you mean chain_sum"),
        ({"name": None}, "must be a reasoning-gym task, got None"),
        ({"name": "chain_sum", "parameters": {"colour": 1}}, "do not fit the task chain_sum:.*colour"),
        ({"name": "chain_sum", "parameters": {"min_terms": 9, "max_terms": 2}}, "do not fit the task chain_sum"),
        ({"name": "chain_sum", "parameters": {"seed": 1}}, "must not set seed: use dataset.size and training.seed"),
    ],
)
def test_a_wrong_task_or_parameter_is_the_users_error(dataset: dict[str, Any], message: str, build: Any) -> None:
    with pytest.raises(DataError, match=message):
        build(path="reasoning_gym", **dataset)


def test_a_task_with_too_few_problems_to_train_on_says_so(build: Any) -> None:
    with pytest.raises(DataError, match=r"No row of the data set can be trained on: 2 held out for evaluation"):
        build(path="reasoning_gym", name="chain_sum", size=2, samples=500, parameters={"max_terms": 2, "max_digits": 1})


# --- files


def test_rows_are_set_aside_from_a_file_by_their_text(build: Any, tmp_path: Path) -> None:
    train, held_out = build(path=write_rows(tmp_path / "rows.jsonl", 20), samples=5)
    kept = {sample.question for sample in held_out}
    assert len(kept) == 5
    assert set(questions(train, 15)) == {f"q{index}" for index in range(20)} - kept
    rows = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join(reversed(rows)))
    other = build(path=str(tmp_path / "other.jsonl"), samples=5, seed=9)[1]
    assert {sample.question for sample in other} == kept


def test_at_most_half_of_a_small_file_is_set_aside(
    build: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train, held_out = build(path=write_rows(tmp_path / "rows.jsonl", 5), samples=64)
    assert len(held_out) == 2
    assert len(set(questions(train, 3))) == 3
    assert "eval.samples is 64, but only 2 problems could be held out" in caplog.text


def test_the_test_split_is_held_out_where_there_is_one(build: Any, tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", 10)
    write_rows(tmp_path / "test.jsonl", 10, start=8)  # two of them are in the training rows as well
    train, held_out = build(path=str(tmp_path), samples=3)
    assert [sample.question for sample in held_out] == ["q8", "q9", "q10"]
    assert held_out[0].id == f"{tmp_path.name}/test/0"
    assert set(questions(train, 16)) == {f"q{index}" for index in range(8)}
    assert build(path=str(tmp_path), samples=3, split="train")[1] != held_out


def test_an_unknown_split_is_refused_with_those_that_exist(build: Any, tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", 2)
    with pytest.raises(DataError, match="has no split 'trian': it has train; did you mean train"):
        build(path=str(tmp_path), split="trian")


@pytest.mark.parametrize("streaming", [False, True])
def test_each_format_gives_the_same_samples(build: Any, tmp_path: Path, streaming: bool) -> None:
    import datasets

    rows = [{"question": f"q{index}", "answer": str(index)} for index in range(6)]
    write_rows(tmp_path / "a.jsonl", 6)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    found = []
    for name in ("a.jsonl", "a.json", "a.parquet", "saved"):
        stream, _ = build(path=str(tmp_path / name), samples=0, streaming=streaming, shuffle=False)
        found.append([(sample.question, sample.target) for sample in islice(stream, 7)])
    assert found == [[*((f"q{index}", str(index)) for index in range(6)), ("q0", "0")]] * 4


def test_columns_are_found_or_mapped(build: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"problem": "p", "solution": "s", "text": "t", "note": 7}\n')
    assert build(path=str(file), samples=0)[0].__next__().target == "s"
    train, _ = build(path=str(file), samples=0, columns=ColumnsConfig(prompt="text", target="note"))
    sample = next(train)
    assert (sample.question, sample.target) == ("t", "7")


def test_a_missing_column_is_refused_with_those_that_exist(build: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "t", "answer": "7"}\n')
    with pytest.raises(DataError, match=r"no column prompt or question .*it has text, answer.*dataset.columns.prompt"):
        build(path=str(file))
    with pytest.raises(DataError, match=r"dataset.columns.prompt must be a column.*'txet'.*did you mean text"):
        build(path=str(file), columns=ColumnsConfig(prompt="txet"))


def test_a_prompt_may_be_a_conversation(build: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    file.write_text(json.dumps({"prompt": turns, "answer": "x"}) + "\n")
    sample = next(build(path=str(file), samples=0)[0])
    assert sample.prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")
    assert sample.question == "Hi"
    file.write_text(json.dumps({"prompt": [*turns, {"role": "assistant", "content": "Yes?"}], "answer": "x"}) + "\n")
    with pytest.raises(DataError, match=r"ends with the user's turn, but row 0 of rows.jsonl"):
        build(path=str(file), samples=0)


def test_rows_without_question_or_answer_are_dropped_and_counted(build: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"question": "q", "answer": "a"}, {"question": " ", "answer": "b"}, {"question": "r", "answer": None}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, _ = build(path=str(file), samples=0, shuffle=False)
    assert questions(train, 3) == ["q", "q", "q"]
    assert train.dropped == {"incomplete": 4}


@pytest.mark.parametrize("streaming", [False, True])
def test_a_bad_json_line_is_named_by_file_and_number(build: Any, tmp_path: Path, streaming: bool) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "a", "answer": "1"}\n\n{"question": oops}\n')
    with pytest.raises(DataError, match=r"rows.jsonl, line 3: not valid JSON: .* at column 14. Fix or remove"):
        build(path=str(file), samples=0, streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_refused(build: Any, tmp_path: Path, streaming: bool, content: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(DataError, match="is empty"):
        build(path=str(tmp_path / "rows.jsonl"), streaming=streaming)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.jsonl", "no such file or folder"),
        ("./nowhere", "no such file or folder"),
        ("some/hub-id", "'some/hub-id': the Hugging Face hub cannot be reached .*local json, jsonl or parquet"),
    ],
)
def test_a_path_that_leads_nowhere_gives_one_message(build: Any, path: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build(path=path)


def test_a_file_of_an_unknown_kind_is_refused(build: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.xyz").write_text("x")
    with pytest.raises(DataError, match=r"must end in one of .json, .jsonl"):
        build(path=str(tmp_path / "rows.xyz"))


def test_size_takes_the_first_rows(build: Any, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 10)
    for streaming in (False, True):
        train, _ = build(path=path, samples=0, size=3, streaming=streaming)
        assert set(questions(train, 9)) == {"q0", "q1", "q2"}


# --- length


def test_prompts_over_the_limit_are_dropped_and_counted(build: Any, tmp_path: Path) -> None:
    # <|im_start|>user\n (6) + question + <|im_end|>\n (2) + <|im_start|>assistant\n (11): 19 tokens around it.
    file = tmp_path / "rows.jsonl"
    rows = [{"question": "x" * length, "answer": "a"} for length in (1, 5, 6, 50)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, _ = build(path=str(file), samples=0, limit=24, shuffle=False)
    assert [len(sample.prompt_ids) for sample in islice(train, 4)] == [20, 24, 20, 24]
    assert train.dropped == {"too_long": 2}
    with pytest.raises(DataError, match=r"No row .*: 4 too long\. The limit is 19 tokens of a prompt"):
        build(path=str(file), samples=0, limit=19)


def test_held_out_prompts_over_the_limit_are_passed_over(build: Any, tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", 3)
    (tmp_path / "test.jsonl").write_text(
        '{"question": "%s", "answer": ""}\n{"question": "short", "answer": ""}\n' % ("x" * 99)
    )
    assert [sample.question for sample in build(path=str(tmp_path), limit=50)[1]] == ["short"]


# --- the stream


def sample_of(row: Row) -> Sample:
    return Sample(id=row.id, prompt=row.text, prompt_ids=[1], target=row.target, question=row.text)


def stream_of(size: int, *, streamed: bool = False, **arguments: Any) -> SampleStream:
    rows = [Row(id=f"n/{index}", question=f"q{index}", target="t") for index in range(size)]
    source = (
        StreamedRows(read=lambda start: iter(rows[start:]))
        if streamed
        else IndexedRows(size=size, get=rows.__getitem__)
    )
    return SampleStream(source, make=sample_of, **({"seed": 1} | arguments))


@pytest.mark.parametrize("streamed", [False, True])
def test_each_epoch_has_every_row_once_in_an_order_of_its_own(streamed: bool) -> None:
    stream = stream_of(50, streamed=streamed)
    epochs = [[sample.id for sample in islice(stream, 50)] for _ in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [sample.id for sample in islice(stream_of(50, streamed=streamed), 50)] == epochs[0]
    assert [sample.id for sample in islice(stream_of(50, streamed=streamed, seed=2), 50)] != epochs[0]


def test_without_shuffling_the_rows_stay_in_order() -> None:
    assert questions(stream_of(3, shuffle=False), 7) == ["q0", "q1", "q2", "q0", "q1", "q2", "q0"]


@settings(max_examples=50, deadline=None)
@given(
    size=st.sampled_from([1, 7, 999, 1000, 1001, 2500]),
    taken=st.integers(0, 6000),
    streamed=st.booleans(),
    excluded=st.sets(st.integers(1, 20)),
)
def test_a_stream_resumes_at_exactly_the_next_sample(size: int, taken: int, streamed: bool, excluded: set[int]) -> None:
    arguments: dict[str, Any] = {"streamed": streamed, "excluded": {text_key(f"q{index}") for index in excluded}}
    stream = stream_of(size, **arguments)
    for _ in range(taken):
        next(stream)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = stream_of(size, **arguments)
    resumed.load_state_dict(state)
    assert [next(resumed).id for _ in range(30)] == [next(stream).id for _ in range(30)]


def test_a_file_resumes_at_exactly_the_next_sample(build: Any, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 30)
    for streaming in (False, True):
        stream, resumed = (build(path=path, samples=4, streaming=streaming)[0] for _ in range(2))
        questions(stream, 41)
        resumed.load_state_dict(stream.state_dict())
        assert questions(resumed, 40) == questions(stream, 40)


def test_a_state_of_another_run_is_refused() -> None:
    with pytest.raises(DataError, match=r"training.seed must stay 1 .* got 2"):
        stream_of(10, seed=2).load_state_dict(stream_of(10).state_dict())
    with pytest.raises(DataError, match="has 3 rows, but the run to be resumed had read 7"):
        stream_of(3).load_state_dict({"epoch": 0, "position": 7, "seed": 1})


def test_the_same_question_in_other_case_and_spacing_is_held_out_too() -> None:
    stream = stream_of(3, excluded={text_key(" Q1 ")}, shuffle=False)
    assert questions(stream, 4) == ["q0", "q2", "q0", "q2"]


def test_an_epoch_with_nothing_to_use_ends_with_a_message() -> None:
    with pytest.raises(DataError, match=r"No row .*: 1 held out for evaluation"):
        next(stream_of(1, excluded={text_key("q0")}))
    with pytest.raises(DataError, match="is empty"):
        next(stream_of(0))


def test_looking_for_the_first_sample_moves_nothing() -> None:
    stream = stream_of(5, excluded={text_key("q0")}, shuffle=False)
    stream.check()
    assert (stream.state_dict()["position"], stream.dropped) == (0, {})
    assert next(stream).id == "n/1"
