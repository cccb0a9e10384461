"""A loss over the whole batch of an optimizer step, back-propagated row by row.

The gradient is that of the whole [B, R] batch in one forward, however it is cut into packed rows and over
data-parallel ranks. Two ways lead there:

* a `TokenLoss` is a sum of per-token terms with weights that depend on masks alone; the weights are computed once from
  counts over all ranks, and each row adds its part;
* any other loss is evaluated once on the log-probabilities of all rows and ranks, scored without a gradient; its
  gradient with respect to them is then carried back row by row, at the price of one more forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from forge.losses import (
    ImportanceCorrection,
    TokenLoss,
    batch_counts,
    loss_arguments,
    reduce_diagnostics,
    trained_mask,
)
from forge.packing import PackedRow, gather, unpack

Tensors = dict[str, Tensor]
RowLoss = Callable[[PackedRow, Tensor], Tensor]
"""(row, its log-probabilities [M]) → the row's part of the loss."""
Rows = Sequence[PackedRow | None]
"""Packed rows. Instead of None a row is computed that nobody wants: the other ranks still have rows, and all must take
part in every forward and backward."""


class Model(Protocol):
    """What computes packed rows, whatever it is spread over (`forge.actors.scoring.Scorer`)."""

    def score(self, rows: Rows) -> list[Tensor]:
        """Log-probabilities [M] of each row's scored pairs, without a gradient, on every rank."""

    def backward(
        self, rows: Rows, loss: Callable[[PackedRow | None, Tensor, Tensor], Tensor], *, want_entropy: bool
    ) -> list[tuple[Tensor, Tensor]]:
        """Adds the gradient of the sum of `loss(row, log-probabilities [M], entropies [M])` over the rows.

        Returns each row's log-probabilities and entropies, without a gradient, on every rank. In the loss the entropies
        have one if `want_entropy`.
        """


class Ranks(Protocol):
    """The data-parallel ranks that share a batch."""

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks."""

    def max(self, value: float) -> float:
        """The largest over all ranks."""

    def gather(self, values: Tensor) -> list[Tensor]:
        """Every rank's [b_i, R_i] tensor, in the order of the ranks."""

    @property
    def index(self) -> int:
        """Which of the ranks this one is."""

    @property
    def count(self) -> int:
        """How many there are."""


class OneRank:
    """`Ranks` of a process that is alone."""

    index = 0
    count = 1

    def sum(self, values: Tensor) -> Tensor:
        return values

    def max(self, value: float) -> float:
        return value

    def gather(self, values: Tensor) -> list[Tensor]:
        return [values]


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What one step's backward found, the same on every rank."""

    loss: float
    """The loss of the whole batch, the entropy bonus included."""
    entropy: float
    """Nats, mean over the trained tokens."""
    trained_tokens: int
    metrics: dict[str, float]
    """Ratio, KL and mismatch statistics; see `forge.losses.diagnostics`."""


