"""Rotary position embeddings: how fast each pair of head dimensions turns, with the context scalings in use."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forge.models.architectures import RopeParameters


def inverse_frequencies(head_dim: int, rope: RopeParameters) -> tuple[Tensor, float]:
    """Radians per position of each pair of dimensions, [head_dim / 2] float32, and the factor on cos and sin.

    The formulas are those of transformers' modeling_rope_utils, so that a checkpoint means the same in both.

    Example:
        >>> inverse_frequencies(4, RopeParameters(theta=100.0))
        (tensor([1.0000, 0.1000]), 1.0)
    """
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.rope_type == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(inv_freq, rope), 1.0
    if rope.rope_type == "yarn":
        return _yarn(inv_freq, rope, head_dim)
    return inv_freq, 1.0


def _llama3(inv_freq: Tensor, rope: RopeParameters) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between blended (Llama 3.1)."""
    rotations = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)
    kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * inv_freq / rope.factor + kept * inv_freq


def _yarn(inv_freq: Tensor, rope: RopeParameters, head_dim: int) -> tuple[Tensor, float]:
    """NTK by parts with scaled attention (https://arxiv.org/abs/2309.00071)."""

    def dimension_with(rotations: float) -> float:
        length = rope.original_max_position_embeddings
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension_with(rope.beta_fast)), 0)
    high = min(math.ceil(dimension_with(rope.beta_slow)), head_dim - 1)
    width = high - low or 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    inv_freq = stretched * inv_freq / rope.factor + (1 - stretched) * inv_freq
    if rope.attention_factor is not None:
        return inv_freq, rope.attention_factor
    return inv_freq, 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
