"""A prompt → n completions → rewards → a Group of Episodes with advantages.

Plain asyncio: `generate`, `score` and `reference` are any awaitable functions, actors in a run and fakes in a test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from forge.advantages import advantages, overlong_penalty
from forge.types import Completion, Episode, Group


class Promptable(Protocol):
    """What a rollout reads of a data set's sample."""

    id: str
    prompt: str
    prompt_ids: list[int]
    target: str
    epoch: int


@dataclass(kw_only=True, slots=True)
class Score:
    """What the rewards said of one response; `error` instead where one of them failed."""

    reward: float = 0.0
    rewards: dict[str, float]
    error: str | None = None


Generate = Callable[..., Awaitable[list[Completion]]]
"""(prompt_ids, *, n, **sampling) → n completions."""
ScoreResponses = Callable[[list[tuple[str, str, str]]], Awaitable[list[Score]]]
"""[(prompt, response, target)] → one score each."""
Reference = Callable[[list[int], list[list[int]]], Awaitable[list[list[float]]]]
"""(prompt_ids, response_ids of each) → log-probabilities of each."""


class TooManyFailures(RuntimeError):
    """More rollouts failed than the configuration allows; the message shows the first failure."""


class FailureBudget:
    """Counts failed episodes against all episodes and ends the run when their share passes `max_fraction`.

    Judged from `minimum` episodes on, so that one failure at the start is not a hundred per cent.
    """

    def __init__(self, *, max_fraction: float, minimum: int = 32) -> None:
        self._max_fraction = max_fraction
        self._minimum = minimum
        self._first = ""
        self.episodes = 0
        self.failed = 0

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on counting from."""
        return {"episodes": self.episodes, "failed": self.failed, "first": self._first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state_dict()`."""
        self.episodes, self.failed, self._first = state["episodes"], state["failed"], state["first"]

    def count(self, errors: Sequence[str | None]) -> None:
        """Takes one entry for each episode: the failure's text, or None.

        Raises:
            TooManyFailures: with the share, the limit and the first failure.
        """
        failures = [e for e in errors if e is not None]
        self.episodes += len(errors)
        self.failed += len(failures)
        if failures and not self._first:
            self._first = failures[0]
        too_many = self.failed > self._max_fraction * self.episodes or self.failed == self.episodes
        if self.episodes >= self._minimum and too_many:
            raise TooManyFailures(
                f"{self.failed} of {self.episodes} episodes failed, more than grpo.max_error_fraction = "
                f"{self._max_fraction:g} allows. The first failure:\n{self._first}"
            )


@dataclass(kw_only=True, slots=True)
class RolloutSettings:
    """How a group is sampled and judged; the values come from the `grpo` section of the config."""

    n_samples: int
    seq_len: int
    """The most tokens of prompt and response together."""
    max_new_tokens: int | None = None
    """The most tokens of a response; None is what `seq_len` leaves after the prompt."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    advantage: str = "grpo"
    error_reward: float | None = None
    """The reward of an episode whose reward function failed; None leaves the episode out."""
    overlong_buffer: int = 0
    """Tokens before the longest response over which DAPO's linear length penalty grows to -1; 0 is off."""

    def longest_response(self, prompt_ids: list[int]) -> int:
        """Tokens that may follow this prompt."""
        room = self.seq_len - len(prompt_ids)
        return room if self.max_new_tokens is None else min(room, self.max_new_tokens)

    async def sample(self, generate: Generate, sample: Promptable) -> list[Completion]:
        """The completions of one prompt."""
        return await generate(
            sample.prompt_ids,
            n=self.n_samples,
            temperature=self.temperature,
            top_p=self.top_p,
            max_new_tokens=self.longest_response(sample.prompt_ids),
        )


async def rollout(
    sample: Promptable,
    *,
    group_id: int,
    settings: RolloutSettings,
    generate: Generate,
    score: ScoreResponses,
    reference: Reference | None = None,
    budget: FailureBudget | None = None,
) -> Group:
    """Samples n answers to one prompt and judges them.

    Rewards and reference log-probabilities are asked for side by side; without a reference the generator's own
    log-probabilities stand in for it. An episode whose reward failed gets
    `settings.error_reward`, or is left out of the group, and is counted in `budget`.

    Returns:
        the group; it may hold fewer than n episodes, and none if every reward failed.
    """
    completions = await settings.sample(generate, sample)
    scoring = score([(sample.prompt, c.text, sample.target) for c in completions])
    if reference is None:
        scores, ref_logprobs = await scoring, None
    else:
        scores, ref_logprobs = await asyncio.gather(
            scoring, reference(sample.prompt_ids, [c.token_ids for c in completions])
        )
    if budget is not None:
        budget.count([s.error for s in scores])
    episodes = []
    for i, (completion, judged) in enumerate(zip(completions, scores, strict=True)):
        if judged.error is not None and settings.error_reward is None:
            continue
        episode = to_episode(sample, completion, judged, settings)
        episode.ref_logprobs = completion.logprobs if ref_logprobs is None else ref_logprobs[i]
        episodes.append(episode)
    for episode, value in zip(episodes, advantages([e.reward for e in episodes], kind=settings.advantage), strict=True):
        episode.advantage = value
    return Group(id=group_id, sample_id=sample.id, episodes=episodes, epoch=sample.epoch)


def to_episode(sample: Promptable, completion: Completion, judged: Score, settings: RolloutSettings) -> Episode:
    """One completion and its score → an episode without advantage."""
    reward = judged.reward if judged.error is None else float(settings.error_reward or 0.0)
    rewards = dict(judged.rewards)
    if settings.overlong_buffer:
        limit = settings.longest_response(sample.prompt_ids)
        penalty = overlong_penalty(len(completion.token_ids), limit=limit, buffer=settings.overlong_buffer)
        rewards["overlong"] = penalty
        reward += penalty
    version = completion.metadata["policy_version"]
    return Episode(
        prompt=sample.prompt,
        response=completion.text,
        target=sample.target,
        prompt_ids=sample.prompt_ids,
        response_ids=completion.token_ids,
        generator_logprobs=completion.logprobs,
        response_mask=[True] * len(completion.token_ids),
        reward=reward,
        rewards=rewards,
        policy_version=version,
        policy_version_max=completion.metadata.get("policy_version_max", version),
        finish_reason=completion.metadata["finish_reason"],
    )
