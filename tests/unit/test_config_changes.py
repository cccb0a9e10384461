"""Resuming with another config: what is told, what is refused, what is kept."""

import pytest

from forge.config import ConfigError, GRPOConfig, load_config, to_yaml
from forge.config.changes import changes, write_config


def yaml_of(*overrides: str) -> str:
    return to_yaml(load_config(GRPOConfig, "apps/grpo/toy.yaml", list(overrides)))


def test_changes_are_told_by_key_with_both_values(tmp_path):
    write_config(tmp_path, yaml_of(), resume_step=None)
    found = write_config(tmp_path, yaml_of("training.steps=90", "grpo.beta=0.1"), resume_step=20)
    assert [str(c) for c in found] == ["training.steps 80 → 90", "grpo.beta null → 0.1"]


def test_the_old_config_is_kept_under_the_step_it_was_good_for(tmp_path):
    before, after = yaml_of(), yaml_of("training.steps=90")
    write_config(tmp_path, before, resume_step=None)
    write_config(tmp_path, after, resume_step=20)
    assert (tmp_path / "config.until-step-20.yaml").read_text() == before
    assert (tmp_path / "config.yaml").read_text() == after


def test_the_same_config_again_changes_nothing(tmp_path):
    write_config(tmp_path, yaml_of(), resume_step=None)
    assert write_config(tmp_path, yaml_of(), resume_step=20) == []
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=/models/other", 'model must stay "toy"'),
        ("dataset.path=reasoning_gym", "dataset.path must stay"),
        ("dataset.size=100", "dataset.size must stay null"),
        ("dataset.shuffle=false", "dataset.shuffle must stay true"),
        ("training.seed=7", "training.seed must stay 42"),
        ("eval.samples=8", "held out"),
        ("training.seq_len=32", "training.seq_len must stay 64"),
    ],
)
def test_what_would_make_it_another_run_is_refused_and_nothing_is_written(tmp_path, override, message):
    write_config(tmp_path, yaml_of(), resume_step=None)
    with pytest.raises(ConfigError, match=message) as refused:
        write_config(tmp_path, yaml_of(override, "training.steps=90"), resume_step=20)
    assert "training.steps" not in str(refused.value)  # that one may change
    assert (tmp_path / "config.yaml").read_text() == yaml_of()


def test_longer_sequences_are_no_reason_to_refuse(tmp_path):
    write_config(tmp_path, yaml_of(), resume_step=None)
    assert len(write_config(tmp_path, yaml_of("training.seq_len=128"), resume_step=20)) == 1


def test_a_key_that_only_a_newer_version_knows_is_no_change():
    assert changes({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}, "d": {}}) == []
