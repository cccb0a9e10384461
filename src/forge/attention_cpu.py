"""The CPU side of `forge.attention`: a packed row's visible pairs as calls of PyTorch's own flash kernel.

A plan cuts the pairs into tiles on the diagonal (causal triangles of a segment with itself, or a whole small subtree
with its mask) and full rectangles off it. Each block gives an output and the log-sum-exp of its scores; blocks of one
query are joined by those. Going back, each block gets the log-sum-exp over all keys instead of its own, so its
gradients are exact and simply add up.

Shape letters: T tokens, N query heads, K key-value heads, H head size, n tiles of S slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Sizes in tokens, measured with SmolLM2's geometry on one Zen 3 core (benchmarks/attention_cpu.py); half or twice as
# much changes the time by less than a tenth.
# A subtree up to this size is one tile: its masked pairs cost less than the calls that would avoid them.
_TREE_TILE = 64
# The kernel computes key blocks of 512 in full, so a triangle is cut in halves, down to this size; but from
# _WHOLE_TRIANGLE on the waste at the diagonal is small, and one call beats many.
_TRIANGLE_TILE = 128
_WHOLE_TRIANGLE = 1024
# Tiles up to this size are copied together for one call; larger ones are read in place, a call each.
_GATHERED_TILE = 32
# The kernel behind scaled_dot_product_attention on CPUs, called by name because only so does it hand out the
# log-sum-exp. It is internal to torch 2.13: tests/unit/test_attention.py fails where a later version changes it.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(kw_only=True, slots=True)
class _Tiles:
    """n blocks of the diagonal with at most S tokens each, computed in one kernel call."""

    starts: list[int]
    sizes: list[int]
    width: int
    """S: the largest of the sizes; shorter tiles are padded at the end."""
    mask: Tensor | None
    """[n, 1, S, S] float32, 0 or -inf, where a tile is a subtree; None where all tiles are plain triangles."""
    gather: Tensor | None = None
    """[n * S] int64, the token in each slot, padding filled with the row's first; None for n = 1, read in place."""
    slots: Tensor | None = None
    """[real tokens] int64, the slots that are not padding."""
    tokens: Tensor | None = None
    """[real tokens] int64, the row's token in each of `slots`."""
    pad: Tensor | None = None
    """[n, S, 1] bool, True where a slot is padding; None where there is none."""

    def __post_init__(self) -> None:
        if len(self.starts) == 1:
            return
        offsets = torch.arange(self.width)
        tokens = torch.tensor(self.starts)[:, None] + offsets
        real = offsets < torch.tensor(self.sizes)[:, None]
        self.gather = tokens.where(real, 0).flatten()
        self.slots = real.flatten().nonzero()[:, 0]
        self.tokens = self.gather[self.slots]
        self.pad = None if bool(real.all()) else ~real[:, :, None]

    def take(self, x_THD: Tensor) -> Tensor:
        """[T, heads, D] -> [n, heads, S, D], the layout that the kernel wants; padding holds some real token."""
        if self.gather is None:
            return x_THD[self.starts[0] : self.starts[0] + self.width].transpose(0, 1)[None]
        return x_THD.index_select(0, self.gather).unflatten(0, (-1, self.width)).transpose(1, 2)

    def put(self, x_nHSD: Tensor, out_THD: Tensor) -> None:
        """The reverse of `take`: overwrites the tiles' tokens in `out`, leaves padding behind."""
        if self.tokens is None or self.slots is None:
            out_THD[self.starts[0] : self.starts[0] + self.width].copy_(x_nHSD[0].transpose(0, 1))
        else:
            x = x_nHSD.transpose(1, 2).flatten(0, 1).index_select(0, self.slots)
            out_THD.index_copy_(0, self.tokens, x)


@dataclass(kw_only=True, slots=True)
class Plan:
    """A row's visible pairs as kernel calls: each token is in exactly one tile and in any number of rectangles."""

    tiles: list[_Tiles]
    rectangles: list[tuple[slice, slice]]
    """(queries, keys): every query of the first slice sees every key of the second."""


