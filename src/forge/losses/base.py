"""The base of the built-in losses: per-token terms, times weights that depend on masks alone, summed.

That split is what makes a step exact however the batch is cut up: count once over the global batch, then every
micro-batch and rank adds its own terms under the same weights.

    counts = all_reduce(sum(loss.counts(trained_mask(...)) for each micro-batch))
    for each micro-batch:
        mask = trained_mask(padding_mask, generator_logprobs)
        (loss.token_terms(...) * loss.weights(mask, counts)).sum().backward()
"""

from __future__ import annotations

import math
import warnings
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from forge.losses.core import Tokens, batch_counts, kl_estimate, prepare, trained_mask, zero_where_untrained

Aggregation = Literal["sequence_mean", "token_mean", "constant_length"]


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message) unless `condition`; a message says value, rule and reason in one line."""
    if not condition:
        raise ValueError(message)


class TokenLoss(nn.Module):
    """A loss that is `(token_terms * weights).sum()`. A subclass gives `policy_term` and `aggregation`.

    aggregation: "sequence_mean": the mean over a sequence's trained tokens, then over the sequences that have one;
    "token_mean": the sum over all trained tokens over their number; "constant_length": the sum over all trained
    tokens over (B · `max_response_len`).

    Arguments: `beta` ≥ 0 weighs the KL penalty to the reference, `kl_estimator` is "k3" or "k2".
    """

    aggregation: ClassVar[Aggregation] = "sequence_mean"
    max_response_len: int | None = None

    def __init__(self, *, beta: float = 0.0, kl_estimator: str = "k3") -> None:
        super().__init__()
        name = type(self).__name__
        require(beta >= 0 and math.isfinite(beta), f"{name}: beta must be 0 or more, got {beta}: it weighs a penalty.")
        require(
            kl_estimator != "k1",
            f"{name}: kl_estimator 'k1' has zero expected gradient, so as a loss term it does nothing: "
            "use 'k3' or 'k2'; k1 is logged as kl/ref_k1.",
        )
        require(kl_estimator in ("k2", "k3"), f"{name}: kl_estimator must be 'k3' or 'k2', got {kl_estimator!r}.")
        self.beta = beta
        self.kl_estimator = kl_estimator

    def policy_term(self, tokens: Tokens) -> Tensor:
        """The loss's formula per token, to minimise, as [B, R]; what it says at untrained positions is ignored."""
        raise NotImplementedError

    def ratio(self, tokens: Tokens) -> Tensor:
        """The ratio that this loss clips, [B, R]; for diagnostics."""
        return tokens.ratio

    def clipped(self, tokens: Tokens) -> tuple[Tensor, Tensor] | None:
        """Where the formula clips from below and from above, two bool [B, R]; None for a loss that never clips."""
        return None

    def token_terms(
        self,
        *,
        logprobs: Tensor,
        advantages: Tensor,
        padding_mask: Tensor,
        generator_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
    ) -> Tensor:
        """Policy term + beta · KL per token, [B, R], 0 where untrained.

        Raises ValueError for wrong shapes and for `beta > 0` without `ref_logprobs`.
        """
        tokens = prepare(
            logprobs=logprobs,
            advantages=advantages,
            padding_mask=padding_mask,
            generator_logprobs=generator_logprobs,
            ref_logprobs=ref_logprobs,
        )
        terms = self.policy_term(tokens)
        if self.beta > 0:
            if tokens.ref_logprobs is None:
                raise ValueError(
                    f"{type(self).__name__} has beta={self.beta}, so it needs ref_logprobs [B, R]: pass them, "
                    "or set beta to 0."
                )
            terms = terms + self.beta * kl_estimate(tokens.logprobs, tokens.ref_logprobs, self.kl_estimator)
        return zero_where_untrained(terms, tokens.mask)

    @staticmethod
    def counts(mask: Tensor) -> Tensor:
        """`batch_counts(mask)`: what `weights` needs to know of a piece; add them up over pieces and ranks."""
        return batch_counts(mask)

    def weights(self, mask: Tensor, counts: Tensor | None = None, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight of each token of this piece, [B, R], 0 where untrained; depends on nothing but masks.

        `mask` is `trained_mask(...)` of the piece, `counts` the sum of `self.counts(mask)` over all pieces of the
        global batch (default: the piece is the whole batch). A sequence must lie whole in one piece.

        Example: the mask [[1, 1], [1, 0]] weighs [[1/4, 1/4], [1/2, 0]] as a sequence mean, 1/3 each as a token mean.
        """
        tokens, sequences, rows = (self.counts(mask) if counts is None else counts).to(mask.device).unbind()
        kept = mask.to(dtype)
        if self.aggregation == "token_mean":
            return kept / tokens.clamp(min=1)
        if self.aggregation == "sequence_mean":
            return kept / (mask.sum(dim=1, keepdim=True).clamp(min=1) * sequences.clamp(min=1))
        assert self.max_response_len is not None, "a constant_length loss sets max_response_len"
        return kept / (rows.clamp(min=1) * self.max_response_len)

    def forward(
        self,
        *,
        logprobs: Tensor,
        advantages: Tensor,
        padding_mask: Tensor,
        generator_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
    ) -> Tensor:
        """The loss of the batch, a scalar; 0 with zero gradients if no token is trained.

        logprobs [B, R] with gradient; advantages [B, 1] or [B, R], positive = better than the baseline; padding_mask
        [B, R], 1 where trained; generator_logprobs [B, R], without them the ratio is 1 with a gradient; ref_logprobs
        [B, R], needed when beta > 0. Raises ValueError as `token_terms` does.
        """
        terms = self.token_terms(
            logprobs=logprobs,
            advantages=advantages,
            padding_mask=padding_mask,
            generator_logprobs=generator_logprobs,
            ref_logprobs=ref_logprobs,
        )
        return (terms * self.weights(trained_mask(padding_mask, generator_logprobs), dtype=terms.dtype)).sum()


def check_clip(name: str, *, clip_low: float, clip_high: float) -> None:
    """Refuses clip ranges that cannot be meant: the ratio is clipped to [1 − clip_low, 1 + clip_high]."""
    require(
        0 <= clip_low <= 1,
        f"{name}: clip_low must lie between 0 and 1, got {clip_low}: the ratio is clipped from below at 1 - clip_low.",
    )
    require(
        clip_high >= 0,
        f"{name}: clip_high must be 0 or more, got {clip_high}: the ratio is clipped from above at 1 + clip_high, "
        "and below 1 even an unchanged policy would be clipped.",
    )


def warn(message: str) -> None:
    """One line for a setting that is legal but hardly meant."""
    warnings.warn(message, UserWarning, stacklevel=3)
