"""The recorder and the catalogue of names."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from forge.observability.catalogue import CATALOGUE, UnknownMetric, describe
from forge.observability.metrics import Metrics

# Section 6 of the contract, word for word; `<RewardName>` filled in as a run does.
PROMISED = (
    "step loss reward/mean reward/std reward/MathReward kl/ref entropy ratio/mean ratio/clipped_frac grad_norm lr "
    "completion/mean_len completion/truncated_frac policy/staleness mismatch/logprob_diff throughput/episodes_per_s "
    "throughput/train_tokens_per_s throughput/generate_tokens_per_s time/step time/wait_rollouts time/train "
    "time/push_weights time/pull_weights eval/reward eval/accuracy"
).split()


@pytest.mark.parametrize("name", PROMISED)
def test_every_promised_name_has_a_meaning(name: str) -> None:
    assert describe(name).meaning


def test_a_name_that_nobody_wrote_down_is_refused_by_describe() -> None:
    with pytest.raises(UnknownMetric, match="rewards/mean"):
        describe("rewards/mean")


def test_a_placeholder_stands_for_at_least_one_character() -> None:
    with pytest.raises(UnknownMetric):
        describe("reward/")


def test_an_exact_entry_wins_over_a_placeholder() -> None:
    assert describe("time/step") is CATALOGUE["time/step"]
    assert describe("time/reward") is CATALOGUE["time/<part>"]


def test_a_mean_is_weighted_by_what_the_values_are_means_of() -> None:
    metrics = Metrics()
    metrics.add("entropy", 1.0, weight=1)
    metrics.add("entropy", 3.0, weight=3)
    assert metrics.flush(1)["entropy"] == (1 * 1 + 3 * 3) / 4


def test_counts_add_up_maxima_stay_and_the_last_learning_rate_stands() -> None:
    metrics = Metrics()
    for value in (2.0, 5.0, 1.0):
        metrics.add("groups/zero_variance", value, weight=100)
        metrics.add("ratio/max", value)
        metrics.add("lr", value)
    assert metrics.flush(1) == {"step": 1.0, "groups/zero_variance": 8.0, "ratio/max": 5.0, "lr": 1.0}


def test_kind_overrides_the_catalogue() -> None:
    metrics = Metrics()
    metrics.add("entropy", 1.0, kind="sum")
    metrics.add("entropy", 2.0)
    assert metrics.flush(1)["entropy"] == 3.0


def test_flush_empties_the_recorder() -> None:
    metrics = Metrics()
    metrics.add("loss", 1.0)
    metrics.flush(1)
    assert metrics.flush(2) == {"step": 2.0}


def test_a_nan_is_not_hidden_by_any_kind() -> None:
    metrics = Metrics()
    for name in ("entropy", "groups/failed", "ratio/max"):
        metrics.add(name, math.nan)
        metrics.add(name, 1.0)
    flushed = metrics.flush(1)
    assert all(math.isnan(flushed[name]) for name in ("entropy", "groups/failed", "ratio/max"))


def test_a_tensor_with_one_element_is_a_number() -> None:
    metrics = Metrics()
    metrics.update({"loss": torch.tensor(0.5)})
    assert metrics.flush(1)["loss"] == 0.5


def test_a_name_of_a_users_own_loss_is_averaged() -> None:
    metrics = Metrics()
    metrics.add("mine", 1.0)
    metrics.add("mine", 2.0)
    assert metrics.flush(1)["mine"] == 1.5


def test_a_timer_counts_a_block_that_raises() -> None:
    metrics = Metrics()
    with pytest.raises(RuntimeError), metrics.timer("time/train"):
        raise RuntimeError
    with metrics.timer("time/train"):
        pass
    assert 0.0 < metrics.flush(1)["time/train"] < 1.0


def test_threads_lose_no_value() -> None:
    metrics = Metrics()

    def add_many() -> None:
        for _ in range(2000):
            metrics.add("groups/trained", 1)

    threads = [threading.Thread(target=add_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.flush(1)["groups/trained"] == 8000.0
