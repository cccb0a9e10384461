"""On-policy GRPO: no ratio to the generator, so nothing to clip."""

from __future__ import annotations

from torch import Tensor

from forge.losses.base import TokenLoss
from forge.losses.core import Tokens


class SimpleGRPOLoss(TokenLoss):
    """−exp(lp − sg(lp))·A + beta·KL, sequence mean. `generator_logprobs` only tell which tokens to leave out.

    Example: lp = −1, A = 2, ref = −1, beta = 0.1 costs −2 with gradient −2.
    """

    aggregation = "sequence_mean"

    def __init__(self, *, beta: float = 0.1, kl_estimator: str = "k3") -> None:
        super().__init__(beta=beta, kl_estimator=kl_estimator)

    def policy_term(self, tokens: Tokens) -> Tensor:
        return -tokens.on_policy_ratio * tokens.advantages
