"""GRPO: the clipped surrogate of PPO with group-relative advantages (arXiv 2402.03300)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from forge.losses.base import Aggregation, TokenLoss, check_clip
from forge.losses.core import Tokens


class GRPOLoss(TokenLoss):
    """−min(r·A, clip(r, 1−clip_low, 1+clip_high)·A) + beta·KL, sequence mean.

    Example: r = 1.5, A = 1 costs −1.2 and has no gradient; r = 1.5, A = −1 costs 1.5 and keeps it.
    """

    aggregation: ClassVar[Aggregation] = "sequence_mean"

    def __init__(
        self, *, clip_low: float = 0.2, clip_high: float = 0.2, beta: float = 0.0, kl_estimator: str = "k3"
    ) -> None:
        super().__init__(beta=beta, kl_estimator=kl_estimator)
        check_clip(type(self).__name__, clip_low=clip_low, clip_high=clip_high)
        self.clip_low = clip_low
        self.clip_high = clip_high

    def policy_term(self, tokens: Tokens) -> Tensor:
        ratio = tokens.ratio
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)

    def clipped(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        low = (tokens.ratio < 1 - self.clip_low) & (tokens.advantages < 0)
        high = (tokens.ratio > 1 + self.clip_high) & (tokens.advantages > 0)
        return low, high
