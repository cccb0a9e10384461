"""A step's rewards, lengths and staleness, worked by hand."""

from forge.observability.group_metrics import group_metrics
from forge.types import Episode, Group


def episode(reward: float, *, version: int, length: int, reason: str = "stop") -> Episode:
    return Episode(
        prompt="",
        response="",
        target="",
        prompt_ids=[1],
        response_ids=[2] * length,
        generator_logprobs=[0.0] * length,
        response_mask=[True] * length,
        reward=reward,
        rewards={"Math": reward * 2},
        policy_version=version,
        finish_reason=reason,
    )


def test_the_numbers_of_two_groups():
    groups = [
        Group(id=0, sample_id="", episodes=[episode(0.0, version=3, length=2), episode(1.0, version=4, length=4)]),
        Group(id=1, sample_id="", episodes=[episode(1.0, version=4, length=6, reason="length")]),
        Group(id=2, sample_id="", episodes=[episode(0.0, version=4, length=4)]),
    ]
    values = group_metrics(groups, step=4)
    assert values["reward/mean"] == 0.5
    assert values["reward/std"] == 0.5
    assert values["reward/Math"] == 1.0
    assert values["completion/mean_len"] == 4.0
    assert values["completion/truncated_frac"] == 0.25
    assert values["policy/staleness"] == 0.25
    assert values["policy/staleness_max"] == 1.0


def test_no_episodes_no_numbers():
    assert group_metrics([], step=0) == {}
