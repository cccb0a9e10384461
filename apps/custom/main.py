"""A reward and a loss of one's own, in one file: copy it and change what you like.

    python -m apps.custom.main [--key.path value ...]

A tiny model, made on the spot, learns to answer in vowels: half a minute on two CPU cores. The config beside this file
names the reward and the loss by their import paths; everything else is the GRPO program as it is.
"""

from __future__ import annotations

import sys

from torch import Tensor, nn

from apps.grpo.main import check, train
from forge.app import launch
from forge.config import GRPOConfig


class Vowels:
    """The share of vowels in the response; a short response counts as if it had `length` characters.

    >>> Vowels(length=4)("", "aab", "")
    0.5
    """

    def __init__(self, length: int = 4) -> None:
        self.length = length

    def __call__(self, prompt: str, response: str, target: str) -> float:
        return sum(c in "aeiouAEIOU" for c in response) / max(len(response), self.length)


class PullToAdvantage(nn.Module):
    """Pulls each token's importance ratio towards 1 + `strength` · advantage, by least squares.

    It is called with the tensors that `forward` names; docs/new_algorithm.md lists those that there are.
    """

    def __init__(self, strength: float = 0.5) -> None:
        super().__init__()
        self.strength = strength

    def forward(
        self,
        logprobs: Tensor,  # [B, R], with gradient
        generator_logprobs: Tensor,  # [B, R]
        advantages: Tensor,  # [B, 1]
        padding_mask: Tensor,  # [B, R], 1 where the token is trained
    ) -> Tensor:
        log_ratio = (logprobs - generator_logprobs).clamp(-5, 5)
        error = log_ratio.exp() - (1 + self.strength * advantages)
        return (error.square() * padding_mask).sum() / padding_mask.sum()


if __name__ == "__main__":
    sys.exit(launch("custom", GRPOConfig, train, check, defaults=["--config", "apps/custom/vowels.yaml"]))
