import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.advantages import ADVANTAGES, advantages, has_variance, overlong_penalty

rewards_of_a_group = st.lists(st.floats(-1e6, 1e6), max_size=8)


def test_two_right_of_four_by_hand():
    # Mean 0.5; sample variance 4 · 0.25 / 3 = 1/3.
    rewards = [1.0, 0.0, 0.0, 1.0]
    high = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert advantages(rewards, kind="grpo") == pytest.approx([high, -high, -high, high])
    assert advantages(rewards, kind="dr_grpo") == [0.5, -0.5, -0.5, 0.5]
    # The others of a right one have mean 1/3, those of a wrong one 2/3.
    assert advantages(rewards, kind="rloo") == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("rewards", [[], [3.0], [0.5] * 4, [0.0] * 3, [0.1 + 0.2, 0.3], [1e6, 1e6 + 1e-6]])
def test_group_without_variance_gets_zero_advantages(kind, rewards):
    assert advantages(rewards, kind=kind) == [0.0] * len(rewards)
    assert not has_variance(rewards)


def test_small_but_real_differences_are_kept():
    assert has_variance([0.0, 1e-12])
    assert has_variance([1.0, 1.001])
    assert advantages([1.0, 1.002], kind="dr_grpo") == pytest.approx([-0.001, 0.001])


@pytest.mark.parametrize("kind", ADVANTAGES)
@given(rewards=rewards_of_a_group)
def test_advantages_are_finite_sum_to_zero_and_keep_the_order(kind, rewards):
    result = advantages(rewards, kind=kind)
    assert len(result) == len(rewards)
    assert all(math.isfinite(value) for value in result)
    largest = max((abs(value) for value in result), default=0.0)
    assert sum(result) == pytest.approx(0.0, abs=1e-6 * max(1.0, largest))
    for better, worse in itertools.pairwise(rewards):
        if better > worse:
            assert result[rewards.index(better)] >= result[rewards.index(worse)]


@given(rewards=rewards_of_a_group.filter(has_variance))
def test_leave_one_out_equals_its_definition(rewards):
    for i, value in enumerate(advantages(rewards, kind="rloo")):
        others = rewards[:i] + rewards[i + 1 :]
        assert value == pytest.approx(rewards[i] - sum(others) / len(others), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused(reward):
    with pytest.raises(ValueError, match="must be a finite number"):
        advantages([1.0, reward], kind="grpo")


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match=r"grpo.advantage must be one of grpo, dr_grpo, rloo, got 'gae'"):
        advantages([1.0, 0.0], kind="gae")


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (500, -1.0)]
)
def test_overlong_penalty_grows_over_the_buffer_and_ends_at_minus_one(length, penalty):
    assert overlong_penalty(length, limit=100, buffer=20) == pytest.approx(penalty)


def test_overlong_penalty_over_the_whole_length():
    assert overlong_penalty(25, limit=100, buffer=100) == -0.25


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_a_buffer_that_does_not_fit_is_refused(buffer):
    with pytest.raises(
        ValueError, match=f"overlong_buffer must lie between 1 and the limit of 100 tokens, got {buffer}"
    ):
        overlong_penalty(5, limit=100, buffer=buffer)
