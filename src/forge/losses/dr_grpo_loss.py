"""Dr.GRPO: GRPO without its length bias (arXiv 2503.20783)."""

from __future__ import annotations

from forge.losses.base import require
from forge.losses.grpo_loss import GRPOLoss


class DrGRPOLoss(GRPOLoss):
    """The GRPO term summed over tokens, divided by the constant B · `max_response_len`.

    A constant in place of each sequence's length: long wrong answers are not punished less per token. Use it with
    `grpo.advantage: dr_grpo`, which does not divide by the standard deviation either.
    """

    aggregation = "constant_length"

    def __init__(
        self,
        *,
        max_response_len: int,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        beta: float = 0.0,
        kl_estimator: str = "k3",
    ) -> None:
        super().__init__(clip_low=clip_low, clip_high=clip_high, beta=beta, kl_estimator=kl_estimator)
        require(
            max_response_len > 0,
            f"DrGRPOLoss: max_response_len must be above 0, got {max_response_len}: it is the number of tokens that "
            "every sequence is divided by; use the generation limit.",
        )
        self.max_response_len = max_response_len
