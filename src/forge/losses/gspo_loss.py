"""GSPO: one importance ratio for the whole sequence (arXiv 2507.18071)."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.losses.base import TokenLoss, check_clip, require
from forge.losses.core import Tokens, ratio_of, sequence_mean


class GSPOLoss(TokenLoss):
    """s = exp(mean_t(lp − gen)); −min(s·A, clip(s, 1−clip_low, 1+clip_high)·A) + beta·KL, mean over sequences.

    A is one number per sequence; [B, R] advantages are averaged over the trained tokens. Each token carries its
    sequence's term, and the sequence mean gives it back.

    Example: log-ratios (0.1, 0.3), A = 1: s = e^0.2 = 1.221, clipped to 1.0004, so the sequence costs −1.0004.
    """

    aggregation = "sequence_mean"

    def __init__(
        self, *, clip_low: float = 3e-4, clip_high: float = 4e-4, beta: float = 0.0, kl_estimator: str = "k3"
    ) -> None:
        super().__init__(beta=beta, kl_estimator=kl_estimator)
        check_clip("GSPOLoss", clip_low=clip_low, clip_high=clip_high)
        for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
            require(
                value < 0.1,
                f"GSPOLoss: {name} must be below 0.1, got {value}: a sequence's ratio is a geometric mean over its "
                "tokens and stays within about 1e-3 of 1, so this would never clip (leave it out for the paper's "
                "3e-4 and 4e-4).",
            )
        self.clip_low = clip_low
        self.clip_high = clip_high

    def ratio(self, tokens: Tokens) -> Tensor:
        return ratio_of(sequence_mean(tokens.log_ratio, tokens.mask)).expand_as(tokens.logprobs)

    def policy_term(self, tokens: Tokens) -> Tensor:
        ratio = self.ratio(tokens)
        advantages = sequence_mean(tokens.advantages, tokens.mask)
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -torch.minimum(ratio * advantages, clipped * advantages)

    def clipped(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        ratio = self.ratio(tokens)
        advantages = sequence_mean(tokens.advantages, tokens.mask)
        return (ratio < 1 - self.clip_low) & (advantages < 0), (ratio > 1 + self.clip_high) & (advantages > 0)
