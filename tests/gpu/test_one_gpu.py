"""The main job on one GPU: trainer and generator take turns on it, in bfloat16, and the weights travel between them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forge.models.architectures import check_architecture
from forge.models.published import published_config
from forge.testing.tiny_model import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROOT = Path(__file__).parents[2]
SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


def run(folder: Path, model: str, *overrides: str) -> list[dict]:
    """The steps of a run of the toy task."""
    command = [
        sys.executable, "-m", "apps.grpo.main", "--config", "apps/grpo/toy.yaml", "--model", model,
        "--output_dir", str(folder), "--trainer.with_gpus", "true", "--generator.with_gpus", "true",
        "--training.dtype", "bfloat16", "--training.max_staleness", "0", "--eval.samples", "0", *overrides,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [step for step in map(json.loads, lines) if "loss" in step]


def report(name: str, steps: list[dict], capsys: pytest.CaptureFixture[str]) -> None:
    last = steps[-1]
    with capsys.disabled():
        print(
            f"\n{name} on {torch.cuda.get_device_name()}: train {last['throughput/train_tokens_per_s']:,.0f} tokens/s, "
            f"generate {last['throughput/generate_tokens_per_s']:,.0f} tokens/s, {last['time/step']:.2f} s a step, "
            f"{torch.cuda.mem_get_info()[1] / 2**30:.0f} GiB on the device"
        )


def test_the_tiny_model_learns_on_one_gpu(tmp_path, capsys):
    steps = run(tmp_path / "run", "toy", "--training.steps", "60")
    assert sum(s["reward/mean"] for s in steps[-5:]) / 5 > 0.6 > 0.3 > steps[0]["reward/mean"]
    assert max(s["policy/staleness_max"] for s in steps) == 0
    report("tiny model", steps, capsys)


def test_a_model_of_the_size_of_qwen3_0_6b_trains_and_generates_on_one_gpu(tmp_path, capsys):
    """Its blocks (440 million parameters), with the vocabulary of the tiny model, so that what it says can be read."""
    published = published_config("Qwen/Qwen3-0.6B")
    assert published is not None
    model = make_tiny_model(tmp_path / "model", family="qwen3", **{key: published[key] for key in SHAPE})
    assert check_architecture(json.loads((model / "config.json").read_text())).num_parameters > 4e8
    steps = run(
        tmp_path / "run", str(model), "--training.steps", "6", "--training.learning_rate", "1e-4",
        "--training.seq_len", "256", "--grpo.max_new_tokens", "128",
    )  # fmt: skip
    assert len(steps) == 6
    # Both engines in bfloat16: 0.03 on average between two of them, and far more if a weight sync is lost.
    assert max(s["mismatch/logprob_diff"] for s in steps) < 0.15
    report("Qwen3-0.6B-sized model", steps, capsys)
