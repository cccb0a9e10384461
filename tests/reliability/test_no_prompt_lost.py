"""Asynchronous training, killed and resumed: no prompt is skipped, and none is used twice.

Proved by the ledger, rollouts.jsonl: the groups of the whole run are numbered without a gap, each stands under one step
with one outcome, and group k has the k-th problem of the data set's order, whatever was in flight at the kills.
"""

from __future__ import annotations

import signal

import pytest

from forge.config import GRPOConfig, load_config
from tests.reliability.runs import ledger, newest, starting

ASYNC = (
    "--training.max_staleness", "2", "--training.steps", "14", "--checkpoint.interval", "4", "--eval.samples", "0",
    "--dataset.size", "60", "--trainer.procs", "2",
)  # fmt: skip
STEPS, PER_STEP = 14, 8


pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def start():
    with starting() as start_one:
        yield start_one


def problems(count: int) -> list[tuple[int, str]]:
    """(epoch, id) of the first `count` problems of the toy data set, in the run's order."""
    from forge.data.datasets import build_datasets
    from forge.testing.tiny_model import make_byte_tokenizer

    config = load_config(GRPOConfig, "apps/grpo/toy.yaml", [a.removeprefix("--") for a in _assignments()])
    stream, _ = build_datasets(
        config.dataset, config.eval, make_byte_tokenizer(), seed=config.training.seed, max_prompt_tokens=60
    )
    found = []
    for _ in range(count):
        sample = next(stream)
        found.append((stream.state_dict()["epoch"], sample.id))
    return found


def _assignments() -> list[str]:
    return [f"{key}={value}" for key, value in zip(ASYNC[::2], ASYNC[1::2], strict=True)]


def test_no_prompt_is_skipped_or_repeated_over_a_kill_of_the_controller_and_one_of_the_trainer(start, tmp_path):
    folder = tmp_path / "run"
    first = start(folder, *ASYNC)
    first.until_step(6)  # past the checkpoint of step 4, with groups finished and in flight
    first.kill()
    assert newest(folder) == 4

    second = start(folder, *ASYNC)
    second.until_step(9)
    second.child("trainer/0.1").send_signal(signal.SIGKILL)  # rank 1 of 2
    second.finish()

    groups = ledger(folder)
    assert sorted(groups) == list(range(STEPS * PER_STEP))  # none lost, none invented
    assert all(len(entries) == 1 for entries in groups.values())  # none under two steps
    entries = [next(iter(groups[i])) for i in sorted(groups)]
    assert all(outcome in ("trained", "zero_variance") for _, outcome, _, _ in entries)
    per_step = [sum(step == s for step, *_ in entries) for s in range(1, STEPS + 1)]
    assert per_step == [PER_STEP] * STEPS
    assert [(epoch, sample) for _, _, epoch, sample in entries] == problems(STEPS * PER_STEP)
