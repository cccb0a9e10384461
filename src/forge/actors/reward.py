"""RewardActor: computes rewards in processes of its own, so that a slow or broken one holds nothing up."""

from __future__ import annotations

from typing import Any

from forge.data.rewards import RewardError, build_rewards, score
from forge.rollout import Score
from forge.service import ForgeActor


class RewardActor(ForgeActor):
    """Judges responses with plain callables.

    Args:
        rewards: the config's `rewards` entries; see `forge.data.rewards.build_rewards`.
    """

    def __init__(self, *, rewards: list[Any]) -> None:
        self._rewards = build_rewards(rewards)

    def score(self, responses: list[tuple[str, str, str]]) -> list[Score]:
        """Judges [(prompt, response, target)]; one that a reward fails on carries the error instead of numbers."""
        return [self._score_one(*entry) for entry in responses]

    def _score_one(self, prompt: str, response: str, target: str) -> Score:
        try:
            total, each = score(self._rewards, prompt, response, target)
        except RewardError as error:
            return Score(rewards={}, error=str(error))
        return Score(reward=total, rewards=each)
