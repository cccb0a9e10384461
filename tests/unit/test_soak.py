"""The ledger of the soak notices what it is there to notice."""

import pytest

from benchmarks.soak import GROUPS_PER_STEP, ledger


def run(steps=2):
    """Rollouts and metrics of a run in which nothing went wrong."""
    rollouts = [
        {"kind": "train", "group": g, "step": 1 + g // GROUPS_PER_STEP}
        for g in range(steps * GROUPS_PER_STEP)
        for _ in range(2)
    ]
    return rollouts, [{"step": s + 1, "loss": 0.0} for s in range(steps)]


def test_a_run_without_faults_passes_and_evaluations_do_not_count():
    rollouts, metrics = run()
    assert ledger([*rollouts, {"kind": "eval", "group": 0, "step": 2}], metrics, steps=2) == []


def test_a_group_that_is_trained_twice_is_named():
    rollouts, metrics = run()
    assert ledger([*rollouts, {"kind": "train", "group": 3, "step": 2}], metrics, steps=2) == [
        "group 3 in steps [1, 2]"
    ]


def test_a_group_that_is_lost_is_named_unless_the_run_accounts_for_it():
    rollouts, metrics = run()
    without = [r | {"group": r["group"] + 1} if r["group"] >= 5 else r for r in rollouts]
    assert ledger(without, metrics, steps=2) == ["1 groups are missing, 0 of them accounted for: [5]"]
    metrics[0]["groups/too_old"] = 1
    assert ledger(without, metrics, steps=2) == []


@pytest.mark.parametrize("drop", ["rollouts", "metrics"])
def test_a_step_that_is_missing_is_named(drop):
    rollouts, metrics = run()
    if drop == "rollouts":
        rollouts = [r for r in rollouts if r["step"] == 1]
        assert ledger(rollouts, metrics, steps=2) == ["step 2 has 0 groups, not 8"]
    else:
        assert ledger(rollouts, metrics[:1], steps=2) == ["steps in metrics.jsonl: 1 lines, up to 1, of 2"]
