"""One prompt → a group: who is asked for what, and what an episode carries. Fakes stand in for the actors."""

import asyncio
from dataclasses import dataclass, field

import pytest

from forge.rollout import FailureBudget, RolloutSettings, Score, TooManyFailures, rollout
from forge.types import Completion


@dataclass
class Problem:
    id: str = "sum/1"
    prompt: str = "2+2="
    prompt_ids: list[int] = field(default_factory=lambda: [10, 11])
    target: str = "4"
    epoch: int = 2


def completion(text: str, *, version: int = 3, reason: str = "stop", length: int = 2) -> Completion:
    return Completion(
        text=text,
        token_ids=list(range(length)),
        logprobs=[-0.5] * length,
        metadata={"policy_version": version, "policy_version_max": version + 1, "finish_reason": reason},
    )


def make_generate(*completions: Completion):
    async def generate(prompt_ids, *, n, **sampling):
        assert (prompt_ids, n) == ([10, 11], len(completions))
        assert sampling == {"temperature": 0.7, "top_p": 1.0, "max_new_tokens": 8}
        return list(completions)

    return generate


async def right_or_wrong(responses):
    return [
        Score(rewards={}, error=f"boom on {r}")
        if r == "!"
        else Score(reward=float(r == t), rewards={"Math": float(r == t)})
        for _, r, t in responses
    ]


def settings(n: int, **kwargs) -> RolloutSettings:
    return RolloutSettings(n_samples=n, seq_len=10, max_new_tokens=9, temperature=0.7, **kwargs)  # room for 8


def test_a_group_carries_tokens_rewards_versions_and_advantages():
    generate = make_generate(completion("4", version=3), completion("5", version=2, reason="length"))
    group = asyncio.run(
        rollout(
            Problem(), group_id=7, settings=settings(2, advantage="dr_grpo"), generate=generate, score=right_or_wrong
        )
    )
    assert (group.id, group.sample_id, group.policy_version, group.has_signal) == (7, "sum/1", 2, True)
    right, wrong = group.episodes
    assert (right.advantage, wrong.advantage) == (0.5, -0.5)
    assert (right.rewards, right.reward) == ({"Math": 1.0}, 1.0)
    assert (wrong.finish_reason, wrong.policy_version_max) == ("length", 3)
    assert (right.prompt_ids, right.response_ids) == ([10, 11], [0, 1])


def test_without_a_reference_the_generator_stands_in_for_it():
    generate = make_generate(completion("4"), completion("5"))
    group = asyncio.run(rollout(Problem(), group_id=0, settings=settings(2), generate=generate, score=right_or_wrong))
    assert group.episodes[0].ref_logprobs == [-0.5, -0.5]


def test_reference_logprobs_go_to_their_own_episode():
    async def reference(prompt_ids, responses):
        assert prompt_ids == [10, 11]
        return [[-1.0 * len(r)] * len(r) for r in responses]

    generate = make_generate(completion("!"), completion("4", length=1), completion("5", length=3))
    group = asyncio.run(
        rollout(
            Problem(), group_id=0, settings=settings(3), generate=generate, score=right_or_wrong, reference=reference
        )
    )
    assert [e.ref_logprobs for e in group.episodes] == [[-1.0], [-3.0] * 3]  # the failed one is left out


def test_a_failed_reward_gets_the_configured_value_or_leaves_the_group():
    generate = make_generate(completion("4"), completion("!"))
    with_value = asyncio.run(
        rollout(Problem(), group_id=0, settings=settings(2, error_reward=-1.0), generate=generate, score=right_or_wrong)
    )
    assert [e.reward for e in with_value.episodes] == [1.0, -1.0]
    dropped = rollout(Problem(), group_id=0, settings=settings(2), generate=generate, score=right_or_wrong)
    without = asyncio.run(dropped)
    assert ([e.reward for e in without.episodes], without.has_signal) == ([1.0], False)


def test_too_many_failures_end_the_run_with_the_first_one():
    budget = FailureBudget(max_fraction=0.25, minimum=4)
    budget.count(["first", None])  # half, but too few to judge
    budget.count([None, None, None, None])
    with pytest.raises(TooManyFailures, match=r"2 of 7 episodes failed.*0\.25(.|\n)*first"):
        budget.count(["second"])


def test_the_overlong_penalty_is_part_of_the_reward():
    generate = make_generate(completion("4", length=8), completion("4", length=2))
    group = asyncio.run(
        rollout(Problem(), group_id=0, settings=settings(2, overlong_buffer=4), generate=generate, score=right_or_wrong)
    )
    assert [e.reward for e in group.episodes] == [0.0, 1.0]
    assert group.episodes[0].rewards == {"Math": 1.0, "overlong": -1.0}
