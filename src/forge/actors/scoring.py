"""A packed row through the model → log-probabilities and entropies; shared by trainer and reference."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.logprobs import score_tokens
from forge.models.build import LoadedModel
from forge.packing import PackedRow, pack_documents


class Scorer:
    """Scores packed rows with one model.

    Args:
        model: from `forge.models.build.load_model`.
        temperature: the logits are divided by it, as while sampling.
        device: where the rows are computed.
    """

    def __init__(self, model: LoadedModel, *, temperature: float, device: torch.device) -> None:
        self._model = model
        self._temperature = temperature
        self._device = device

    def __call__(self, row: PackedRow | None, want_entropy: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, both [M] float32, nats, of the row's M scored pairs.

        Args:
            row: None computes a row of two tokens: what a rank without work does while others forward and backward.
            want_entropy: whether the entropies carry a gradient; their values are there in any case.
        """
        row = (idle_row() if row is None else row).to(self._device)
        hidden = self._model.hidden_states(row.tokens_T[None], row.positions_T[None], row.layout)
        # Tensor parallelism splits the vocabulary; the whole projection in one piece is the cheaper way without it.
        lm_head = self._model.logits if self._model.parallel_dims.tp_enabled else self._model.output_weight()
        return score_tokens(
            hidden.index_select(0, row.score_index_M),
            lm_head,
            row.score_targets_M,
            temperature=self._temperature,
            want_entropy=want_entropy,
        )


def idle_row() -> PackedRow:
    """A row that costs next to nothing."""
    (row,) = pack_documents([[0, 0]], [[1]], max_tokens=2)
    return row