def build_plan(
    segments: Sequence[tuple[int, int, int]], subtree_ends: Sequence[int], token_subtree_ends_T: Tensor
) -> Plan:
    """The plan of a `TreeLayout` with these fields."""
    triangles: list[tuple[int, int]] = []
    trees: list[tuple[int, int]] = []
    rectangles: list[tuple[slice, slice]] = []
    done = 0
    for (start, end, _), subtree_end in zip(segments, subtree_ends, strict=True):
        if start < done:
            continue  # a descendant of a subtree that became one tile
        if end < subtree_end <= start + _TREE_TILE:
            trees.append((start, subtree_end - start))
            done = subtree_end
            continue
        _split_triangle(start, end, triangles, rectangles)
        if subtree_end > end:
            rectangles.append((slice(end, subtree_end), slice(start, end)))
    tiles = [_Tiles(starts=starts, sizes=sizes, width=max(sizes), mask=None) for starts, sizes in _bucket(triangles)]
    for starts, sizes in _bucket(trees):
        mask = _tree_masks(starts, sizes, token_subtree_ends_T)
        tiles.append(_Tiles(starts=starts, sizes=sizes, width=max(sizes), mask=mask))
    return Plan(tiles=tiles, rectangles=rectangles)


def _split_triangle(
    start: int, end: int, triangles: list[tuple[int, int]], rectangles: list[tuple[slice, slice]]
) -> None:
    """Appends segment [start, end)'s own pairs as triangles of a good size and the rectangles between them."""
    size = end - start
    if size <= _TRIANGLE_TILE or size > _WHOLE_TRIANGLE:
        triangles.append((start, size))
        return
    middle = start + -(-size // 64) * 32  # halves in multiples of 32, the kernel's vector and block widths
    _split_triangle(start, middle, triangles, rectangles)
    _split_triangle(middle, end, triangles, rectangles)
    rectangles.append((slice(middle, end), slice(start, middle)))


def _bucket(tiles: list[tuple[int, int]]) -> Iterator[tuple[list[int], list[int]]]:
    """(start, size) tiles -> the starts and sizes of those that share a kernel call, being of similar size."""
    tiles = sorted(tiles, key=lambda tile: tile[1], reverse=True)
    while tiles:
        widest = tiles[0][1]
        if widest > _GATHERED_TILE:
            bucket = tiles[:1]
        else:
            smallest = 1 if widest <= 16 else widest * 3 // 4
            bucket = sorted(tile for tile in tiles if tile[1] >= smallest)
        tiles = tiles[len(bucket) :]
        yield [start for start, _ in bucket], [size for _, size in bucket]


def _tree_masks(starts: list[int], sizes: list[int], subtree_ends_T: Tensor) -> Tensor:
    """[n, 1, S, S] float32, 0 where the query of a tile sees the key, else -inf; padding sees the keys before it."""
    width = max(sizes)
    offsets = torch.arange(width)
    ends = torch.full((len(starts), width), width)
    for row, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        ends[row, :size] = subtree_ends_T[start : start + size] - start
        ends[row, :size].masked_fill_(ends[row, :size] >= size, width)
    visible = (offsets[None, :] <= offsets[:, None]) & (offsets[None, :, None] < ends[:, None, :])
    return torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)[:, None]


