"""Warnings about a run that goes wrong."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from forge.config import GuardConfig, GuardsConfig
from forge.observability.health import GuardStop, HealthMonitor


def warnings_after(*steps: Mapping[str, float]) -> list[list[str]]:
    monitor = HealthMonitor()
    return [monitor.check(step) for step in steps]


def test_a_healthy_run_warns_of_nothing() -> None:
    healthy = {"entropy": 0.5, "kl/ref": 0.01, "mismatch/logprob_diff": 0.03, "reward/mean": 0.4}
    assert warnings_after(*[healthy] * 5) == [[]] * 5


def test_runaway_kl_is_warned_about_once_on_the_third_step_with_the_knobs() -> None:
    quiet1, quiet2, loud, quiet3 = warnings_after(*[{"kl/ref": 0.9}] * 4)
    assert quiet1 == quiet2 == quiet3 == []
    assert len(loud) == 1
    assert "0.9" in loud[0]
    assert "grpo.beta" in loud[0]


def test_one_bad_step_is_no_trend() -> None:
    bad, good = {"kl/ref": 9.0}, {"kl/ref": 0.0}
    assert warnings_after(bad, bad, good, bad, bad) == [[]] * 5


def test_it_warns_again_when_it_happens_again() -> None:
    bad, good = {"kl/ref": 9.0}, {"kl/ref": 0.0}
    counts = [len(found) for found in warnings_after(bad, bad, bad, good, bad, bad, bad)]
    assert counts == [0, 0, 1, 0, 0, 0, 1]


def test_entropy_that_falls_to_a_tenth_while_the_reward_is_low_has_collapsed() -> None:
    fallen = {"entropy": 0.09, "reward/mean": 0.2}
    *_, last = warnings_after({"entropy": 1.0}, fallen, fallen, fallen)
    assert len(last) == 1
    assert "0.09" in last[0]
    assert "training.entropy_coef" in last[0]


def test_a_policy_that_is_sure_because_it_is_right_is_left_alone() -> None:
    sure = {"entropy": 0.001, "reward/mean": 0.95}
    assert warnings_after({"entropy": 1.0}, sure, sure, sure) == [[]] * 4


def test_engines_that_disagree_are_warned_about() -> None:
    *_, last = warnings_after(*[{"mismatch/logprob_diff": 0.4}] * 3)
    assert "services.generator.dtype" in last[0]


def test_groups_without_variance_are_warned_about_when_they_are_nearly_all() -> None:
    mostly_flat = {"groups/trained": 0.0, "groups/zero_variance": 8.0}
    half_flat = {"groups/trained": 4.0, "groups/zero_variance": 4.0}
    assert "8 of 8 groups" in warnings_after(*[mostly_flat] * 3)[-1][0]
    assert warnings_after(*[half_flat] * 3)[-1] == []


def test_fine_tuning_may_become_as_sure_as_it_likes() -> None:
    assert warnings_after({"entropy": 1.0}, *[{"entropy": 0.001}] * 5) == [[]] * 6


def test_completions_that_are_all_cut_off_are_warned_about() -> None:
    *_, last = warnings_after(*[{"completion/truncated_frac": 1.0}] * 3)
    assert "guards.truncated: 100% of the completions" in last[0]
    assert "grpo.max_new_tokens" in last[0]
    assert warnings_after(*[{"completion/truncated_frac": 0.9}] * 3)[-1] == []


BAD = {
    "entropy": {"entropy": 0.001, "reward/mean": 0.2},
    "kl": {"kl/ref": 9.0},
    "mismatch": {"mismatch/logprob_diff": 9.0},
    "constant_reward": {"groups/zero_variance": 8.0},
    "truncated": {"completion/truncated_frac": 1.0},
}


@pytest.mark.parametrize("name", BAD)
def test_each_guard_warns_stops_or_is_ignored_as_configured(name: str) -> None:
    def outcome(action: str) -> list[str]:
        guards = GuardsConfig(patience=2)
        setattr(guards, name, GuardConfig(action=action))
        monitor = HealthMonitor(guards)
        return monitor.check(BAD[name]) + monitor.check(BAD[name])

    (warning,) = outcome("warn")
    assert warning.startswith(f"guards.{name}: ")
    assert outcome("ignore") == []
    with pytest.raises(GuardStop, match=f"guards.{name} is set to stop: "):
        outcome("stop")


def test_a_bound_of_ones_own_is_the_one_that_counts() -> None:
    monitor = HealthMonitor(GuardsConfig(patience=1, kl=GuardConfig(bound=2.0)))
    assert monitor.check({"kl/ref": 1.9}) == []
    assert "above 2 nats" in monitor.check({"kl/ref": 2.1})[0]


def test_a_resumed_run_judges_as_the_one_before_would_have() -> None:
    first = HealthMonitor()
    first.check({"entropy": 1.0})
    for _ in range(2):
        first.check({"entropy": 0.05, "reward/mean": 0.2})
    resumed = HealthMonitor()
    resumed.load_state_dict(first.state_dict())
    assert len(resumed.check({"entropy": 0.05, "reward/mean": 0.2})) == 1
