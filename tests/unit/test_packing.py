"""Packed rows: what is computed, who sees whom, and that nothing changes against separate documents."""

from __future__ import annotations

import doctest
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import forge.packing
from forge.attention import TreeLayout, attend
from forge.packing import PackedRow, gather, pack, pack_documents, unpack


class TinyTransformer(nn.Module):
    """Two layers with learned positions and grouped queries: enough for a wrong position or mask to show."""

    def __init__(self, vocabulary: int = 50, width: int = 16, positions: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(positions, width)
        self.layers = nn.ModuleList(nn.Linear(width, 4 * 4 + 2 * 2 * 4 + width) for _ in range(2))
        self.joins = nn.ModuleList(nn.Linear(4 * 4, width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, layout: TreeLayout) -> Tensor:
        x = self.embed(tokens_T) + self.place(positions_T)
        for layer, join in zip(self.layers, self.joins, strict=True):
            q, k, v, gate = layer(nn.functional.layer_norm(x, x.shape[-1:])).split([16, 8, 8, x.shape[-1]], dim=-1)
            heads = (q.view(1, -1, 4, 4), k.view(1, -1, 2, 4), v.view(1, -1, 2, 4))
            x = x + join(attend(*heads, layout)[0].flatten(1)) * gate.tanh()
        return self.head(x).log_softmax(-1)


def packed_logprobs(model: TinyTransformer, rows: list[PackedRow], shape: tuple[int, int]) -> Tensor:
    out = torch.zeros(shape, dtype=model.head.weight.dtype)
    for row in rows:
        logprobs = model(row.tokens_T, row.positions_T, row.layout)
        out = unpack(logprobs[row.score_index_M, row.score_targets_M], row, out)
    return out


def separate_logprobs(model: TinyTransformer, inputs: dict, targets: dict) -> Tensor:
    """[B, R], one document at a time, in plain loops."""
    tokens, mask = inputs["tokens"], targets["padding_mask"] != 0
    batch, length = mask.shape
    prompt = tokens.shape[1] - length
    real = inputs["attention_mask"] != 0 if "attention_mask" in inputs else torch.ones_like(tokens, dtype=torch.bool)
    out = torch.zeros(batch, length, dtype=model.head.weight.dtype)
    for b in range(batch):
        kept = [c for c in range(prompt + length) if real[b, c]]
        document = tokens[b, kept]
        if not mask[b].any():
            continue
        logprobs = model(document, torch.arange(len(kept)), TreeLayout.from_lengths([len(kept)]))
        for r in range(length):
            if mask[b, r]:
                place = kept.index(prompt + r)
                out[b, r] = logprobs[place - 1, document[place]]
    return out


def largest_difference(inputs: dict, targets: dict, *, dtype=torch.float64, **options) -> float:
    """Between packed and separate documents: log-probabilities, and gradients of an uneven loss of them."""
    model = TinyTransformer().to(dtype)
    rows = pack(inputs, targets, **options)
    shape = tuple(targets["response"].shape)
    results = []
    for logprobs in (packed_logprobs(model, rows, shape), separate_logprobs(model, inputs, targets)):
        weights = torch.linspace(-1, 2, logprobs.numel(), dtype=dtype).view(shape)
        loss = (logprobs.exp() * weights + logprobs).sum()
        grads = torch.autograd.grad(loss, list(model.parameters())) if loss.requires_grad else []
        results.append([logprobs.detach(), *grads])
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


def batch_of(prompts: list[list[int]], responses: list[list[int]], masks: list[list[int]] | None = None):
    """The padded dicts of these sequences, with an attention mask."""
    prompt_columns, response_columns = max(map(len, prompts)), max(map(len, responses))
    masks = masks or [[1] * len(response) for response in responses]
    tokens, attention, trained = [], [], []
    for prompt, response, mask in zip(prompts, responses, masks, strict=True):
        left, right = prompt_columns - len(prompt), response_columns - len(response)
        tokens.append([0] * left + prompt + response + [0] * right)
        attention.append([0] * left + [1] * (len(prompt) + len(response)) + [0] * right)
        trained.append(mask + [0] * right)
    tokens_BL = torch.tensor(tokens)
    inputs = {"tokens": tokens_BL, "attention_mask": torch.tensor(attention)}
    return inputs, {"response": tokens_BL[:, prompt_columns:], "padding_mask": torch.tensor(trained)}


def distinct(count: int, *, start: int) -> list[int]:
    return list(range(start, start + count))


@st.composite
def batches(draw):
    """Small batches with few distinct tokens, so that prefixes coincide by chance; holes and all-masked rows too."""
    token = st.integers(1, 3)
    pool = draw(st.lists(st.lists(token, min_size=1, max_size=5), min_size=1, max_size=3))
    prompts, responses, masks = [], [], []
    for _ in range(draw(st.integers(1, 6))):
        prompts.append(draw(st.sampled_from(pool)))
        responses.append(draw(st.lists(token, min_size=1, max_size=6)))
        masks.append(draw(st.lists(st.integers(0, 1), min_size=len(responses[-1]), max_size=len(responses[-1]))))
    return batch_of(prompts, responses, masks)


# ---- how many tokens are computed -----------------------------------------------------------------------------------


def group_of_eight(*, prompt: int, response: int) -> tuple[dict, dict]:
    return batch_of([distinct(prompt, start=1)] * 8, [distinct(response, start=1000 * (i + 1)) for i in range(8)])


def test_8_samples_of_128_on_one_prompt_of_512_make_1536_tokens_instead_of_5120() -> None:
    [row] = pack(*group_of_eight(prompt=512, response=128), max_tokens=4096)
    assert row.num_tokens == row.tokens_T.numel() == 512 + 8 * 128 == 1536
    assert len(row.layout.segments) == 9
    assert row.score_row_N.numel() == row.score_index_M.numel() == 8 * 128
    plain = pack(*group_of_eight(prompt=512, response=128), max_tokens=8192, share_prefixes=False)
    assert [r.num_tokens for r in plain] == [5120]


def test_leaving_out_the_last_inputs_saves_one_token_per_sample() -> None:
    [row] = pack(*group_of_eight(prompt=512, response=128), max_tokens=4096, keep_last=False)
    assert row.num_tokens == 512 + 8 * 127
    assert row.score_row_N.numel() == 8 * 128


def test_a_preamble_of_400_over_4_prompts_is_computed_once() -> None:
    # 400 + 4 * 30 + 4 * 2 * 10 = 600; apart they would be 8 * 440 = 3520
    prompts = [distinct(400, start=1) + distinct(30, start=1000 * (i // 2 + 1)) for i in range(8)]
    responses = [distinct(10, start=10_000 + 100 * i) for i in range(8)]
    [row] = pack(*batch_of(prompts, responses), max_tokens=1000)
    assert row.num_tokens == 600
    assert len(row.layout.segments) == 1 + 4 + 8
    assert [parent for _, _, parent in row.layout.segments] == [-1, 0, 1, 1, 0, 4, 4, 0, 7, 7, 0, 10, 10]


def test_responses_that_begin_alike_share_their_beginning() -> None:
    # prompt 1 2; responses 3 4 5 and 3 4 6 and 3: tokens 1 2 3 4 5 6
    inputs, targets = batch_of([[1, 2]] * 3, [[3, 4, 5], [3, 4, 6], [3]])
    [row] = pack(inputs, targets, max_tokens=100)
    assert row.tokens_T.tolist() == [1, 2, 3, 4, 6, 5]
    assert row.positions_T.tolist() == [0, 1, 2, 3, 4, 4]
    assert row.layout.segments == ((0, 4, -1), (4, 5, 0), (5, 6, 0))
    # the 7 trained tokens are 4 distinct (state, target) pairs: 3 after 2, 4 after 3, and 5 or 6 after 4
    pairs = set(zip(row.score_index_M.tolist(), row.score_targets_M.tolist(), strict=True))
    assert pairs == {(1, 3), (2, 4), (3, 5), (3, 6)}
    assert row.score_pair_N.numel() == 7


def test_identical_samples_are_computed_and_scored_once() -> None:
    [row] = pack(*batch_of([[1, 2, 3]] * 8, [[4, 5]] * 8), max_tokens=100)
    assert row.tokens_T.tolist() == [1, 2, 3, 4, 5]
    assert row.score_index_M.tolist() == [2, 3]
    assert row.score_row_N.numel() == 16


def test_padding_and_what_follows_the_last_trained_token_are_not_computed() -> None:
    inputs, targets = batch_of([[1, 2, 3], [4]], [[5, 6, 7, 8], [9]], [[1, 0, 1, 0], [1]])
    [row] = pack(inputs, targets, max_tokens=100)
    # of the first sequence 1 2 3 5 6 7 (6 was written by an environment: context), of the second 4 9
    assert sorted(row.tokens_T.tolist()) == [1, 2, 3, 4, 5, 6, 7, 9]
    assert sorted(row.score_targets_M.tolist()) == [5, 7, 9]
    assert sorted(zip(row.score_row_N.tolist(), row.score_col_N.tolist(), strict=True)) == [(0, 0), (0, 2), (1, 0)]


def test_without_an_attention_mask_every_prompt_token_is_real() -> None:
    inputs, targets = batch_of([[1, 2, 3], [4]], [[5], [9]])
    [row] = pack({"tokens": inputs["tokens"]}, targets, max_tokens=100)
    assert sorted(row.tokens_T.tolist()) == [0, 0, 1, 2, 3, 4, 5, 9]


def test_rows_without_a_trained_token_are_left_out() -> None:
    inputs, targets = batch_of([[1], [2]], [[3], [4]], [[0], [1]])
    [row] = pack(inputs, targets, max_tokens=100)
    assert row.tokens_T.tolist() == [2, 4]
    assert pack(inputs, targets | {"padding_mask": torch.zeros(2, 1)}, max_tokens=100) == []


# ---- which documents share a row ------------------------------------------------------------------------------------


def sizes(rows: list[PackedRow]) -> list[int]:
    return [row.num_tokens for row in rows]


def test_a_group_larger_than_the_budget_is_cut_and_its_prompt_repeated() -> None:
    # prompt 100, 8 responses of 50: 500 tokens; at most 3 responses fit beside the prompt in 250
    inputs, targets = group_of_eight(prompt=100, response=50)
    rows = pack(inputs, targets, max_tokens=250)
    assert sizes(rows) == [250, 250, 200]
    assert torch.cat([row.score_row_N for row in rows]).unique().tolist() == list(range(8))


def test_whole_groups_stay_together_where_they_fit() -> None:
    # two groups of 10 + 2 * 20 = 50 with a budget of 80: a row each, although three responses would fit in one
    prompts = [distinct(10, start=1 + 100 * (i // 2)) for i in range(4)]
    rows = pack(*batch_of(prompts, [distinct(20, start=1000 * (i + 1)) for i in range(4)]), max_tokens=80)
    assert sizes(rows) == [50, 50]
    assert [row.score_row_N.unique().tolist() for row in rows] == [[0, 1], [2, 3]]


def test_unrelated_documents_go_where_they_fit_best() -> None:
    # 60, 50, 40, 30, 20 into 100: 60 + 40 and 50 + 30 + 20
    documents = [distinct(n, start=1000 * n) for n in (20, 30, 40, 50, 60)]
    rows = pack_documents(documents, [[len(d) - 1] for d in documents], max_tokens=100)
    assert sizes(rows) == [100, 100]


def test_a_document_over_the_budget_gets_a_row_of_its_own() -> None:
    documents = [distinct(30, start=1), distinct(5, start=100), distinct(5, start=200)]
    rows = pack_documents(documents, [[4]] * 2 + [[3]], max_tokens=3)
    assert sizes(rows) == [5, 5, 4]
    same = pack_documents([distinct(9, start=1)] * 4, [[8]] * 4, max_tokens=3)
    assert sizes(same) == [9]  # the other three add nothing


def test_packing_the_same_batch_again_gives_the_same_rows() -> None:
    inputs, targets = group_of_eight(prompt=20, response=9)
    first, second = (pack(inputs, targets, max_tokens=60) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.layout.segments == b.layout.segments
        assert a.tokens_T.tolist() == b.tokens_T.tolist()
        assert a.score_row_N.tolist() == b.score_row_N.tolist()


@given(batches(), st.integers(1, 30), st.booleans())
@settings(deadline=None, max_examples=50)
def test_every_trained_token_is_scored_once_and_rows_keep_the_budget(batch, budget: int, share: bool) -> None:
    inputs, targets = batch
    rows = pack(inputs, targets, max_tokens=budget, share_prefixes=share)
    places = [p for row in rows for p in zip(row.score_row_N.tolist(), row.score_col_N.tolist(), strict=True)]
    assert sorted(places) == sorted(map(tuple, (targets["padding_mask"] != 0).nonzero().tolist()))
    longest = int(inputs["attention_mask"].sum(1).max())
    assert all(row.num_tokens <= max(budget, longest) for row in rows)


@given(batches())
@settings(deadline=None, max_examples=50)
def test_with_room_enough_each_distinct_prefix_is_one_token(batch) -> None:
    inputs, targets = batch
    prefixes = set()
    columns = inputs["tokens"].shape[1] - targets["response"].shape[1]
    for ids, real, mask in zip(inputs["tokens"], inputs["attention_mask"], targets["padding_mask"], strict=True):
        end = columns + max((i + 1 for i, mark in enumerate(mask.tolist()) if mark), default=-columns)
        document = ids[:end][real[:end] != 0].tolist()
        prefixes |= {tuple(document[: n + 1]) for n in range(len(document))}
    rows = pack(inputs, targets, max_tokens=10_000)
    assert sum(row.num_tokens for row in rows) == len(prefixes)
    assert len(rows) == (1 if prefixes else 0)


# ---- nothing changes against separate documents ---------------------------------------------------------------------


@given(batches(), st.sampled_from([1, 12, 1000]), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=60)
def test_logprobs_and_gradients_equal_separate_documents(batch, budget: int, share: bool, keep_last: bool) -> None:
    options = {"max_tokens": budget, "share_prefixes": share, "keep_last": keep_last}
    assert largest_difference(*batch, **options) < 1e-10


def test_logprobs_and_gradients_equal_separate_documents_in_float32() -> None:
    preamble = [7, 3, 9, 4]
    prompts = [[*preamble, 10 + i // 4, 20] for i in range(8)]
    responses = [[30 + i % 3, 31, 32 + i, 33][: 1 + i % 4] for i in range(8)]
    assert largest_difference(*batch_of(prompts, responses), dtype=torch.float32, max_tokens=1000) < 1e-5


def test_an_empty_prompt_may_have_an_untrained_first_token() -> None:
    inputs, targets = batch_of([[], [5]], [[1, 2, 3], [1, 2]], [[0, 1, 1], [1, 1]])
    assert largest_difference(inputs, targets, max_tokens=100) < 1e-10


# ---- there and back -------------------------------------------------------------------------------------------------


def test_unpack_puts_values_at_their_places_and_gather_is_its_transpose() -> None:
    inputs, targets = batch_of([[1, 2]] * 2, [[3, 4], [3, 5]])
    [row] = pack(inputs, targets, max_tokens=100)
    pairs = list(zip(row.score_index_M.tolist(), row.score_targets_M.tolist(), strict=True))
    values = torch.tensor([{(1, 3): -1.0, (2, 4): -2.0, (2, 5): -3.0}[pair] for pair in pairs], requires_grad=True)
    out = unpack(values, row, torch.zeros(2, 2))
    assert out.tolist() == [[-1.0, -2.0], [-1.0, -3.0]]
    weights = torch.tensor([[1.0, 10.0], [100.0, 1000.0]])
    (out * weights).sum().backward()
    # the first token of both responses is one pair, so its gradient is 1 + 100
    assert values.grad is not None
    assert gather(weights, row).tolist() == values.grad.tolist()
    assert dict(zip(pairs, values.grad.tolist(), strict=True)) == {(1, 3): 101.0, (2, 4): 10.0, (2, 5): 1000.0}


def test_unpack_leaves_other_rows_alone_and_keeps_float32() -> None:
    rows = pack(*batch_of([[1], [2]], [[3], [4]]), max_tokens=2)
    out = torch.zeros(2, 1)
    for value, row in zip((-1.0, -2.0), rows, strict=True):
        out = unpack(torch.tensor([value], dtype=torch.bfloat16), row, out)
    assert out.tolist() == [[-1.0], [-2.0]]
    assert out.dtype == torch.float32


def test_to_moves_the_tensors_and_keeps_the_layout() -> None:
    [row] = pack(*batch_of([[1]], [[3]]), max_tokens=9)
    moved = row.to("meta")
    assert moved.tokens_T.device.type == moved.score_pair_N.device.type == "meta"
    assert moved.layout is row.layout


# ---- refusals and speed ---------------------------------------------------------------------------------------------


def test_a_trained_first_token_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match=r"document 0 of 2 tokens scores positions 0 to 1.*Put a token \(say BOS\)"):
        pack(*batch_of([[]], [[1, 2]]), max_tokens=9)


def test_wrong_shapes_and_a_response_that_is_not_in_the_tokens_are_refused() -> None:
    inputs, targets = batch_of([[1]], [[3, 4]])
    with pytest.raises(ValueError, match=r"must be \[B, P \+ R\], \[B, R\] and \[B, R\]"):
        pack(inputs, targets | {"padding_mask": torch.ones(1, 3)}, max_tokens=9)
    with pytest.raises(ValueError, match=r"response\[0, 1\] is 9, but tokens\[0, 2\] is 4"):
        pack(inputs, targets | {"response": torch.tensor([[3, 9]])}, max_tokens=9)
    with pytest.raises(ValueError, match=r"attention_mask .* must have the shape of tokens"):
        pack(inputs | {"attention_mask": torch.ones(1, 2)}, targets, max_tokens=9)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        pack(inputs, targets, max_tokens=0)


def test_packing_takes_less_than_a_millisecond_of_cpu_per_document() -> None:
    prompts = [distinct(490, start=1) + distinct(30, start=1000 * (i // 8 + 1)) for i in range(64)]
    responses = [distinct(5 + i % 12, start=100 * (i + 1)) for i in range(64)]
    inputs, targets = batch_of(prompts, responses)
    times = []
    for _ in range(3):
        start = time.process_time()
        pack(inputs, targets, max_tokens=4096)
        times.append(time.process_time() - start)
    assert min(times) < 64e-3


def test_a_thousand_nested_documents_need_no_deep_recursion() -> None:
    documents = [[1] * n for n in range(2, 1500)]
    rows = pack_documents(documents, [[len(d) - 1] for d in documents], max_tokens=1000)
    assert max(sizes(rows)) == 1499
    assert sum(row.score_row_N.numel() for row in rows) == 1498


def test_the_examples_in_the_docstrings_are_true() -> None:
    assert doctest.testmod(forge.packing, extraglobs={"torch": torch}).failed == 0
