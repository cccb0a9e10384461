"""CISPO: clip the importance weight, keep every token's gradient (arXiv 2506.13585, 2510.13786)."""

from __future__ import annotations

from torch import Tensor

from forge.losses.base import TokenLoss, require
from forge.losses.core import Tokens


class CISPOLoss(TokenLoss):
    """−sg(clamp(r, ratio_min, ratio_max))·A·lp + beta·KL, token mean.

    The bounds are absolute ratios, not distances from 1. The weight is a constant to the gradient, so a token whose
    ratio is out of bounds still learns.

    Example: r = 8, A = 1, lp = −2 costs 10 with gradient −5.
    """

    aggregation = "token_mean"

    def __init__(
        self, *, ratio_min: float = 0.0, ratio_max: float = 5.0, beta: float = 0.0, kl_estimator: str = "k3"
    ) -> None:
        super().__init__(beta=beta, kl_estimator=kl_estimator)
        require(
            ratio_max >= 1,
            f"CISPOLoss: ratio_max must be at least 1, got {ratio_max}: it is an absolute bound, and below 1 every "
            f"on-policy token is capped, which is REINFORCE times {ratio_max} (the default is 5.0).",
        )
        require(
            0 <= ratio_min <= 1,
            f"CISPOLoss: ratio_min must lie between 0 and 1, got {ratio_min}: it is an absolute bound, and above 1 "
            "even an on-policy token is scaled up.",
        )
        self.ratio_min = ratio_min
        self.ratio_max = ratio_max

    def policy_term(self, tokens: Tokens) -> Tensor:
        weight = tokens.ratio.clamp(self.ratio_min, self.ratio_max).detach()
        return -weight * tokens.advantages * tokens.logprobs

    def clipped(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        return tokens.ratio < self.ratio_min, tokens.ratio > self.ratio_max