class Objective:
    """Loss and entropy bonus of one optimizer step.

    Args:
        loss: a `TokenLoss`, or any module whose `forward` takes some of the tensors of `forge.losses.loss_arguments`.
        entropy_coef: the mean entropy times this is subtracted from the loss.
        correction: weighs the tokens of a loss that has no importance ratio of its own.

    Raises:
        ValueError: the correction does not go with the loss.
    """

    def __init__(
        self, loss: nn.Module, *, entropy_coef: float = 0.0, correction: ImportanceCorrection | None = None
    ) -> None:
        if correction is not None:
            correction.check(loss)
        self._loss = loss
        self._correction = correction
        self._entropy_coef = entropy_coef
        self._arguments = loss_arguments(loss)

    def backward(self, batch: Tensors, rows: Sequence[PackedRow], *, model: Model, ranks: Ranks) -> Outcome:
        """Adds the gradient of the whole batch's loss to the parameters of the model.

        Args:
            batch: this rank's `padding_mask` [B, R], `advantages` [B, 1] or [B, R], and where there are any
                `generator_logprobs` and `ref_logprobs` [B, R].
            rows: the same batch, packed; each sequence is whole in one row.
        """
        mask = trained_mask(batch["padding_mask"], batch.get("generator_logprobs"))
        dropped = (batch["padding_mask"] != 0).sum() - mask.sum()
        batch = {**batch, "padding_mask": mask}
        counts = ranks.sum(batch_counts(mask))
        tokens = max(float(counts[0]), 1.0)
        padded: list[PackedRow | None] = [*rows]
        padded += [None] * (int(ranks.max(len(rows))) - len(rows))
        if isinstance(self._loss, TokenLoss):
            row_loss = self._row_terms(self._loss, batch, counts)
        else:
            row_loss = self._row_gradients(batch, padded, model, ranks)

        def with_bonus(row: PackedRow | None, scored: Tensor, entropy: Tensor) -> Tensor:
            if row is None:
                return 0.0 * (scored.sum() + entropy.sum())
            bonus = (entropy * gather(mask.float(), row)).sum() * (self._entropy_coef / tokens)
            return row_loss(row, scored) - bonus

        logprobs, entropies = torch.zeros(2, *mask.shape, device=mask.device)
        found = model.backward(padded, with_bonus, want_entropy=self._entropy_coef != 0.0)
        for row, (scored, entropy) in zip(padded, found, strict=True):
            if row is not None:
                logprobs = unpack(scored, row, logprobs)
                entropies = unpack(entropy, row, entropies)
        entropy_mean = float(ranks.sum(torch.where(mask, entropies, 0.0).sum().double())) / tokens
        return Outcome(
            loss=self._value(batch, logprobs, ranks) - self._entropy_coef * entropy_mean,
            entropy=entropy_mean,
            trained_tokens=int(counts[0]),
            metrics=reduce_diagnostics(
                self._loss, logprobs=logprobs, dropped=dropped, correction=self._correction, ranks=ranks, **batch
            ),
        )

    def _row_terms(self, loss: TokenLoss, batch: Tensors, counts: Tensor) -> RowLoss:
        """First way: the row's own terms, weighted by counts of the whole batch."""
        weights = loss.weights(batch["padding_mask"], counts)

        def row_loss(row: PackedRow, scored: Tensor) -> Tensor:
            logprobs = unpack(scored, row, torch.zeros_like(weights))
            sequences = torch.unique(row.score_row_N)
            of_row = {k: v[sequences] for k, v in batch.items()}
            return (self._terms(loss, logprobs[sequences], of_row) * weights[sequences]).sum()

        return row_loss

    def _row_gradients(self, batch: Tensors, rows: Rows, model: Model, ranks: Ranks) -> RowLoss:
        """Second way: the gradient of the loss with respect to every log-probability, carried back row by row."""
        logprobs = torch.zeros_like(batch["padding_mask"], dtype=torch.float32)
        if len(rows) == 1 and ranks.count == 1:  # the row is the batch: one forward is enough
            return lambda row, scored: self._loss(logprobs=unpack(scored, row, logprobs), **self._wanted(batch))
        for row, scored in zip(rows, model.score(rows), strict=True):
            if row is not None:
                logprobs = unpack(scored, row, logprobs)
        whole, start = gather_batch({"logprobs": logprobs, **batch}, ranks)
        leaf = whole.pop("logprobs").requires_grad_()
        (gradient,) = torch.autograd.grad(self._loss(logprobs=leaf, **self._wanted(whole)), leaf)
        mine = gradient[start : start + logprobs.shape[0], : logprobs.shape[1]]
        return lambda row, scored: (scored * gather(mine, row)).sum()

    def _terms(self, loss: TokenLoss, logprobs: Tensor, batch: Tensors) -> Tensor:
        terms = loss.token_terms(logprobs=logprobs, **self._wanted(batch))
        if self._correction is None:
            return terms
        return terms * self._correction.weights(
            logprobs=logprobs,
            generator_logprobs=batch["generator_logprobs"],
            padding_mask=batch["padding_mask"],
        )

    def _wanted(self, batch: Tensors) -> Tensors:
        return {k: v for k, v in batch.items() if k in self._arguments}

    @torch.no_grad()
    def _value(self, batch: Tensors, logprobs: Tensor, ranks: Ranks) -> float:
        whole, _ = gather_batch({"logprobs": logprobs, **batch}, ranks)
        logprobs = whole.pop("logprobs")
        if isinstance(self._loss, TokenLoss):
            return float((self._terms(self._loss, logprobs, whole) * self._loss.weights(whole["padding_mask"])).sum())
        return float(self._loss(logprobs=logprobs, **self._wanted(whole)))


def gather_batch(batch: Tensors, ranks: Ranks) -> tuple[Tensors, int]:
    """All ranks' [b_i, R_i] tensors as [B, R] ones, zeros on the right, and where this rank's rows start."""
    width = int(ranks.max(batch["padding_mask"].shape[1]))
    start = 0
    whole = {}
    per_sequence = int(ranks.max(batch["advantages"].shape[1])) == 1
    for name in sorted(batch):
        values = batch[name]
        if name != "advantages" or not per_sequence:
            values = values.expand(batch["padding_mask"].shape)
            values = nn.functional.pad(values, (0, width - values.shape[1]))
        pieces = ranks.gather(values)
        start = sum(len(p) for p in pieces[: ranks.index])
        whole[name] = torch.cat(pieces)
    return whole, start
