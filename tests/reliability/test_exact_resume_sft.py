"""Fine-tuning that loses its trainer and then its controller takes the steps of the run that lost neither."""

from __future__ import annotations

import random

import pytest

from tests.reliability.runs import lines, starting

SETTINGS = (
    "--training.steps", "24", "--training.batch_size", "4", "--training.gradient_accumulation_steps", "2",
    "--eval.prompts", "[]", "--eval.interval", "6", "--eval.samples", "8", "--checkpoint.interval", "5",
    "--dataset.size", "100", "--training.lr_schedule", "cosine", "--lora.dropout", "0.1",
)  # fmt: skip


@pytest.mark.timeout(600)
def test_killed_at_random_steps_the_losses_are_those_of_the_uninterrupted_run(tmp_path):
    """Bit for bit, with validation, early checkpoints, dropout in LoRA and shuffled data on the way."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    trainer_at, controller_at = random.randrange(6, 10), random.randrange(12, 22)
    with starting() as start:
        start(whole, *SETTINGS, program="sft").finish()
        first = start(broken, *SETTINGS, program="sft")
        first.until_step(trainer_at)
        first.child("trainer/0").kill()
        first.until_step(controller_at)
        first.kill()
        assert "trainer (replica 0): the process of rank 0 died" in first.output
        began = lines(broken / "metrics.jsonl")[:5]
        start(broken, *SETTINGS, program="sft").finish()
    assert lines(broken / "metrics.jsonl")[:5] == began  # with its times: it went on and did not begin anew
    killed = f"trainer killed after step {trainer_at}, controller after {controller_at}"
    for name in ("loss", "grad_norm", "lr", "data/epoch", "eval/loss"):
        assert recorded(broken, name) == recorded(whole, name), f"{name}; {killed}"
    assert [step for step, _ in recorded(broken, "loss")] == list(range(1, 25))


def recorded(folder, name: str) -> list[tuple[int, float]]:
    return [(m["step"], m[name]) for m in lines(folder / "metrics.jsonl") if name in m]
