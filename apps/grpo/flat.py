"""Groups whose episodes all got the same reward: how many there were in a row, and what that says about the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from forge.types import Group


class NothingToLearn(RuntimeError):
    """In batch after batch every group's answers got the same reward."""


class NothingLeftToLearn(Exception):
    """The same, because every answer is as good as the best one so far: the run ends early, and well."""


class FlatGroups:
    """Counts groups without a difference since the last one with.

    Args:
        limit: so many groups in a row end the run.
        batches: the same in batches, for the message (`grpo.max_empty_batches`).
    """

    def __init__(self, *, limit: int, batches: int) -> None:
        self._limit = limit
        self._batches = batches
        self._rewards: list[float] = []
        self._best, self._worst = -math.inf, math.inf

    def see(self, rewards: Sequence[float]) -> None:
        """Takes the rewards of one group into the run's best and worst."""
        self._best = max([self._best, *rewards])
        self._worst = min([self._worst, *rewards])

    def had_signal(self) -> None:
        """A group with a difference came: the count starts anew."""
        self._rewards = []

    def add(self, groups: Sequence[Group]) -> None:
        """Counts groups without a difference.

        Raises, when there were `limit` of them in a row:
            NothingLeftToLearn: they all got the best reward of the run: the task is solved.
            NothingToLearn: they did not.
        """
        self._rewards += [g.episodes[0].reward for g in groups]
        if len(self._rewards) < self._limit:
            return
        if self._worst < self._best <= min(self._rewards):
            raise NothingLeftToLearn(f"the last {len(self._rewards)} groups all got the best reward of the run")
        last = groups[-1].episodes[0]
        raise NothingToLearn(
            f"{len(self._rewards)} groups in a row had the same reward in every episode, as many as "
            f"grpo.max_empty_batches = {self._batches} batches hold: there is nothing to learn from. Choose easier or "
            "harder problems, show worked examples in dataset.examples, raise grpo.n_samples, or use a finer-grained "
            f"reward. The last one answered {last.response!r} where {last.target!r} was right, and got {last.reward:g}."
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on counting from."""
        seen = [self._worst, self._best] if self._best > -math.inf else None
        return {"rewards": list(self._rewards), "seen": seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state_dict()`."""
        self._rewards = list(state["rewards"])
        if state["seen"] is not None:
            self._worst, self._best = state["seen"]
