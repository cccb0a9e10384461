"""Exact causal attention over a packed row in which every shared prefix stands once.

A packed row is a forest of segments. A token sees every token of the segments above its own and, in its own segment,
itself and what stands before it: the same tokens that it would see in a document of its own. With the segments in
preorder the descendants of a segment are the tokens right behind it, so "key j is visible to query i" is an interval
test, `j <= i < subtree_end(j)`, and the whole mask falls apart into causal triangles (a segment with itself) and full
rectangles (a segment with all its descendants).

On the CPU those triangles and rectangles are handed, one by one, to the flash kernel that PyTorch itself uses there,
and the partial results are joined by their log-sum-exp: nothing is computed for a masked pair but a little padding, and
no [T, T] array exists. The backward pass gives each block the log-sum-exp of the whole row of scores, which makes the
block's gradients exact (ring attention, arXiv 2310.01889, does the same across devices). On a GPU the interval test is
a FlexAttention mask.

Shape letters: B rows (1), T = L tokens, N query heads, K key-value heads, H head size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forge.attention_cpu import Plan, TreeAttention, build_plan

# FlexAttention's block size on GPUs: the default of torch.nn.attention.flex_attention.
_FLEX_BLOCK = 128


@dataclass(kw_only=True, eq=False)
class TreeLayout:
    """Which token of a packed row sees which: a forest of segments, in preorder.

    Build it once per row and give the same object to every layer: what the kernels need is computed on first use and
    kept here.

    Example: a prompt of 3 tokens with two responses of 2 tokens each.
        >>> layout = TreeLayout(segments=((0, 3, -1), (3, 5, 0), (5, 7, 0)))
        >>> layout.positions().tolist()
        [0, 1, 2, 3, 4, 3, 4]
    """

    segments: tuple[tuple[int, int, int], ...]
    """(start, end, parent) per segment: tokens [start, end) of the row, index of the parent segment or -1."""
    subtree_ends: tuple[int, ...] = field(init=False, repr=False)
    """Per segment: the end of its last descendant, so its descendants are the tokens [end, subtree_end)."""
    _cache: dict[Any, Any] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError where the segments do not tile [0, T) in preorder."""
        if not self.segments:
            raise ValueError("TreeLayout.segments must hold at least one segment, got none: leave empty rows out.")
        path: list[int] = []  # the segments from a root to the one before, which alone may still get children
        expected = 0
        for index, (start, end, parent) in enumerate(self.segments):
            if start != expected or end <= start:
                raise ValueError(
                    f"segment {index} is [{start}, {end}): it must start at {expected}, where the one before ends, "
                    "and hold at least one token."
                )
            while path and path[-1] != parent:
                path.pop()
            if parent != -1 and not path:
                raise ValueError(
                    f"segment {index} has parent {parent}: segments must stand in preorder, each right behind its "
                    "parent or behind a sibling's subtree (-1 for none)."
                )
            path.append(index)
            expected = end
        ends = [end for _, end, _ in self.segments]
        for index in range(len(ends) - 1, -1, -1):
            parent = self.segments[index][2]
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[index])
        self.subtree_ends = tuple(ends)

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> TreeLayout:
        """Plain documents one after the other, each seeing only itself; `lengths` in tokens.

        >>> TreeLayout.from_lengths([2, 3]).segments
        ((0, 2, -1), (2, 5, -1))
        """
        segments, start = [], 0
        for length in lengths:
            segments.append((start, start + length, -1))
            start += length
        return cls(segments=tuple(segments))

    @property
    def num_tokens(self) -> int:
        """T, the unique tokens of the row."""
        return self.segments[-1][1]

    @property
    def num_pairs(self) -> int:
        """How many (query, key) pairs are visible: attention's useful work is 4 * N * H FLOPs per pair, forward."""
        pairs = 0
        for (start, end, _), subtree_end in zip(self.segments, self.subtree_ends, strict=True):
            size = end - start
            pairs += size * (size + 1) // 2 + size * (subtree_end - end)
        return pairs

    def positions(self) -> Tensor:
        """[T] int64: how many tokens stand before each one in its document."""
        depths: list[int] = []
        parts = []
        for start, end, parent in self.segments:
            first = depths[parent] if parent >= 0 else 0
            depths.append(first + end - start)
            parts.append(torch.arange(first, first + end - start))
        return torch.cat(parts)

    def token_subtree_ends(self) -> Tensor:
        """[T] int64: for each token as a key, the first token behind it that does not see it."""
        sizes = torch.tensor([end - start for start, end, _ in self.segments])
        return torch.tensor(self.subtree_ends).repeat_interleave(sizes)

    def dense_mask(self) -> Tensor:
        """[T, T] bool, True where the query (row) sees the key (column). T * T bytes: for tests and small rows."""
        index = torch.arange(self.num_tokens)
        return (index[None, :] <= index[:, None]) & (index[:, None] < self.token_subtree_ends()[None, :])

    def cpu_plan(self) -> Plan:
        """The triangles and rectangles for the CPU kernel; computed once."""
        if "plan" not in self._cache:
            self._cache["plan"] = build_plan(self.segments, self.subtree_ends, self.token_subtree_ends())
        return self._cache["plan"]

    def block_mask(self, device: torch.device | str) -> Any:
        """The FlexAttention BlockMask on `device`; computed once per device, in O((T / 128)^2) memory."""
        key = ("flex", str(device))
        if key not in self._cache:
            self._cache[key] = _build_block_mask(self, torch.device(device))
        return self._cache[key]


