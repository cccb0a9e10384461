"""From a group's rewards to its advantages, and DAPO's overlong penalty, which is part of the reward.

Plain Python: nothing here knows of tensors or batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ADVANTAGES = ("grpo", "dr_grpo", "rloo")

STD_FLOOR = 1e-4
"""Added to the standard deviation, as in the reference implementations of GRPO."""
ROUNDING = 1e-6
"""Rewards closer than this, relative to the largest, are equal: sums of float32 terms differ by about 1e-7."""


def has_variance(rewards: Sequence[float]) -> bool:
    """Whether a group has anything to learn from. 0.1 + 0.2 and 0.3 differ by rounding only, and count as equal."""
    if len(rewards) < 2:
        return False
    return max(rewards) - min(rewards) > ROUNDING * max(abs(reward) for reward in rewards)


def advantages(rewards: Sequence[float], *, kind: str = "grpo") -> list[float]:
    """The advantage of each of a group's n episodes over the group's baseline.

    kind: "grpo": (r − mean) / (std + 1e-4) with the sample standard deviation (arXiv 2402.03300);
    "dr_grpo": r − mean (arXiv 2503.20783); "rloo": r − mean of the others (arXiv 2402.14740).
    A group of one, and a group without variance, gets zeros.

    Raises ValueError for an unknown kind and for a reward that is NaN or infinite.

    Example: rewards 1, 0, 0, 1 have mean 0.5 and std 0.577: grpo gives ±0.866, dr_grpo ±0.5, rloo ±0.667.
    """
    if kind not in ADVANTAGES:
        raise ValueError(f"grpo.advantage must be one of {', '.join(ADVANTAGES)}, got {kind!r}.")
    for reward in rewards:
        if not math.isfinite(reward):
            raise ValueError(f"a reward must be a finite number, got {reward}: its group would have no baseline.")
    n = len(rewards)
    if not has_variance(rewards):
        return [0.0] * n
    mean = math.fsum(rewards) / n
    centred = [reward - mean for reward in rewards]
    if kind == "dr_grpo":
        return centred
    if kind == "rloo":
        return [n / (n - 1) * value for value in centred]  # r − (n·mean − r)/(n−1)
    std = math.sqrt(math.fsum(value * value for value in centred) / (n - 1))
    return [value / (std + STD_FLOOR) for value in centred]


def overlong_penalty(length: int, *, limit: int, buffer: int) -> float:
    """DAPO's soft penalty, to be added to the reward: 0 up to `limit − buffer` tokens, then linearly down to −1.

    length: all trained tokens of the episode; limit: the most tokens it may have; buffer: over how many tokens before
    the limit the penalty grows. Source: arXiv 2503.14476, equation 13.

    Raises ValueError unless 0 < buffer ≤ limit.

    Example: with limit 100 and buffer 20, 80 tokens cost 0, 90 cost −0.5, and 100 or more cost −1.
    """
    if not 0 < buffer <= limit:
        raise ValueError(
            f"grpo.overlong_buffer must lie between 1 and the limit of {limit} tokens, got {buffer}: the penalty "
            "grows over that many tokens before the limit."
        )
    return max(-1.0, min(0.0, (limit - buffer - length) / buffer))
