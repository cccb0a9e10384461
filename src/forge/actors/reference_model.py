"""ReferenceModel: log-probabilities under the frozen model that the policy started from."""

from __future__ import annotations

import torch

from forge.actors.scoring import Scorer
from forge.batching import collate
from forge.config import ParallelismConfig
from forge.models.build import load_model
from forge.packing import pack, unpack
from forge.service import ForgeActor
from forge.types import Episode


class ReferenceModel(ForgeActor):
    """Scores responses with weights that never change.

    Args:
        model: a local Hugging Face folder or a hub id.
        temperature: divides the logits, as it does while sampling and while training.
        dtype: "float32", "bfloat16" or "auto".
        device: "cpu" or "cuda".
        seq_len: the longest prompt and response together, in tokens.
    """

    def __init__(self, *, model: str, temperature: float, dtype: str, device: str, seq_len: int) -> None:
        self._device = torch.device(device)
        self._model = load_model(
            model, parallelism=ParallelismConfig(), dtype=dtype, device=device, seq_len=seq_len, trainable=False
        )
        self._scorer = Scorer(self._model, temperature=temperature, device=self._device)

    @torch.no_grad()
    def score(self, prompt_ids: list[int], responses: list[list[int]]) -> list[list[float]]:
        """Log-probabilities, nats, of each response's tokens after the prompt, which is computed once.

        Example:
            prompt [5, 6] and responses [[7], [8, 9]] → [[-1.2], [-0.3, -2.0]]
        """
        episodes = [_episode(prompt_ids, r) for r in responses]
        inputs, targets = collate(episodes, pad_id=0)
        logprobs = torch.zeros(targets["response"].shape)
        rows = pack(inputs, targets, max_tokens=self._model.tokens_that_fit(), keep_last=False)
        for row, scored in zip(rows, self._scorer.score(rows), strict=True):
            logprobs = unpack(scored.cpu(), row, logprobs)
        return [logprobs[i, : len(r)].tolist() for i, r in enumerate(responses)]


def _episode(prompt_ids: list[int], response_ids: list[int]) -> Episode:
    blank = len(response_ids)
    return Episode(
        prompt="",
        response="",
        target="",
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        generator_logprobs=[0.0] * blank,
        response_mask=[True] * blank,
    )
