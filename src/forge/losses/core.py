"""What every loss shares: masking, the importance ratio, the KL estimators, the counts of a batch.

B sequences, R response positions. All tensors are [B, R] unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this magnitude before `exp`: e^20 is finite in float32, and so are its products."""

KL_ESTIMATORS = ("k1", "k2", "k3")


def trained_mask(padding_mask: Tensor, generator_logprobs: Tensor | None = None) -> Tensor:
    """Which positions are trained, as bool [B, R]; the only place where this is decided.

    A position counts where `padding_mask` is above 0 and, if `generator_logprobs` are given, they are finite there: a
    token whose behaviour probability is unknown has no importance ratio.

    Example: `trained_mask(tensor([[1, 1, 0]]), tensor([[-0.5, -inf, -0.1]]))` is `[[True, False, False]]`.
    """
    mask = padding_mask > 0
    return mask if generator_logprobs is None else mask & generator_logprobs.isfinite()


def zero_where_untrained(tensor: Tensor, mask: Tensor) -> Tensor:
    """`tensor` with zeros outside `mask`. NaN and inf outside never reach the value, nor, through it, the gradient.

    Multiplying by the mask would not do: NaN · 0 is NaN.
    """
    return torch.where(mask, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))


def sequence_mean(tensor: Tensor, mask: Tensor) -> Tensor:
    """Mean over each sequence's trained tokens, as [B, 1]; 0 for a sequence that has none."""
    total = zero_where_untrained(tensor, mask).sum(dim=1, keepdim=True)
    return total / mask.sum(dim=1, keepdim=True).clamp(min=1)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp of the log-ratio clamped to ±`LOG_RATIO_LIMIT`. Beyond the limit the gradient is zero."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k3") -> Tensor:
    """Per-token estimate of KL(policy ‖ reference) from sampled tokens; Δ = logprobs − ref_logprobs.

    k1 = Δ (a metric; its expected gradient is zero, so it is no loss term), k2 = Δ²/2, k3 = exp(−Δ) − 1 + Δ, which is
    never negative and whose gradient, 1 − exp(−Δ), always points to the reference. Below Δ = −`LOG_RATIO_LIMIT` k3
    goes on along its tangent, so that it neither overflows nor loses that gradient.

    Source: J. Schulman, "Approximating KL divergence" (2020).
    Example: Δ = ln 2 gives k1 = 0.693, k2 = 0.240, k3 = 0.193.
    """
    delta = logprobs - ref_logprobs
    if estimator == "k1":
        return delta
    if estimator == "k2":
        return delta.square() / 2
    if estimator != "k3":
        raise ValueError(f"kl_estimator must be one of {', '.join(KL_ESTIMATORS)}, got {estimator!r}.")
    inside = delta.clamp(min=-LOG_RATIO_LIMIT)
    # expm1 keeps the digits that exp(−Δ) − 1 loses near Δ = 0; the middle term is 0 inside the limit.
    return torch.expm1(-inside) + torch.exp(-inside) * (inside - delta) + delta


def batch_counts(mask: Tensor) -> Tensor:
    """int64 [3]: trained tokens, sequences with a trained token, sequences. Adds up over pieces and ranks.

    `mask` is what `trained_mask` returned for this piece of the batch.
    Example: `batch_counts(tensor([[True, True], [True, False], [False, False]]))` is `[3, 2, 3]`.
    """
    trained = mask.any(dim=1).sum()
    rows = torch.full_like(trained, mask.shape[0])
    return torch.stack([mask.sum(), trained, rows])


@dataclass(kw_only=True, slots=True)
class Tokens:
    """The inputs of a loss, checked, in at least float32, and 0 at every untrained position."""

    mask: Tensor
    """bool; True where the token is trained."""
    logprobs: Tensor
    """log π_θ of the sampled tokens, with gradient."""
    log_ratio: Tensor
    """logprobs − generator_logprobs, not clamped; 0 with a gradient where no generator_logprobs were given."""
    advantages: Tensor
    """Spread to [B, R]."""
    ref_logprobs: Tensor | None
    """The frozen reference, or None."""

    @property
    def ratio(self) -> Tensor:
        """r = π_θ / π_generator of each token, 1 where untrained."""
        return ratio_of(self.log_ratio)

    @property
    def on_policy_ratio(self) -> Tensor:
        """exp(lp − sg(lp)): 1, with the gradient of lp."""
        return (self.logprobs - self.logprobs.detach()).exp()


def prepare(
    *,
    logprobs: Tensor,
    advantages: Tensor,
    padding_mask: Tensor,
    generator_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
) -> Tokens:
    """Checks the shapes and makes every untrained position harmless.

    Raises ValueError for a tensor that is not [B, R] (`advantages`: [B, R] or [B, 1]): broadcasting would hide it.
    """
    if logprobs.dim() != 2:
        raise ValueError(f"logprobs must be [B, R], got shape {tuple(logprobs.shape)}.")
    named = {"padding_mask": padding_mask, "generator_logprobs": generator_logprobs, "ref_logprobs": ref_logprobs}
    for name, tensor in named.items():
        if tensor is not None and tensor.shape != logprobs.shape:
            raise ValueError(
                f"{name} must have the shape of logprobs, {tuple(logprobs.shape)}, got {tuple(tensor.shape)}."
            )
    if advantages.shape != logprobs.shape and advantages.shape != (logprobs.shape[0], 1):
        raise ValueError(
            f"advantages must be [B, 1] or [B, R] beside logprobs of shape {tuple(logprobs.shape)}, "
            f"got {tuple(advantages.shape)}."
        )
    mask = trained_mask(padding_mask, generator_logprobs)
    dtype = torch.promote_types(logprobs.dtype, torch.float32)

    def clean(tensor: Tensor) -> Tensor:
        return zero_where_untrained(tensor.to(dtype), mask)

    safe_logprobs = clean(logprobs)
    behaviour = safe_logprobs if generator_logprobs is None else clean(generator_logprobs)
    return Tokens(
        mask=mask,
        logprobs=safe_logprobs,
        log_ratio=safe_logprobs - behaviour.detach(),
        advantages=clean(advantages).detach(),
        ref_logprobs=None if ref_logprobs is None else clean(ref_logprobs).detach(),
    )
