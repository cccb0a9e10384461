"""Tree attention against the definition: softmax over an explicit [T, T] mask, in float64."""

from __future__ import annotations

import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import forge.attention
from forge.attention import TreeLayout, attend


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The formula, nothing else: [1, T, N, H] from a [T, T] mask."""
    repeat = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    scores = torch.einsum("blnh,bmnh->bnlm", q, k) * scale
    return torch.einsum("bnlm,bmnh->blnh", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def visible_by_definition(layout: TreeLayout) -> Tensor:
    """[T, T] bool from the words of the definition, token by token, not from intervals."""
    owner = [i for i, (start, end, _) in enumerate(layout.segments) for _ in range(start, end)]

    def ancestors(index: int) -> set[int]:
        parent = layout.segments[index][2]
        return {index} if parent == -1 else {index} | ancestors(parent)

    rows = [
        [key <= query and owner[key] in ancestors(owner[query]) for key in range(len(owner))]
        for query in range(len(owner))
    ]
    return torch.tensor(rows)


def random_qkv(tokens: int, *, heads: int = 6, kv_heads: int = 2, size: int = 16, dtype=torch.float64) -> list[Tensor]:
    torch.manual_seed(tokens)
    return [torch.randn(1, tokens, n, size, dtype=dtype, requires_grad=True) for n in (heads, kv_heads, kv_heads)]


def values_and_gradients(function, qkv: list[Tensor]) -> list[Tensor]:
    out = function(*qkv)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), qkv)]


def largest_difference(layout: TreeLayout, *, dtype=torch.float64, scale: float | None = None) -> float:
    """Over output and gradients, relative to the largest element of each."""
    qkv = random_qkv(layout.num_tokens, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    got = values_and_gradients(lambda *x: attend(*x, layout, scale=scale), qkv)
    want = values_and_gradients(lambda *x: dense_attention(*x, layout.dense_mask(), scale or 16**-0.5), exact)
    return max(float((g - w).abs().max() / w.abs().max().clamp(min=1)) for g, w in zip(got, want, strict=True))


@st.composite
def layouts(draw, longest: int = 12) -> TreeLayout:
    """Random forests: each segment is a root or a child of something on the current path."""
    segments: list[tuple[int, int, int]] = []
    path: list[int] = []
    end = 0
    for index in range(draw(st.integers(1, 9))):
        keep = draw(st.integers(0, len(path)))
        path = path[:keep]
        length = draw(st.integers(1, longest))
        segments.append((end, end + length, path[-1] if path else -1))
        path.append(index)
        end += length
    return TreeLayout(segments=tuple(segments))


PROMPT_AND_TWO_RESPONSES = TreeLayout(segments=((0, 3, -1), (3, 5, 0), (5, 7, 0)))
# Each kind of block of the CPU plan: small subtrees as masked tiles, ragged and halved triangles, rectangles.
MIXED = TreeLayout(
    segments=(
        (0, 150, -1),
        (150, 180, 0),
        (180, 185, 1),
        (185, 201, 1),
        (201, 300, 1),
        (300, 310, 0),
        (310, 315, 5),
        (315, 316, 5),
        (316, 340, -1),
        (340, 341, 8),
        (341, 350, -1),
    )
)
# A triangle that goes to the kernel whole.
LONG = TreeLayout(segments=((0, 1030, -1), (1030, 1037, 0), (1037, 1110, 0), (1110, 1111, -1)))


def test_positions_continue_behind_the_parent() -> None:
    assert PROMPT_AND_TWO_RESPONSES.positions().tolist() == [0, 1, 2, 3, 4, 3, 4]


def test_two_responses_see_the_prompt_and_not_each_other() -> None:
    assert PROMPT_AND_TWO_RESPONSES.dense_mask().int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 1, 1],
    ]


def test_pairs_of_a_prompt_of_3_and_two_responses_of_2_are_24() -> None:
    # 6 in the prompt's triangle, 3 in each response's, 4 queries times 3 prompt keys
    assert PROMPT_AND_TWO_RESPONSES.num_pairs == 6 + 2 * 3 + 4 * 3


@given(layouts())
@settings(deadline=None)
def test_the_interval_test_is_the_definition(layout: TreeLayout) -> None:
    mask = visible_by_definition(layout)
    assert torch.equal(layout.dense_mask(), mask)
    assert layout.num_pairs == int(mask.sum())


@given(layouts())
@settings(deadline=None)
def test_output_and_gradients_equal_the_dense_formula_in_float64(layout: TreeLayout) -> None:
    assert largest_difference(layout) < 1e-10


@given(layouts(longest=90))
@settings(deadline=None, max_examples=30)
def test_segments_larger_than_a_tile_equal_the_dense_formula_in_float64(layout: TreeLayout) -> None:
    assert largest_difference(layout) < 1e-10


@pytest.mark.parametrize("layout", [MIXED, LONG, TreeLayout.from_lengths([1, 300, 64, 65])])
def test_every_kind_of_block_equals_the_dense_formula(layout: TreeLayout) -> None:
    assert largest_difference(layout) < 1e-10
    assert largest_difference(layout, dtype=torch.float32) < 1e-5


def test_the_scale_multiplies_the_scores() -> None:
    assert largest_difference(MIXED, scale=0.7) < 1e-10


def test_bfloat16_stays_within_its_own_rounding() -> None:
    # bfloat16 keeps 8 bits: one rounding of the inputs' products and one of the output
    assert largest_difference(MIXED, dtype=torch.bfloat16) < 0.03


def test_scores_in_the_hundreds_do_not_overflow() -> None:
    q, k, v = random_qkv(MIXED.num_tokens, dtype=torch.float32)
    out = attend(q * 100, k * 100, v, MIXED)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(bool(x.isfinite().all()) for x in (out, *grads))


def test_strided_and_expanded_tensors_are_read_right() -> None:
    # The kernel takes the last dimension for contiguous without looking.
    qkv = random_qkv(MIXED.num_tokens)
    strided = [x.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in qkv]
    got = torch.autograd.grad(attend(*strided, MIXED).sum(), strided)
    want = torch.autograd.grad(dense_attention(*qkv, MIXED.dense_mask(), 0.25).sum(), qkv)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=1e-10)


def test_no_array_of_tokens_squared_is_made() -> None:
    # 20,000 tokens: [T, T] would be 400 MB as bool; the plan's tensors are a few numbers per token.
    layout = TreeLayout(segments=((0, 4, -1), *((4 + 20 * i, 24 + 20 * i, 0) for i in range(1000))))
    plan = layout.cpu_plan()
    tensors = [
        x for tile in plan.tiles for x in (tile.mask, tile.gather, tile.slots, tile.tokens, tile.pad) if x is not None
    ]
    assert sum(x.numel() for x in tensors) < 10 * layout.num_tokens


def test_computed_pairs_are_close_to_the_visible_ones() -> None:
    # 1 preamble, 8 prompts, 64 responses of 5 to 16 tokens: tiles and rectangles hold at most a tenth more.
    segments, end = [(0, 490, -1)], 490
    for _ in range(8):
        parent = len(segments)
        segments.append((end, end + 30, 0))
        end += 30
        for length in (5, 7, 9, 11, 12, 13, 15, 16):
            segments.append((end, end + length, parent))
            end += length
    layout = TreeLayout(segments=tuple(segments))
    plan = layout.cpu_plan()
    computed = sum(len(tile.starts) * tile.width**2 for tile in plan.tiles)
    computed += sum((q.stop - q.start) * (k.stop - k.start) for q, k in plan.rectangles)
    assert layout.num_pairs <= computed < 1.1 * layout.num_pairs


def test_all_layers_share_one_plan() -> None:
    layout = TreeLayout.from_lengths([3, 4])
    assert layout.cpu_plan() is layout.cpu_plan()
    assert layout.block_mask("cpu") is layout.block_mask("cpu")


@given(layouts(longest=200))
@settings(deadline=None, max_examples=12)
def test_the_block_mask_is_what_flex_attention_would_build_itself(layout: TreeLayout) -> None:
    mask = layout.block_mask("cpu")
    built = create_block_mask(mask.mask_mod, None, None, layout.num_tokens, layout.num_tokens, device="cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(built, name)), name
    assert torch.equal(mask.to_dense(), built.to_dense())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_with_the_block_mask_equals_the_dense_formula() -> None:
    q, k, v = (x.detach() for x in random_qkv(MIXED.num_tokens))
    out = flex_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=MIXED.block_mask("cpu"), enable_gqa=True
    )
    want = dense_attention(q, k, v, MIXED.dense_mask(), 0.25)
    torch.testing.assert_close(out.transpose(1, 2), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ((), "at least one segment"),
        (((0, 2, -1), (3, 4, -1)), r"segment 1 is \[3, 4\): it must start at 2"),
        (((0, 2, -1), (2, 2, 0)), "at least one token"),
        (((0, 2, -1), (2, 3, 1)), "segment 1 has parent 1"),
        (((0, 2, -1), (2, 3, -1), (3, 4, 0)), "segment 2 has parent 0: segments must stand in preorder"),
    ],
)
def test_segments_that_are_no_forest_in_preorder_are_refused(segments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeLayout(segments=segments)


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v = random_qkv(7)
    with pytest.raises(ValueError, match="the layout has 1 row of 5 tokens"):
        attend(q, k, v, TreeLayout.from_lengths([5]))
    with pytest.raises(ValueError, match="must agree in rows, tokens and head size"):
        attend(q, k[:, :5], v[:, :5], PROMPT_AND_TWO_RESPONSES)
    with pytest.raises(ValueError, match="5 query heads must be a multiple of the 2 key-value heads"):
        attend(q[:, :, :5], k, v, PROMPT_AND_TWO_RESPONSES)


def test_the_examples_in_the_docstrings_are_true() -> None:
    assert doctest.testmod(forge.attention, extraglobs={"torch": torch}).failed == 0
