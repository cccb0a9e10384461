"""Held-out problems, answered greedily: the same decoding before, during and after training."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from forge.rollout import Generate, Promptable, RolloutSettings, ScoreResponses, to_episode
from forge.types import Group

RIGHT = 1.0
"""An answer counts as right where the first of the rewards gives at least this much."""


async def evaluate(
    samples: Sequence[Promptable], *, settings: RolloutSettings, generate: Generate, score: ScoreResponses
) -> tuple[dict[str, float], list[Group]]:
    """One greedy answer to each problem, all in flight at once.

    Returns:
        the `eval/*` values of metrics.jsonl, and a group of one episode for each problem, for the rollout log.
        `eval/accuracy` is the share of problems whose first-listed reward is at least 1. An answer that a reward
        fails on is wrong.
    """
    started = time.perf_counter()
    greedy = replace(settings, n_samples=1, temperature=0.0, top_p=1.0, error_reward=0.0, overlong_buffer=0)

    async def answer(number: int, sample: Promptable) -> Group:
        (completion,) = await greedy.sample(generate, sample)
        (judged,) = await score([(sample.prompt, completion.text, sample.target)])
        return Group(id=number, sample_id=sample.id, episodes=[to_episode(sample, completion, judged, greedy)])

    groups = await asyncio.gather(*(answer(i, s) for i, s in enumerate(samples)))
    episodes = [g.episodes[0] for g in groups]
    count = len(episodes)
    first_rewards = [next(iter(e.rewards.values()), 0.0) for e in episodes]
    values = {
        "eval/accuracy": sum(r >= RIGHT for r in first_rewards) / count,
        "eval/reward": sum(e.reward for e in episodes) / count,
        "eval/samples": float(count),
        "eval/mean_len": sum(len(e.response_ids) for e in episodes) / count,
        "eval/truncated_frac": sum(e.finish_reason == "length" for e in episodes) / count,
        "eval/seconds": time.perf_counter() - started,
    }
    for name in {name for e in episodes for name in e.rewards}:
        values[f"eval/reward/{name}"] = sum(e.rewards.get(name, 0.0) for e in episodes) / count
    return values, groups
