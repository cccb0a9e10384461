"""An example of a user's own loss: a plain `nn.Module`, nothing of forge in it. Copy it and change the formula.

    loss: {name: forge.losses.custom_loss.CustomLoss, args: {clip_range: 0.2, beta: 0.1}}

The names of `forward`'s arguments decide what the trainer passes: `logprobs`, `generator_logprobs`, `ref_logprobs`,
`advantages`, `padding_mask`; it may name fewer. The loss sees the whole batch, so it may divide by anything.
"""

from __future__ import annotations

import torch
from torch import nn


class CustomLoss(nn.Module):
    """A clipped surrogate around the reference policy, with a KL penalty, averaged over the trained tokens."""

    def __init__(self, clip_range: float = 0.2, beta: float = 0.1) -> None:
        super().__init__()
        self.clip_range = clip_range
        self.beta = beta

    def forward(
        self,
        logprobs: torch.Tensor,  # [B, R], with gradient
        ref_logprobs: torch.Tensor,  # [B, R]
        advantages: torch.Tensor,  # [B, 1] or [B, R]
        padding_mask: torch.Tensor,  # [B, R], 1 where the token is trained
    ) -> torch.Tensor:
        trained = padding_mask > 0
        # `where` and not a product: at padded positions anything may stand, and NaN · 0 is NaN.
        delta = torch.where(trained, logprobs - ref_logprobs, 0.0).clamp(-20, 20)
        advantages = torch.where(trained, advantages, 0.0)

        ratio = delta.exp()
        clipped = ratio.clamp(1 - self.clip_range, 1 + self.clip_range)
        policy = -torch.minimum(ratio * advantages, clipped * advantages)
        kl = torch.exp(-delta) - 1 + delta  # k3: never negative, 0 where the policies agree

        return torch.where(trained, policy + self.beta * kl, 0.0).sum() / trained.sum().clamp(min=1)
