"""Supervised fine-tuning: the cross-entropy of the tokens that were given."""

from __future__ import annotations

from torch import Tensor

from forge.losses.base import TokenLoss
from forge.losses.core import Tokens


class SFTLoss(TokenLoss):
    """−A·lp, token mean over the whole batch; A is 1, or a weight of the sequence or token.

    Example: trained tokens with lp = −1 and −3 cost 2, with gradient −1/2 each.
    """

    aggregation = "token_mean"

    def __init__(self) -> None:
        super().__init__()

    def policy_term(self, tokens: Tokens) -> Tensor:
        return -tokens.advantages * tokens.logprobs
