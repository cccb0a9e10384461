"""Rotation speeds, worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from forge.models.architectures import RopeParameters
from forge.models.rope import inverse_frequencies


def speeds(head_dim: int, **parameters: object) -> list[float]:
    return inverse_frequencies(head_dim, RopeParameters(**parameters))[0].tolist()  # type: ignore[arg-type]


def test_speeds_fall_from_one_radian_by_powers_of_theta() -> None:
    assert speeds(8, theta=10_000.0) == pytest.approx([1.0, 0.1, 0.01, 0.001])


def test_linear_scaling_slows_every_pair_by_the_factor() -> None:
    assert speeds(4, theta=100.0, rope_type="linear", factor=4.0) == pytest.approx([0.25, 0.025])


def test_llama3_keeps_fast_pairs_slows_slow_ones_and_blends_between() -> None:
    # Over 200 pi tokens the pairs make 100, 2.5 and 0.0625 rotations; the borders are 4 and 1 rotations.
    # 2.5 is half way between: half of 1/40 and half of 1/40/8.
    original = round(200 * math.pi)
    got = speeds(6, theta=40.0**3, rope_type="llama3", factor=8.0, original_max_position_embeddings=original)
    assert got == pytest.approx([1.0, 0.5 / 40 + 0.5 / 320, 1 / 1600 / 8], rel=1e-3)


def test_yarn_ramps_over_the_pairs_between_its_two_borders() -> None:
    # theta 10, 20 dimensions, 2 pi 10**2 tokens: r rotations are made at dimension 10 log10(100 / r).
    # 100 rotations at 0 and 1 rotation at 20, which is cut to 19: pair i is stretched by i / 19.
    original = round(200 * math.pi)
    got = speeds(
        20, theta=10.0, rope_type="yarn", factor=4.0, beta_fast=99.0, original_max_position_embeddings=original
    )
    plain = [10 ** (-i / 10) for i in range(10)]
    assert got == pytest.approx([s * ((1 - i / 19) + i / 19 / 4) for i, s in enumerate(plain)])


def test_yarn_scales_cos_and_sin_by_a_tenth_of_the_logarithm_of_the_factor() -> None:
    yarn = RopeParameters(theta=10_000.0, rope_type="yarn", factor=math.e)
    assert inverse_frequencies(8, yarn)[1] == pytest.approx(1.1)
    given = RopeParameters(theta=10_000.0, rope_type="yarn", factor=4.0, attention_factor=0.9)
    assert inverse_frequencies(8, given)[1] == 0.9


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "yarn"])
def test_speeds_are_float32_one_for_each_pair(rope_type: str) -> None:
    inv_freq, _ = inverse_frequencies(12, RopeParameters(theta=10_000.0, rope_type=rope_type, factor=2.0))  # type: ignore[arg-type]
    assert inv_freq.shape == (6,)
    assert inv_freq.dtype == torch.float32
