"""The batch and the settings that several tests of the trainer share."""

from __future__ import annotations

import random
from typing import Any

from forge.config import GRPOTrainingConfig
from forge.types import Episode, Group


def settings(**changes: Any) -> GRPOTrainingConfig:
    return GRPOTrainingConfig(
        **{"steps": 10, "learning_rate": 1e-3, "seq_len": 64, "dtype": "float32", "max_norm": None, **changes}
    )


def groups(count: int = 5, *, seed: int = 0) -> list[Group]:
    """Groups of three with prompts and responses of very different lengths."""
    rng = random.Random(seed)

    def episode(prompt: list[int]) -> Episode:
        length = rng.randrange(1, 12)
        return Episode(
            prompt="",
            response="",
            target="",
            prompt_ids=prompt,
            response_ids=[rng.randrange(256) for _ in range(length)],
            generator_logprobs=[-rng.uniform(4, 7) for _ in range(length)],
            response_mask=[True] * length,
            advantage=rng.gauss(0, 1),
            ref_logprobs=[-rng.uniform(4, 7) for _ in range(length)],
        )

    prompts = [[rng.randrange(256) for _ in range(rng.randrange(1, 20))] for _ in range(count)]
    return [Group(id=i, sample_id="", episodes=[episode(p) for _ in range(3)]) for i, p in enumerate(prompts)]
