"""REINFORCE with importance weights for tokens sampled by an older policy."""

from __future__ import annotations

from torch import Tensor

from forge.losses.base import TokenLoss, require
from forge.losses.core import Tokens


class ReinforceLoss(TokenLoss):
    """−sg(r′)·A·lp + beta·KL, token mean; r′ = clamp(r, 1−clip_ratio, 1+clip_ratio), or r if clip_ratio is None.

    Example: r = 2, A = 1, lp = −1 costs 2 with gradient −2; with clip_ratio = 0.2, 1.2 with gradient −1.2.
    """

    aggregation = "token_mean"

    def __init__(self, *, clip_ratio: float | None = None, beta: float = 0.0, kl_estimator: str = "k3") -> None:
        super().__init__(beta=beta, kl_estimator=kl_estimator)
        require(
            clip_ratio is None or 0 <= clip_ratio <= 1,
            f"ReinforceLoss: clip_ratio must lie between 0 and 1, or be null for no clipping, got {clip_ratio}: "
            "the ratio is clamped to 1 - clip_ratio and 1 + clip_ratio.",
        )
        self.clip_ratio = clip_ratio

    def policy_term(self, tokens: Tokens) -> Tensor:
        ratio = tokens.ratio
        if self.clip_ratio is not None:
            ratio = ratio.clamp(1 - self.clip_ratio, 1 + self.clip_ratio)
        return -ratio.detach() * tokens.advantages * tokens.logprobs

    def clipped(self, tokens: Tokens) -> tuple[Tensor, Tensor] | None:
        if self.clip_ratio is None:
            return None
        return tokens.ratio < 1 - self.clip_ratio, tokens.ratio > 1 + self.clip_ratio
