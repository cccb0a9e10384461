"""DAPO: clip-higher and a token mean (arXiv 2503.14476)."""

from __future__ import annotations

from forge.losses.base import warn
from forge.losses.grpo_loss import GRPOLoss


class DAPOLoss(GRPOLoss):
    """The GRPO term with a wider upper clip, averaged over all trained tokens of the batch; no KL by default.

    The rest of DAPO lies outside the loss: dynamic sampling (`grpo.dynamic_sampling`) and overlong shaping
    (`forge.advantages.overlong_penalty`).
    """

    aggregation = "token_mean"

    def __init__(
        self, *, clip_low: float = 0.2, clip_high: float = 0.28, beta: float = 0.0, kl_estimator: str = "k3"
    ) -> None:
        super().__init__(clip_low=clip_low, clip_high=clip_high, beta=beta, kl_estimator=kl_estimator)
        if clip_high <= clip_low:
            warn(
                f"DAPOLoss: clip_high={clip_high} is not above clip_low={clip_low}: without clip-higher this is GRPO "
                "with a token mean (the paper has 0.2 and 0.28)."
            )
