"""One GRPO step is the same step under every parallel layout, and publishes the same weights.

What one process computes is compared with transformers in `test_trainer.py`.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.actors.vllm_engine import checkpoint_shapes
from forge.testing.tiny_model import make_tiny_model

WORKER = Path(__file__).with_name("layouts_worker.py")
SHARD, REPLICATE = {"data_parallel_shard_degree": 2}, {"data_parallel_replicate_degree": 2}
TENSOR, PIPELINE = {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": SHARD,
    "tp2": TENSOR,
    "pp2": PIPELINE,
    "hsdp2x2": {**REPLICATE, **SHARD},
    "fsdp2 tp2": {**SHARD, **TENSOR},
    "pp2 fsdp2": {**PIPELINE, **SHARD},
    "pp2 tp2": {**PIPELINE, **TENSOR},
}
KINDS = ("dapo", "own_mean", "lora")


def processes(layout: str) -> int:
    return 2 ** len(LAYOUTS[layout])


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of results for each layout, kind of step and rank."""
    root = tmp_path_factory.mktemp("layouts")
    worlds: dict[int, dict[str, Any]] = {1: {"alone": {}}, 2: {}, 4: {}}
    for layout, degrees in LAYOUTS.items():
        worlds[processes(layout)][layout] = degrees
    # Three layers: two stages cannot have the same number.
    model = make_tiny_model(root / "model", family="qwen3", num_hidden_layers=3)
    large = make_tiny_model(root / "large", num_hidden_layers=6, hidden_size=512, intermediate_size=4096)
    job = {
        "model": str(model),
        "large": str(large),
        "alone": str(root / "checkpoint"),
        "out": str(root),
        "worlds": worlds,
    }
    (root / "job.json").write_text(json.dumps(job))
    repository = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, str(WORKER), str(root / "job.json")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(repository), *sys.path]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return root


def read(out: Path, name: str) -> dict[str, Any]:
    return torch.load(out / f"{name}.pt", weights_only=True)


def ranks_of(out: Path, layout: str, kind: str) -> list[dict[str, Any]]:
    return [read(out, f"{layout} {kind} {rank}") for rank in range(processes(layout))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_gradients_and_metrics_are_those_of_one_process(out: Path, layout: str, kind: str) -> None:
    alone, ranks = read(out, f"alone {kind} 0"), ranks_of(out, layout, kind)
    gradients: dict[str, torch.Tensor] = {}
    for found in ranks:
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-4)
        assert found["metrics"] == pytest.approx(alone["metrics"], rel=1e-4, abs=1e-5)
        gradients |= found["gradients"]
    assert gradients.keys() == alone["gradients"].keys()
    for name, gradient in alone["gradients"].items():
        assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_publishes_identical_tensors(out: Path, layout: str) -> None:
    alone, first, *others = [read(out, "alone dapo 0"), *ranks_of(out, layout, "dapo")]
    assert list(first["before"]) == list(alone["before"])
    assert all(torch.equal(first["before"][name], value) for name, value in alone["before"].items())
    assert not any(found["before"] for found in others)  # no other rank keeps a copy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_updated_weights_are_those_of_one_process(out: Path, layout: str, kind: str) -> None:
    alone, spread = read(out, f"alone {kind} 0"), ranks_of(out, layout, kind)[0]
    for name, updated in alone["after"].items():
        moved, off = updated - alone["before"][name], spread["after"][name] - updated
        assert off.abs().max() < 1e-4, name
        # Adam's first step is a sign: where a gradient is rounding noise, so is the step.
        assert off.norm() <= 1e-3 * moved.norm(), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_goes_on_from_the_checkpoint_of_one_process(out: Path, layout: str) -> None:
    alone, spread = read(out, "alone second"), ranks_of(out, layout, "dapo")
    assert all(torch.equal(spread[0]["loaded"][name], value) for name, value in alone["loaded"].items())
    assert [found["second loss"] for found in spread] == pytest.approx([alone["second loss"]] * len(spread), rel=1e-4)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if processes(layout) == 2])
def test_rank_0_holds_the_weights_once_and_another_rank_one_tensor_at_a_time(out: Path, layout: str) -> None:
    shapes = [math.prod(s) for s in checkpoint_shapes(str(out / "large")).values()]
    whole = 4 * sum(shapes)
    assert whole > 150e6
    first, other = [read(out, f"{layout} memory {rank}") for rank in range(2)]
    # Once is 157 MB. Beside it: tensors on their way, what the allocator keeps, and at first the code that is read.
    for what, copies, spare in (("first", 1.0, 100e6), ("again", 0.0, 64e6), ("bfloat16", 0.5, 64e6)):
        assert first[what] < copies * whole + spare, what
        assert other[what] < spare, what
    if layout == "fsdp2":  # it is measured at all; layouts that follow in the same processes reuse what this one freed
        assert first["first"] > 0.6 * whole
