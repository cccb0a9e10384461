"""Importance correction for the mismatch between the generator that sampled tokens and the trainer that scores them.

Even under the same weights the two engines differ by rounding, and asynchronous weights differ by more. The weight
w = π_trainer / π_generator, capped and detached, multiplies a loss's token terms. It is off by default; its statistics
are part of `forge.losses.diagnostics` always.

It belongs to a loss without a ratio of its own (`SimpleGRPOLoss`). One whose ratio is already taken to the generator
would be weighted twice: `check` refuses that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from forge.losses.base import TokenLoss, require
from forge.losses.core import Tokens, prepare, ratio_of, zero_where_untrained
from forge.losses.simple_grpo_loss import SimpleGRPOLoss


@dataclass(kw_only=True, slots=True)
class ImportanceCorrection:
    """How the weights are made."""

    level: Literal["token", "sequence"] = "token"
    """"token": each token its own ratio; "sequence": the product over the sequence's trained tokens, for all."""
    mode: Literal["truncate", "mask"] = "truncate"
    """"truncate": min(w, cap); "mask": w where w ≤ cap, else 0: the tokens in question are not trained."""
    cap: float = 2.0
    """At least 1: the largest weight."""

    def __post_init__(self) -> None:
        require(self.level in ("token", "sequence"), f"correction.level must be token or sequence, got {self.level!r}.")
        require(self.mode in ("truncate", "mask"), f"correction.mode must be truncate or mask, got {self.mode!r}.")
        require(self.cap >= 1, f"correction.cap must be at least 1, got {self.cap}: w is 1 where nothing differs.")

    def weights(self, *, logprobs: Tensor, generator_logprobs: Tensor, padding_mask: Tensor) -> Tensor:
        """The factor of each token's term, [B, R], without gradient, 0 where untrained.

        Example: log-ratios (ln 3, −ln 3) and cap 2: truncate gives (2, 1/3), mask (0, 1/3).
        """
        tokens = prepare(
            logprobs=logprobs.detach(),
            advantages=torch.zeros_like(logprobs),
            padding_mask=padding_mask,
            generator_logprobs=generator_logprobs,
        )
        ratio = self.ratio(tokens)
        capped = ratio.clamp(max=self.cap) if self.mode == "truncate" else torch.where(ratio > self.cap, 0.0, ratio)
        return zero_where_untrained(capped, tokens.mask)

    def ratio(self, tokens: Tokens) -> Tensor:
        """w before it is capped, [B, R], without gradient."""
        log_ratio = tokens.log_ratio.detach()
        if self.level == "sequence":
            log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)
        return ratio_of(log_ratio)

    def check(self, loss: nn.Module) -> None:
        """Raises ValueError if the weight would count twice, or cannot be applied at all."""
        name = type(loss).__name__
        require(
            isinstance(loss, TokenLoss),
            f"importance correction multiplies the token terms of a built-in loss; {name} has none: weigh the tokens "
            "in its forward.",
        )
        require(
            isinstance(loss, SimpleGRPOLoss),
            f"importance correction with {name} would weigh each token twice, as its ratio is already taken to the "
            "generator: use simple_grpo.",
        )
