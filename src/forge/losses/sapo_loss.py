"""SAPO: a soft gate instead of a clip (arXiv 2511.20347)."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.losses.base import TokenLoss, require
from forge.losses.core import Tokens


class SAPOLoss(TokenLoss):
    """−(4/τ)·σ(τ(r−1))·A + beta·KL, sequence mean; τ = tau_pos where A > 0, else tau_neg.

    The derivative with respect to r is A at r = 1 and falls off smoothly on both sides, the faster the larger τ.

    Example: r = 1, A = 1, τ = 1 costs −2 with gradient −1 for lp.
    """

    aggregation = "sequence_mean"

    def __init__(
        self, *, tau_pos: float = 1.0, tau_neg: float = 1.05, beta: float = 0.0, kl_estimator: str = "k3"
    ) -> None:
        super().__init__(beta=beta, kl_estimator=kl_estimator)
        for name, value in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
            require(value > 0, f"SAPOLoss: {name} must be above 0, got {value}: it is the temperature of the gate.")
        self.tau_pos = tau_pos
        self.tau_neg = tau_neg

    def policy_term(self, tokens: Tokens) -> Tensor:
        advantages = tokens.advantages
        tau = torch.where(advantages > 0, self.tau_pos, self.tau_neg).to(advantages.dtype)
        return -(4 / tau) * torch.sigmoid(tau * (tokens.ratio - 1)) * advantages
