"""Packed rows through the model → log-probabilities and entropies; shared by trainer and reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forge.logprobs import LmHead, judge_tokens, score_tokens
from forge.models.loaded import LoadedModel
from forge.models.pipeline import one_forward_one_backward
from forge.objective import Rows
from forge.packing import PackedRow, pack_documents

Scores = tuple[Tensor, Tensor]
"""Log-probabilities and entropies of a row's M scored pairs, both [M] float32, nats."""


@dataclass(kw_only=True, slots=True)
class _InFlight:
    """A row between its forward and its backward pass."""

    received: Tensor | None
    """What the stage before sent; its gradient goes back there."""
    result: Tensor
    """On the last stage the row's loss, on another what was sent to the next."""


class Scorer:
    """Scores packed rows with one model, and takes gradients of the scores (`forge.objective.Model`).

    The rows are the micro-batches of pipeline parallelism: every stage is given the same ones, and only the last knows
    their scores until the end, when it tells the others. A model in one piece is a pipeline of one stage.

    Args:
        model: from `forge.models.build.load_model`.
        temperature: the logits are divided by it, as while sampling.
        device: where the rows are computed.
    """

    def __init__(self, model: LoadedModel, *, temperature: float, device: torch.device) -> None:
        self._model = model
        self._stage = model.stage
        self._temperature = temperature
        self._device = device

    @torch.no_grad()
    def score(self, rows: Rows) -> list[Tensor]:
        """Log-probabilities [M] of each row, without a gradient, on every rank."""
        return [logprobs for logprobs, _ in self._without_gradient(rows, self._head)]

    @torch.no_grad()
    def judge(self, rows: Rows) -> list[tuple[Tensor, Tensor]]:
        """Each row's log-probabilities at temperature 1, and 1 where the target is the likeliest token, else 0; both
        [M] float32, without a gradient, on every rank."""

        def head(row: PackedRow, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
            states, lm_head = self._scored(row, hidden_TD)
            vocabulary = self._model.architecture.vocab_size
            logprobs, right = judge_tokens(states, lm_head, row.score_targets_M, vocabulary=vocabulary)
            return logprobs, right.float()

        return self._without_gradient(rows, head)

    def _without_gradient(self, rows: Rows, head: Callable[[PackedRow, Tensor], Scores]) -> list[Scores]:
        given = [self._on_device(row) for row in rows]
        scores = []
        for row in given:
            _, hidden = self._forward(row)
            if self._stage.is_last:
                scores.append(head(row, hidden))
        self._stage.finish()
        return self._told(given, scores)

    def backward(
        self, rows: Rows, loss: Callable[[PackedRow | None, Tensor, Tensor], Tensor], *, want_entropy: bool
    ) -> list[Scores]:
        """Adds the gradient of the sum of `loss(row, log-probabilities, entropies)`; returns the scores, on every rank.

        Args:
            want_entropy: whether the entropies carry a gradient; their values are there in any case.
        """
        stage = self._stage
        given = [self._on_device(row) for row in rows]
        scores: list[Scores] = []
        in_flight: dict[int, _InFlight] = {}
        for step, index in one_forward_one_backward(stage.index, stage.count, len(given)):
            if step == "forward":
                received, result = self._forward(given[index])
                if stage.is_last:
                    logprobs, entropies = self._head(given[index], result, want_entropy=want_entropy)
                    scores.append((logprobs.detach(), entropies.detach()))
                    result = loss(rows[index], logprobs, entropies)
                in_flight[index] = _InFlight(received=received, result=result)
            else:
                row = in_flight.pop(index)
                row.result.backward(stage.receive_gradient(row.result))
                if row.received is not None:
                    stage.send_gradient(row.received.grad)
        stage.finish()
        return self._told(given, scores)

    def _on_device(self, row: PackedRow | None) -> PackedRow:
        return (idle_row() if row is None else row).to(self._device)

    def _forward(self, row: PackedRow) -> tuple[Tensor | None, Tensor]:
        """This stage's part of the row: what it received, and what it made of it."""
        received = self._stage.receive(self._model.received_shape(row.num_tokens), self._model.dtype, self._device)
        if received is not None and torch.is_grad_enabled():
            received.requires_grad_()
        hidden = self._model.hidden_states(row.tokens_T[None], row.positions_T[None], row.layout, received=received)
        self._stage.send(hidden)
        return received, hidden

    def _head(self, row: PackedRow, hidden_TD: Tensor, *, want_entropy: bool = False) -> Scores:
        return score_tokens(
            *self._scored(row, hidden_TD),
            row.score_targets_M,
            temperature=self._temperature,
            want_entropy=want_entropy,
        )

    def _scored(self, row: PackedRow, hidden_TD: Tensor) -> tuple[Tensor, LmHead]:
        """Hidden states [M, D] of the row's scored pairs, and the projection to apply to them."""
        # Tensor parallelism splits the vocabulary; the whole projection in one piece is the cheaper way without it.
        lm_head = self._model.logits if self._model.parallel_dims.tp_enabled else self._model.output_weight()
        return hidden_TD.index_select(0, row.score_index_M), lm_head

    def _told(self, rows: list[PackedRow], scores: list[Scores]) -> list[Scores]:
        """The last stage's scores, on every stage."""
        if self._stage.count == 1:
            return scores
        sizes = [row.score_index_M.numel() for row in rows]
        told = torch.empty(2, sum(sizes), dtype=torch.float32, device=self._device)
        if self._stage.is_last and scores:
            told = torch.stack([torch.cat(column) for column in zip(*scores, strict=True)])
        logprobs, entropies = self._stage.from_last(told)
        return list(zip(logprobs.split(sizes), entropies.split(sizes), strict=True))


def idle_row() -> PackedRow:
    """A row that costs next to nothing."""
    (row,) = pack_documents([[0, 0]], [[1]], max_tokens=2)
    return row
