"""The config of fine-tuning: its files, its rules, and that --help answers at once."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from forge.config import ConfigError, SFTConfig, load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: toy\ndataset: {path: toy}\n")
    return lambda *overrides: load_config(SFTConfig, path, overrides)


@pytest.mark.parametrize("path", sorted((ROOT / "apps" / "sft").glob("*.yaml")), ids=lambda p: p.name)
def test_the_files_that_users_start_from_load_without_a_warning(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert load_config(SFTConfig, path).warnings() == []


@pytest.mark.parametrize(
    ("overrides", "key", "message", "fix"),
    [
        (["eval.prompts=[a]"], "services.generator", "somebody has to answer", "--generator.procs 1"),
        (
            ["eval.prompts=[a]", "generator.procs=1", "eval.max_new_tokens=2048"],
            "eval.max_new_tokens",
            "below training.seq_len = 2048",
            "--eval.max_new_tokens 1024",
        ),
        (["eval.patience=2"], "eval.patience", "needs eval.interval", "--eval.interval 10"),
        (["eval.patience=2", "eval.interval=5", "eval.samples=0"], "eval.patience", "counts evaluations", "null"),
        (["trainer.num_replicas=2"], "services.trainer.num_replicas", "must be 1", "--trainer.num_replicas 1"),
        (["parallelism.tensor_parallel_degree=2"], "services.trainer.procs", "2×1 = 2", "--trainer.procs 2"),
        (["lora.target_modules=[]"], "lora.target_modules", "nothing would be trained", "target_modules null"),
        (["grpo.n_samples=2"], "grpo.n_samples", "is not a key", ""),
        (["loss=dapo"], "loss", "is not a key", ""),
    ],
)
def test_what_does_not_fit_together_is_told(load, overrides, key, message, fix):
    with pytest.raises(ConfigError) as error:
        load(*overrides)
    (problem,) = error.value.problems
    assert problem.key == key
    assert message in str(problem)
    assert fix in problem.fix


def test_a_data_set_has_to_be_named(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: toy\n")
    with pytest.raises(ConfigError, match="dataset is missing and has no default"):
        load_config(SFTConfig, path)


def test_dropout_is_allowed_here(load):
    assert load("lora.dropout=0.1").lora.dropout == 0.1


def test_a_generator_without_prompts_is_not_started(load):
    cfg = load("generator.procs=1")
    assert cfg.generator is None
    assert "eval.prompts is empty" in cfg.warnings()[0]
    assert load("generator.procs=1", "eval.prompts=[a]").generator is not None


def test_help_lists_the_keys_without_torch_in_under_two_seconds():
    code = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv = ['sft', '--help'];"
        "runpy.run_module('apps.sft.main', run_name='__main__')"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
    for key in (
        "--lora",
        "--lora.rank",
        "--dataset.train_on",
        "--eval.prompts",
        "--eval.patience",
        "--training.packing",
    ):
        assert f"  {key}  " in done.stdout
