from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

from forge.batching import make_document_batch
from forge.config import SFTDatasetConfig, SFTEvalConfig, SFTSourceConfig
from forge.data.documents import Document, build_documents
from forge.data.errors import DataError
from forge.packing import pack, pack_documents
from forge.testing.tiny_model import make_byte_tokenizer
from forge.types import UserError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_byte_tokenizer()


@pytest.fixture
def build(tokenizer: Any) -> Any:
    def build(*, samples: int = 0, seq_len: int = 200, seed: int = 1, **config: Any) -> Any:
        split, own = config.pop("eval_split", None), config.pop("eval", None)
        evaluation = SFTEvalConfig(samples=samples, split=split, dataset=own)
        dataset = SFTDatasetConfig(**config)
        return build_documents(dataset, eval=evaluation, tokenizer=tokenizer, seq_len=seq_len, seed=seed)

    return build


def marked(tokenizer: Any, document: Document) -> str:
    """The text, with what is trained in ⟦⟧."""
    parts, inside = [], False
    for token, trained in zip(document.token_ids, document.trained, strict=True):
        if trained != inside:
            parts.append("⟦" if trained else "⟧")
            inside = trained
        parts.append(tokenizer.decode([token]))
    return "".join(parts) + "⟧" * inside


def chat(*turns: str) -> dict[str, Any]:
    """A conversation, the user first."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def write(file: Path, rows: list[Any]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_a_generated_sum_is_worked_out_in_tags(build: Any, tokenizer: Any) -> None:
    documents, held_out = build(
        path="reasoning_gym", name="chain_sum", samples=2, seq_len=400, system_prompt="Be brief."
    )
    document = next(documents)
    assert document.id.startswith("chain_sum/")
    assert [other.id for other in held_out] == ["chain_sum/held-out/0", "chain_sum/held-out/1"]
    text = marked(tokenizer, document)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nState the final answer")
    assert "<|im_start|>assistant\n⟦<think>" in text
    assert text.endswith("</answer><|im_end|>⟧\n")


# --- what is trained, and length


def test_the_assistant_its_last_turn_or_everything_is_trained(build: Any, tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [chat("a", "b", "c", "d")])
    expected = {
        "assistant": "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n⟦d<|im_end|>⟧\n",
        "last_assistant": "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n⟦d<|im_end|>⟧\n",
        "all": "<|im_start|>⟦user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n⟧",
    }
    for train_on, text in expected.items():
        document = next(build(path=path, train_on=train_on)[0])
        assert marked(tokenizer, document) == text
        assert tokenizer.decode(document.prompt_ids) == text.replace("⟦", "").replace("⟧", "")[:-12]


def test_plain_text_is_trained_whole_but_for_its_first_token(build: Any, tokenizer: Any, tmp_path: Path) -> None:
    document = next(build(path=write(tmp_path / "rows.jsonl", [{"text": "Once"}]))[0])
    assert (marked(tokenizer, document), document.prompt_length) == ("O⟦nce<|im_end|>⟧", 0)


# <|im_start|>user\n, a letter, <|im_end|>\n: 9 tokens; <|im_start|>assistant\n: 11 more; the answer, <|im_end|>\n
@pytest.mark.parametrize(
    ("truncate", "seq_len", "text"),
    [
        ("right", 26, "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦abcd<|im_end|>⟧\n"),
        ("right", 25, "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦abcd<|im_end|>⟧"),
        ("right", 22, "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦ab⟧"),
        ("left", 25, "user\nq<|im_end|>\n<|im_start|>assistant\n⟦abcd<|im_end|>⟧\n"),
        ("left", 7, "\n⟦abcd<|im_end|>⟧\n"),
        ("left", 6, "a⟦bcd<|im_end|>⟧\n"),
    ],
)
def test_a_sample_that_is_too_long_is_cut_at_the_chosen_side_and_counted(
    truncate: str, seq_len: int, text: str, build: Any, tokenizer: Any, tmp_path: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", [chat("q", "abcd")])
    documents, _ = build(path=path, truncate=truncate, seq_len=seq_len)
    document = next(documents)
    assert marked(tokenizer, document) == text
    assert (document.truncated, documents.truncated) == (seq_len < 26, int(seq_len < 26))
    turn = text.find("⟦")
    assert tokenizer.decode(document.prompt_ids) == ("" if text[0] == "a" else text[:turn])


def test_samples_are_dropped_and_counted_if_they_are_too_long_or_nothing_is_left(build: Any, tmp_path: Path) -> None:
    rows = [chat("q", "abcd"), chat("q", "abcde"), chat("q" * 30, "a")]
    path = write(tmp_path / "rows.jsonl", rows)
    for truncate, used, dropped in [
        ("drop", [0], {"too_long": 2}),
        ("right", [0, 1], {"nothing_trained": 1}),
        ("left", [0, 1, 2], {}),
    ]:
        documents, _ = build(path=path, truncate=truncate, seq_len=26, shuffle=False)
        once = ids(documents, len(used) + 1)  # the first of the next epoch, too
        assert once == [*(f"rows.jsonl/{number}" for number in used), "rows.jsonl/0"]
        assert documents.dropped == dropped
        assert documents.truncated == {"drop": 0, "right": 1, "left": 2}[truncate]


def test_only_samples_that_are_too_long_end_the_run_before_it_starts(build: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [chat("q", "a" * 99), chat("q", "a" * 30)])
    message = (
        r"No row of the data set can be trained on: 2 too long\. training.seq_len is 26 tokens, and the shortest of "
        r"the long samples has 52\. Fix: --training.seq_len 52, or --dataset.truncate right"
    )
    with pytest.raises(DataError, match=message):
        build(path=path, truncate="drop", seq_len=26)
    with pytest.raises(DataError, match=r"2 of which truncation left nothing to train on\. .*--dataset.truncate left"):
        build(path=path, truncate="right", seq_len=20)


# --- wrong input, told before anything starts


GOOD = chat("q", "a")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "rows.jsonl' is empty: it has no rows"),
        ([json.dumps(GOOD), "", '{"messages": oops}'], r"rows.jsonl, line 3: not valid JSON: .* at column 14\. Fix or"),
        ([json.dumps(chat("q"))], "row 0 of rows.jsonl has no assistant turn, so there is nothing to train on"),
        ([json.dumps({"messages": [{"role": "usr", "content": "q"}]})], "got 'usr'; did you mean user"),
        ([json.dumps({"messages": [{"role": "user", "content": 5}]})], "row 0 of rows.jsonl, message 0: the user's"),
        ([json.dumps({"asked": "q", "said": "a"})], "none of the columns of a conversation.*it has asked, said"),
    ],
    ids=["empty file", "broken line", "no assistant", "wrong role", "number", "missing column"],
)
def test_wrong_input_is_the_users_error(
    lines: list[str], message: str, streaming: bool, build: Any, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(line + "\n" for line in lines))
    with pytest.raises(UserError, match=message):
        build(path=str(tmp_path / "rows.jsonl"), streaming=streaming)


def test_a_bad_row_is_found_before_the_start_wherever_it_is_or_dropped_and_counted(build: Any, tmp_path: Path) -> None:
    rows = [chat(f"q{number}", "a") for number in range(150)]
    rows[140] = chat("q", "")
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=r"row 140 of rows.jsonl, message 1: the assistant's content must not be empty"):
        build(path=path, shuffle=False)
    documents, _ = build(path=path, invalid_rows="drop")
    assert len({document.id for document in islice(documents, 149)}) == 149
    next(documents)
    assert documents.dropped == {"empty": 1}
    with pytest.raises(DataError, match=r"No row of the data set can be trained on: 1 without an assistant turn\."):
        build(path=write(tmp_path / "bad.jsonl", [chat("q")]), invalid_rows="drop")


def test_a_row_that_the_template_refuses_is_named_or_dropped(build: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [chat("q", "a"), chat("q", "a", "q", "a")])
    template = (
        "{{ raise_exception('one turn only') if messages | length > 2 }}"
        "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(DataError, match=r"rows.jsonl/1: The chat template cannot render .*one turn only"):
        build(path=path, chat_template=template)
    documents, _ = build(path=path, chat_template=template, invalid_rows="drop", shuffle=False)
    assert [document.id for document in islice(documents, 2)] == ["rows.jsonl/0"] * 2
    assert documents.dropped == {"not_rendered": 1}


# --- the stream


def numbered(file: Path, name: str, number: int) -> str:
    return write(file, [chat(f"{name}{index}", f"answer {index}") for index in range(number)])


def ids(documents: Any, number: int) -> list[str]:
    return [document.id for document in islice(documents, number)]


@pytest.mark.parametrize("streaming", [False, True])
def test_each_epoch_has_every_sample_once_in_an_order_of_its_own(build: Any, tmp_path: Path, streaming: bool) -> None:
    path = numbered(tmp_path / "rows.jsonl", "q", 20)
    documents, _ = build(path=path, streaming=streaming)
    first, second = ids(documents, 20), ids(documents, 20)
    assert sorted(first) == sorted(second) == sorted(f"rows.jsonl/{index}" for index in range(20))
    assert first != second
    assert ids(build(path=path, streaming=streaming)[0], 20) == first
    assert ids(build(path=path, streaming=streaming, seed=2)[0], 20) != first
    if not streaming:
        documents, _ = build(path=path)
        ids(documents, 25)
        assert documents.epoch == 1.25


def test_data_sets_are_mixed_by_weight_in_every_stretch(build: Any, tmp_path: Path) -> None:
    few, many = numbered(tmp_path / "few.jsonl", "few", 4), numbered(tmp_path / "many.jsonl", "many", 90)
    other = SFTSourceConfig(path=many, weight=1.0)
    documents, _ = build(path=few, weight=3.0, mix=[other, SFTSourceConfig(path="toy", weight=0.5)])
    drawn = [name.partition("/")[0] for name in ids(documents, 90)]
    for start in range(0, 90, 9):
        stretch = drawn[start : start + 9]
        assert [stretch.count(name) for name in ("few.jsonl", "many.jsonl", "toy")] == [6, 2, 1]
    assert documents.epoch == 60 / 4


def test_a_mix_resumes_at_exactly_the_next_document(build: Any, tmp_path: Path) -> None:
    first, second = numbered(tmp_path / "a.jsonl", "a", 7), numbered(tmp_path / "b.jsonl", "b", 11)
    mix = [SFTSourceConfig(path=second, weight=0.7, streaming=True)]
    documents, resumed = (build(path=first, mix=mix, samples=3)[0] for _ in range(2))
    for taken in (0, 1, 2, 3, 5, 8, 13, 21):
        ids(documents, taken)
        state = json.loads(json.dumps(documents.state_dict()))
        follow = list(islice(documents, 20))
        resumed.load_state_dict(state)
        assert list(islice(resumed, 20)) == follow


def test_a_state_of_another_mix_is_refused(build: Any) -> None:
    state = build(path="toy")[0].state_dict()
    with pytest.raises(DataError, match=r"to be resumed mixed 1 data sets, and dataset with dataset.mix now names 2"):
        build(path="toy", mix=[SFTSourceConfig(path="toy")])[0].load_state_dict(state)


# --- held out


def test_each_set_gives_its_share_of_the_held_out_samples(build: Any, tmp_path: Path) -> None:
    first, second = numbered(tmp_path / "a.jsonl", "a", 20), numbered(tmp_path / "b.jsonl", "b", 20)
    documents, held_out = build(path=first, weight=3.0, mix=[SFTSourceConfig(path=second)], samples=8)
    kept = [document.id for document in held_out]
    assert [name.partition("/")[0] for name in kept] == ["a.jsonl"] * 6 + ["b.jsonl"] * 2
    assert not set(ids(documents, 100)) & set(kept)
    assert build(path=first, weight=3.0, mix=[SFTSourceConfig(path=second)], samples=8, seed=5)[1] == held_out
    assert len(build(path=first, mix=[SFTSourceConfig(path=first)], samples=8)[1]) == 8  # none of them twice


def test_a_split_or_a_data_set_of_its_own_validates_and_is_never_trained(build: Any, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    numbered(tmp_path / "folder" / "train.jsonl", "q", 10)
    # The first is among the training rows.
    write(tmp_path / "folder" / "test.jsonl", [chat("Q8 ", "answer 8"), chat("new", "x")])
    numbered(tmp_path / "folder" / "dev.jsonl", "d", 3)
    folder = str(tmp_path / "folder")
    documents, held_out = build(path=folder, samples=2)
    assert [document.id for document in held_out] == ["folder/test/0", "folder/test/1"]
    assert "folder/train/8" not in ids(documents, 30)
    assert documents.dropped["held_out"] > 0
    _, held_out = build(path=folder, samples=3, eval_split="validation")
    assert [document.id for document in held_out] == [f"folder/validation/{index}" for index in range(3)]
    own = SFTSourceConfig(path=numbered(tmp_path / "own.jsonl", "q", 4))
    documents, held_out = build(path=folder, samples=3, eval=own)
    assert [document.id for document in held_out] == [f"own.jsonl/{index}" for index in range(3)]
    assert set(ids(documents, 30)) == {f"folder/train/{index}" for index in range(3, 10)}
    assert len(build(path=folder, samples=2, eval=SFTSourceConfig(path="toy"))[1]) == 2


# --- batches and packing


def document(*tokens: int, trained: str) -> Document:
    """trained: 1 for each token that is a target."""
    return Document(id="d", token_ids=list(tokens), trained=[mark == "1" for mark in trained])


def test_documents_become_padded_batches_dealt_out_by_their_tokens() -> None:
    documents = [
        document(5, 6, 7, trained="001"),
        document(1, 2, 3, 4, 5, trained="01011"),
        document(8, 9, trained="01"),
    ]
    inputs, targets = make_document_batch(documents, ranks=2, pad_id=0)
    assert inputs[0]["tokens"].tolist() == [[1, 2, 3, 4, 5]]
    assert inputs[1]["tokens"].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert inputs[1]["attention_mask"].tolist() == [[True, True, True], [True, True, False]]
    assert targets[1]["response"].tolist() == [[6, 7], [9, 0]]
    assert targets[1]["padding_mask"].tolist() == [[False, True], [True, False]]
    assert targets[0]["padding_mask"].tolist() == [[True, False, True, True]]
    assert targets[1]["advantages"].tolist() == [[1.0], [1.0]]


def test_a_rank_without_a_document_gets_an_empty_batch() -> None:
    inputs, targets = make_document_batch([document(1, 2, trained="01")], ranks=2, pad_id=0)
    assert [batch["tokens"].shape for batch in inputs] == [(1, 2), (0, 2)]
    assert [batch["padding_mask"].shape for batch in targets] == [(1, 1), (0, 1)]
    assert pack(inputs[1], targets[1], max_tokens=8) == []


def test_packed_documents_see_only_themselves_and_count_from_zero() -> None:
    # The first two share 1, 2; the third begins with another token.
    documents = [
        document(1, 2, 3, 4, trained="0011"),
        document(1, 2, 5, trained="001"),
        document(9, 3, 4, 7, trained="0101"),
    ]
    [inputs], [targets] = make_document_batch(documents, ranks=1, pad_id=0)
    for share in (True, False):
        [row] = pack(inputs, targets, max_tokens=20, share_prefixes=share)
        sees = row.layout.dense_mask()  # [T, T]
        tokens, positions = row.tokens_T.tolist(), row.positions_T.tolist()
        assert row.num_tokens == (9 if share else 11)
        seen = {}
        for pair, number, column in zip(row.score_pair_N, row.score_row_N, row.score_col_N, strict=True):
            index = int(row.score_index_M[pair])
            context = sorted((positions[i], tokens[i]) for i in range(len(tokens)) if bool(sees[index, i]))
            seen[int(number), int(column) + 1] = [token for _, token in context], int(row.score_targets_M[pair])
            assert [position for position, _ in context] == list(range(len(context)))
        assert seen == {
            (0, 2): ([1, 2], 3),
            (0, 3): ([1, 2, 3], 4),
            (1, 2): ([1, 2], 5),
            (2, 1): ([9], 3),
            (2, 3): ([9, 3, 4], 7),
        }


def test_without_packing_each_document_has_a_row_of_its_own() -> None:
    documents = [document(1, 2, 3, 4, trained="0011"), document(1, 2, 5, trained="001")]
    [inputs], [targets] = make_document_batch(documents, ranks=1, pad_id=0)
    rows = pack(inputs, targets, max_tokens=1, share_prefixes=False)
    assert [row.tokens_T.tolist() for row in rows] == [[1, 2, 3, 4], [1, 2, 5]]


def test_best_fit_fills_rows_of_random_lengths_to_more_than_99_percent() -> None:
    random = Random(0)
    lengths = [min(1 + int(random.lognormvariate(5, 1)), 2048) for _ in range(1000)]
    rows = pack_documents(
        [[number, *[0] * (length - 1)] for number, length in enumerate(lengths, start=1)],
        [[length - 1] if length > 1 else [] for length in lengths],
        max_tokens=2048,
        share_prefixes=False,
    )
    filled = [row.num_tokens for row in rows]
    assert max(filled) <= 2048
    assert sum(filled) == sum(length for length in lengths if length > 1)
    assert sum(filled[:-1]) / (2048 * len(filled[:-1])) > 0.99
