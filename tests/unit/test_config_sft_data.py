from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from forge.config import ConfigError, RunConfig, SFTDatasetConfig, SFTEvalConfig, SFTSourceConfig, load_config, to_yaml
from forge.config.help import help_text


@dataclass(kw_only=True, slots=True)
class FineTuning(RunConfig):
    dataset: SFTDatasetConfig
    eval: SFTEvalConfig = field(default_factory=SFTEvalConfig)


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def load(text: str, *overrides: str) -> FineTuning:
        (tmp_path / "config.yaml").write_text("model: toy\n" + text)
        return load_config(FineTuning, tmp_path / "config.yaml", overrides)

    return load


def test_a_mix_and_a_validation_set_are_read_from_file_and_command_line(load: Any, tmp_path: Path) -> None:
    text = "dataset: {path: a.jsonl, weight: 3, mix: [{path: b.parquet, format: text}]}\n"
    config = load(text, "--dataset.mix.0.weight", "0.5", "--eval.dataset.path", "v.jsonl", "dataset.columns.prompt=ask")
    assert config.dataset.columns.prompt == "ask"
    assert config.dataset.mix == [SFTSourceConfig(path="b.parquet", format="text", weight=0.5)]
    assert [source.path for source in config.dataset.sources] == ["a.jsonl", "b.parquet"]
    assert config.eval.dataset == SFTSourceConfig(path="v.jsonl")
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(FineTuning, tmp_path / "again.yaml") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dataset: {path: a, weight: 0}", "dataset.weight must be above 0, got 0"),
        ("dataset: {path: a, mix: [{path: b, weight: -1}]}", r"dataset.mix.0.weight must be above 0, got -1"),
        ("dataset: {path: a, mix: [{name: b}]}", r"dataset.mix.0.path is missing"),
        ("dataset: {path: a, truncate: middle}", "dataset.truncate must be right|left|drop, got .middle."),
        ("dataset: {path: a, train_on: assistants}", "did you mean assistant"),
        ("dataset: {path: a, examples: []}", "dataset.examples is not a key of the config"),
        ("training: {steps: 1}", "dataset is missing and has no default"),
    ],
)
def test_what_is_wrong_is_told_with_its_key(text: str, message: str, load: Any) -> None:
    with pytest.raises(ConfigError, match=message.replace("|", r"\|")):
        load(text + "\n")


def test_help_explains_every_key() -> None:
    text = help_text(FineTuning, prog="sft")
    for key in (
        "format",
        "columns.messages",
        "invalid_rows",
        "weight",
        "train_on",
        "truncate",
        "mix.N.path",
        "streaming",
    ):
        assert f"--dataset.{key}  " in text
    assert "What happens to a sample of more than training.seq_len tokens" in text
