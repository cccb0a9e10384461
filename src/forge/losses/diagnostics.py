"""What is logged about a loss's inputs: sums that add up over micro-batches and ranks, and the metrics made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from forge.losses.base import TokenLoss
from forge.losses.core import kl_estimate, prepare
from forge.losses.correction import ImportanceCorrection

SUMS = (
    "tokens",
    "dropped",
    "with_generator",
    "with_reference",
    "ratio",
    "clipped_low",
    "clipped_high",
    "logprob_diff",
    "k1",
    "k3",
    "correction_weight",
    "corrected",
)
"""What `Diagnostics.sums` holds, in this order."""
MAXIMA = ("ratio", "correction_weight")
"""What `Diagnostics.maxima` holds, in this order; −inf where there was nothing."""

_MEANS = {
    # metric: (sum, what it is divided by)
    "ratio/mean": ("ratio", "tokens"),
    "ratio/clipped_low_frac": ("clipped_low", "tokens"),
    "ratio/clipped_high_frac": ("clipped_high", "tokens"),
    "mismatch/logprob_diff": ("logprob_diff", "with_generator"),
    "kl/ref": ("k3", "with_reference"),
    "kl/ref_k1": ("k1", "with_reference"),
    "correction/weight_mean": ("correction_weight", "with_generator"),
    "correction/capped_frac": ("corrected", "with_generator"),
}
_MAXIMA = {"ratio/max": "ratio", "correction/weight_max": "correction_weight"}


class Ranks(Protocol):
    """The data-parallel ranks that share a batch."""

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks."""

    def max(self, value: float) -> float:
        """The largest over all ranks."""


@dataclass(kw_only=True, slots=True)
class Diagnostics:
    """Statistics of a piece of a batch. `a + b` are those of both pieces."""

    sums: Tensor
    """float64 [len(SUMS)]; to be summed over ranks."""
    maxima: Tensor
    """float64 [len(MAXIMA)]; the largest over ranks counts."""

    def __add__(self, other: Diagnostics) -> Diagnostics:
        return Diagnostics(sums=self.sums + other.sums, maxima=torch.maximum(self.maxima, other.maxima))

    def metrics(self) -> dict[str, float]:
        """The metrics by their logged names; those of which nothing is known (no reference, say) are left out."""
        sums = dict(zip(SUMS, self.sums.tolist(), strict=True))
        maxima = dict(zip(MAXIMA, self.maxima.tolist(), strict=True))
        metrics = {name: sums[top] / sums[bottom] for name, (top, bottom) in _MEANS.items() if sums[bottom] > 0}
        if sums["tokens"] > 0:
            metrics["ratio/clipped_frac"] = (sums["clipped_low"] + sums["clipped_high"]) / sums["tokens"]
        metrics |= {name: maxima[key] for name, key in _MAXIMA.items() if maxima[key] > float("-inf")}
        metrics["tokens/dropped"] = sums["dropped"]
        return metrics


@torch.no_grad()
def diagnostics(
    loss: nn.Module,
    *,
    logprobs: Tensor,
    advantages: Tensor,
    padding_mask: Tensor,
    generator_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    dropped: Tensor | float | None = None,
    correction: ImportanceCorrection | None = None,
) -> Diagnostics:
    """Statistics of one piece of a batch, with the tensors that the loss gets.

    A token counts as clipped where the loss's own formula clips it; a loss that never does, and a user's loss, reports
    0. `dropped` is the number of tokens left out for want of a finite generator log-probability, if they are no longer
    in `padding_mask`; `correction` is what the correction statistics describe (default: token level, cap 2).
    """
    tokens = prepare(
        logprobs=logprobs,
        advantages=advantages,
        padding_mask=padding_mask,
        generator_logprobs=generator_logprobs,
        ref_logprobs=ref_logprobs,
    )
    mask = tokens.mask
    count = mask.sum().double()
    if dropped is None:
        dropped = (padding_mask > 0).sum() - mask.sum()
    built_in = loss if isinstance(loss, TokenLoss) else None
    ratio = built_in.ratio(tokens) if built_in else tokens.ratio
    clipped = built_in.clipped(tokens) if built_in else None
    sums: dict[str, Tensor | float] = {"tokens": count, "dropped": dropped, "ratio": _sum(ratio, mask)}
    maxima = {"ratio": _max(ratio, mask)}
    if clipped is not None:
        sums |= {"clipped_low": _sum(clipped[0], mask), "clipped_high": _sum(clipped[1], mask)}
    if generator_logprobs is not None:
        correction = correction or ImportanceCorrection()
        weights = correction.weights(
            logprobs=logprobs, generator_logprobs=generator_logprobs, padding_mask=padding_mask
        )
        sums |= {
            "with_generator": count,
            "logprob_diff": _sum(tokens.log_ratio.abs(), mask),
            "correction_weight": _sum(weights, mask),
            "corrected": _sum(correction.ratio(tokens) > correction.cap, mask),
        }
        maxima["correction_weight"] = _max(weights, mask)
    if tokens.ref_logprobs is not None:
        sums["with_reference"] = count
        for estimator in ("k1", "k3"):
            sums[estimator] = _sum(kl_estimate(tokens.logprobs, tokens.ref_logprobs, estimator), mask)
    return Diagnostics(
        sums=torch.stack([_scalar(sums.get(name, 0.0), mask) for name in SUMS]),
        maxima=torch.stack([_scalar(maxima.get(name, float("-inf")), mask) for name in MAXIMA]),
    )


def reduce_diagnostics(
    loss: nn.Module,
    *,
    ranks: Ranks,
    logprobs: Tensor,
    advantages: Tensor,
    padding_mask: Tensor,
    generator_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    dropped: Tensor | float | None = None,
    correction: ImportanceCorrection | None = None,
) -> dict[str, float]:
    """The metrics of the batch that `ranks` share; each passes its own piece. Arguments as for `diagnostics`."""
    mine = diagnostics(
        loss,
        logprobs=logprobs,
        advantages=advantages,
        padding_mask=padding_mask,
        generator_logprobs=generator_logprobs,
        ref_logprobs=ref_logprobs,
        dropped=dropped,
        correction=correction,
    )
    maxima = torch.tensor([ranks.max(value) for value in mine.maxima.tolist()], dtype=torch.float64)
    return Diagnostics(sums=ranks.sum(mine.sums), maxima=maxima).metrics()


def _sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values.double(), 0.0).sum()


def _max(values: Tensor, mask: Tensor) -> Tensor:
    return values.double().masked_fill(~mask, float("-inf")).amax() if mask.numel() else _scalar(float("-inf"), mask)


def _scalar(value: Tensor | float, like: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device=like.device)