def attend(q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, layout: TreeLayout, *, scale: float | None = None) -> Tensor:
    """Softmax attention of one packed row: each token over the tokens that `layout` lets it see.

    Args:
        q_BLNH: [1, T, N, H] float queries.
        k_BLKH, v_BLKH: [1, T, K, H] keys and values of the same dtype; N is a multiple of K (grouped queries).
        layout: the row's segments; pass one object to all layers.
        scale: factor on the scores; 1 / sqrt(H) when None.

    Returns:
        [1, T, N, H] in the dtype of the queries. Differentiable once.

    Raises:
        ValueError: shapes that do not fit together or to the layout.

    Example: two documents of one token each see only themselves, so the values come back.
        >>> q, k, v = torch.randn(3, 1, 2, 1, 8)
        >>> torch.allclose(attend(q, k, v, TreeLayout.from_lengths([1, 1])), v)
        True
    """
    batch, length, heads, size = q_BLNH.shape
    if k_BLKH.shape != v_BLKH.shape or k_BLKH.shape[:2] != (batch, length) or k_BLKH.shape[3] != size:
        raise ValueError(
            f"queries {tuple(q_BLNH.shape)}, keys {tuple(k_BLKH.shape)} and values {tuple(v_BLKH.shape)} must agree in "
            "rows, tokens and head size."
        )
    if batch != 1 or length != layout.num_tokens:
        raise ValueError(
            f"queries are [{batch}, {length}, ...], the layout has 1 row of {layout.num_tokens} tokens: attend one "
            "packed row at a time, with its own layout."
        )
    if heads % k_BLKH.shape[2]:
        raise ValueError(f"{heads} query heads must be a multiple of the {k_BLKH.shape[2]} key-value heads.")
    scale = size**-0.5 if scale is None else scale
    if q_BLNH.device.type == "cpu":
        return TreeAttention.apply(q_BLNH[0], k_BLKH[0], v_BLKH[0], layout.cpu_plan(), scale)[None]
    return _attend_flex(q_BLNH, k_BLKH, v_BLKH, layout, scale)


def _attend_flex(q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, layout: TreeLayout, scale: float) -> Tensor:
    out_BNLH = _compiled_flex()(
        q_BLNH.transpose(1, 2),
        k_BLKH.transpose(1, 2),
        v_BLKH.transpose(1, 2),
        block_mask=layout.block_mask(q_BLNH.device),
        scale=scale,
        enable_gqa=q_BLNH.shape[2] != k_BLKH.shape[2],
    )
    return out_BNLH.transpose(1, 2)


@functools.cache
def _compiled_flex() -> Any:
    """FlexAttention, compiled at the first call: it is fast, and has a fused backward pass, only when compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _build_block_mask(layout: TreeLayout, device: torch.device) -> Any:
    """The layout as a FlexAttention BlockMask, from the bounds of each block alone: the [T, T] mask is never made."""
    from torch.nn.attention.flex_attention import BlockMask

    length = layout.num_tokens
    ends_T = layout.token_subtree_ends()
    blocks = -(-length // _FLEX_BLOCK)
    padded = torch.cat([ends_T, ends_T.new_zeros(blocks * _FLEX_BLOCK - length)]).view(blocks, _FLEX_BLOCK)
    first_query = torch.arange(blocks) * _FLEX_BLOCK
    before = torch.arange(blocks)[None, :] < torch.arange(blocks)[:, None]
    # Before the diagonal every key precedes every query, so a pair is visible where the query precedes the key's end:
    # some pair if the block's latest end lies behind its first query, all if its earliest end does behind the last one.
    some = before & (padded.amax(1)[None, :] > first_query[:, None])
    whole = some & (padded.amin(1)[None, :] >= first_query[:, None] + _FLEX_BLOCK)
    partial = (some & ~whole) | torch.eye(blocks, dtype=torch.bool)

    def indices(mask: Tensor) -> tuple[Tensor, Tensor]:
        counts = mask.sum(1, dtype=torch.int32)[None, None]
        order = mask.int().argsort(dim=1, descending=True, stable=True).to(torch.int32)[None, None]
        return counts.to(device), order.contiguous().to(device)

    ends = ends_T.to(device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    return BlockMask.from_kv_blocks(
        *indices(partial), *indices(whole), BLOCK_SIZE=_FLEX_BLOCK, mask_mod=visible, seq_lengths=(length, length)
    )
