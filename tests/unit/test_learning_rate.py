"""The learning-rate schedule, worked by hand."""

import pytest

pytest.importorskip("torch")

from forge.actors.trainer import learning_rate_factor
from forge.config import GRPOTrainingConfig


def factors(**settings) -> list[float]:
    config = GRPOTrainingConfig(steps=6, **settings)
    return [learning_rate_factor(step, config) for step in range(6)]


def test_constant_without_warmup():
    assert factors() == [1.0] * 6


def test_warmup_ends_at_the_peak():
    assert factors(warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_towards_zero():
    assert factors(warmup_steps=2, lr_schedule="linear") == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_cosine_falls_along_half_a_wave():
    assert factors(lr_schedule="cosine", warmup_steps=2)[2:] == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)
