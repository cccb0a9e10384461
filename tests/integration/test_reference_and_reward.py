"""The two judges of a response: log-probabilities under the frozen model, and rewards."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from forge.actors.reference_model import ReferenceModel
from forge.actors.reward import RewardActor
from forge.testing.tiny_model import make_tiny_model


def broken(prompt: str, response: str, target: str) -> float:
    if response == "raise":
        raise KeyError("no such answer")
    return float("nan") if response == "nan" else 0.5


def test_reference_logprobs_are_those_of_transformers_at_the_temperature(tmp_path):
    folder = make_tiny_model(tmp_path / "tiny", family="qwen2")
    prompt, responses = [5, 6, 7], [[8], [9, 10, 11], [9, 10], [200, 8, 8, 8]]
    reference = ReferenceModel(model=str(folder), temperature=0.7, dtype="float32", device="cpu", seq_len=32)
    scored = reference.score(prompt, responses)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for response, ours in zip(responses, scored, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1)[range(len(response)), response]
        assert ours == pytest.approx(expected.tolist(), abs=1e-5)


def test_rewards_on_two_replicas_and_a_reward_that_fails():
    entries = [
        {"reward": "forge.data.rewards.MathReward", "weight": 2.0},
        "tests.integration.test_reference_and_reward.broken",
    ]

    async def judge():
        service = await RewardActor.options(num_replicas=2).as_service(rewards=entries)
        async with service:
            return await service.score.route(
                [("2+2", "<answer>4</answer>", "4"), ("", "raise", "4"), ("", "nan", "4"), ("", "5", "4")]
            )

    right, raised, nan, wrong = asyncio.run(judge())
    assert (right.reward, right.rewards, right.error) == (2.5, {"MathReward": 1.0, "broken": 0.5}, None)
    assert "broken" in raised.error
    assert "no such answer" in raised.error
    assert "nan" in nan.error
    assert (wrong.reward, wrong.error) == (0.5, None)
