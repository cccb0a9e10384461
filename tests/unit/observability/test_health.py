"""Warnings about a run that goes wrong."""

from __future__ import annotations

from collections.abc import Mapping

from forge.observability.health import HealthMonitor


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
