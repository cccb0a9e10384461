"""What a step's groups say, under the names of metrics.jsonl."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from forge.types import Group


def group_metrics(groups: Sequence[Group], *, step: int) -> dict[str, float]:
    """Rewards, lengths, truncation and staleness of the groups that optimizer step `step` (from 0) takes.

    Example:
        two episodes with rewards 0 and 1, sampled by version 3 and taken in step 4
        → reward/mean 0.5, reward/std 0.5, policy/staleness 1
    """
    episodes = [e for g in groups for e in g.episodes]
    if not episodes:
        return {}
    rewards = [e.reward for e in episodes]
    staleness = [step - e.policy_version for e in episodes]
    values = {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "completion/mean_len": statistics.fmean(len(e.response_ids) for e in episodes),
        "completion/truncated_frac": statistics.fmean(e.finish_reason == "length" for e in episodes),
        "policy/staleness": statistics.fmean(staleness),
        "policy/staleness_max": float(max(staleness)),
    }
    for name in {name for e in episodes for name in e.rewards}:
        values[f"reward/{name}"] = statistics.fmean(e.rewards[name] for e in episodes if name in e.rewards)
    return values