class TreeAttention(torch.autograd.Function):
    """[T, N, H] queries, [T, K, H] keys and values, a plan, a scale -> [T, N, H]."""

    @staticmethod
    def forward(ctx: Any, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, plan: Plan, scale: float) -> Tensor:
        given = q_TNH, k_TKH, v_TKH
        q_TNH, k_TKH, v_TKH = (_exact(x) for x in given)
        out_TNH = torch.empty_like(q_TNH)
        lse_TN = torch.empty(q_TNH.shape[:2], dtype=q_TNH.dtype)
        for tile in plan.tiles:
            out, lse = _flash(
                tile.take(q_TNH), tile.take(k_TKH), tile.take(v_TKH), 0.0, tile.mask is None,
                attn_mask=_as_dtype(tile.mask, q_TNH.dtype), scale=scale,
            )  # fmt: skip
            tile.put(out, out_TNH)
            tile.put(lse[..., None], lse_TN[..., None])
        for queries, keys in plan.rectangles:
            out, lse = _flash(*_rectangle(q_TNH, k_TKH, v_TKH, queries, keys), 0.0, False, scale=scale)
            old_lse, new_lse = lse_TN[queries], lse[0].T
            out_TNH[queries].lerp_(out[0].transpose(0, 1), torch.sigmoid(new_lse - old_lse)[..., None])
            torch.logaddexp(old_lse, new_lse, out=old_lse)
        out_TNH = out_TNH.to(given[0].dtype)
        ctx.save_for_backward(*given, out_TNH, lse_TN)
        ctx.plan, ctx.scale = plan, scale
        return out_TNH

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out_TNH: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        dtype = grad_out_TNH.dtype
        *exact, lse_TN = (_exact(x) for x in (grad_out_TNH, *ctx.saved_tensors))
        grad_out_TNH, q_TNH, k_TKH, v_TKH, out_TNH = exact
        # With the log-sum-exp over ALL keys of a query, exp(score - lse) is its final attention weight in every block,
        # and rowsum(grad_out * out) its final correction: so blocks need no joining, their gradients just add up.
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q_TNH, k_TKH, v_TKH))
        for tile in ctx.plan.tiles:
            grad_out, lse = tile.take(grad_out_TNH), tile.take(lse_TN[..., None])
            if tile.pad is not None:  # weight exp(score - inf) = 0: padding gives nothing to the keys
                lse = lse.masked_fill(tile.pad[:, None], torch.inf)
            grads = _flash_backward(
                grad_out, tile.take(q_TNH), tile.take(k_TKH), tile.take(v_TKH), tile.take(out_TNH), lse[..., 0],
                0.0, tile.mask is None, attn_mask=_as_dtype(tile.mask, q_TNH.dtype), scale=ctx.scale,
            )  # fmt: skip
            for grad, part in zip((grad_q, grad_k, grad_v), grads, strict=True):
                tile.put(part, grad)
        for queries, keys in ctx.plan.rectangles:
            block = _rectangle(q_TNH, k_TKH, v_TKH, queries, keys)
            grad_out, out = (x[queries].transpose(0, 1)[None] for x in (grad_out_TNH, out_TNH))
            parts = _flash_backward(grad_out, *block, out, lse_TN[queries].T[None], 0.0, False, scale=ctx.scale)
            for grad, where, part in zip((grad_q, grad_k, grad_v), (queries, keys, keys), parts, strict=True):
                grad[where].add_(part[0].transpose(0, 1))
        return grad_q.to(dtype), grad_k.to(dtype), grad_v.to(dtype), None, None


def _exact(x: Tensor) -> Tensor:
    """At least float32, a head's elements as neighbours in memory, which the kernel takes for granted.

    In bfloat16 the kernel's backward pass takes 3.4 times as long (Zen 4, 1.0 s instead of 0.3 of a step of 700
    tokens), though that CPU multiplies bfloat16 twice as fast, and partial results would be rounded.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x if x.stride(-1) == 1 else x.contiguous()


def _rectangle(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, queries: slice, keys: slice) -> tuple[Tensor, ...]:
    """The slices of one rectangle as [1, heads, tokens, H] views: nothing is copied."""
    pairs = ((q_TNH, queries), (k_TKH, keys), (v_TKH, keys))
    return tuple(x[tokens].transpose(0, 1)[None] for x, tokens in pairs)


def _as_dtype(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if mask is None else mask.to(dtype)
