"""Held-out evaluation: greedy, once each, right by the first reward."""

import asyncio
from types import SimpleNamespace

from forge.evaluation import evaluate
from forge.rollout import RolloutSettings, Score
from forge.types import Completion


def test_every_problem_is_answered_once_greedily_and_judged_by_its_first_reward():
    asked = []

    async def generate(prompt_ids, **sampling):
        asked.append((prompt_ids, sampling))
        length = prompt_ids[0]
        meta = {"policy_version": 0, "finish_reason": "length" if length == 3 else "stop"}
        return [Completion(text=str(length), token_ids=[0] * length, logprobs=[0.0] * length, metadata=meta)]

    async def score(responses):
        ((_, response, target),) = responses
        if response == "3":
            return [Score(rewards={}, error="boom")]
        right = float(response == target)
        return [Score(reward=right + 0.5, rewards={"Math": right, "Style": 0.5})]

    samples = [
        SimpleNamespace(id=str(i), prompt="", prompt_ids=[i], target=t) for i, t in ((1, "1"), (2, "9"), (3, "3"))
    ]
    settings = RolloutSettings(
        n_samples=8, seq_len=20, max_new_tokens=6, temperature=0.7, top_p=0.9, overlong_buffer=4, error_reward=-1.0
    )
    values, groups = asyncio.run(evaluate(samples, settings=settings, generate=generate, score=score))
    assert [s for _, s in asked] == [{"n": 1, "temperature": 0.0, "top_p": 1.0, "max_new_tokens": 6}] * 3
    assert values["eval/accuracy"] == 1 / 3  # an answer that a reward fails on is wrong
    assert values["eval/reward"] == (1.5 + 0.5 + 0.0) / 3
    assert values["eval/mean_len"] == 2.0
    assert values["eval/truncated_frac"] == 1 / 3
    assert [g.sample_id for g in groups] == ["1", "2", "3"]
