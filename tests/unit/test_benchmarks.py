"""The benchmarks compare like with like, and `make bench` knows all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import NAMES
from benchmarks.trainer_step import group_batch, packed, padded, shared
from forge.actors.scoring import Scorer
from forge.config import ParallelismConfig
from forge.losses import build_loss
from forge.models.build import load_model
from forge.objective import Objective, OneRank
from forge.testing.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]


def test_make_bench_knows_every_benchmark() -> None:
    helpers = {"__init__", "__main__", "report", "trl_run"}
    assert {p.stem for p in (ROOT / "benchmarks").glob("*.py")} - helpers == set(NAMES)


def test_a_name_that_is_no_benchmark_is_refused_with_those_that_are() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks", "spead"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no benchmark is called spead; there are: trainer_step, " in done.stderr


def test_shared_packed_and_padded_steps_have_the_same_loss_and_gradient(tmp_path: Path) -> None:
    model = load_model(
        str(make_tiny_model(tmp_path / "tiny")),
        parallelism=ParallelismConfig(),
        dtype="float32",
        device="cpu",
        seq_len=64,
    )
    batch = group_batch(preamble=6, prompts=2, prompt=5, samples=3, shortest=2, longest=8, vocabulary=256)
    scorer = Scorer(model, temperature=1.0, device=torch.device("cpu"))
    objective = Objective(build_loss("grpo"))
    found = []
    for way in (shared, packed, padded):
        rows = way(*batch)
        model.module.zero_grad()
        outcome = objective.backward(
            {k: v for k, v in batch[1].items() if k != "response"}, rows, model=scorer, ranks=OneRank()
        )
        gradient = torch.cat([p.grad.flatten() for p in model.module.parameters()])
        found.append((sum(r.num_tokens for r in rows), outcome.loss, gradient))
    tokens, losses, gradients = zip(*found, strict=True)
    assert tokens[0] < tokens[1] < tokens[2] == 6 * (11 + 8)
    assert losses[1:] == pytest.approx([losses[0]] * 2, abs=1e-6)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], atol=1e-6, rtol=1e-4)
