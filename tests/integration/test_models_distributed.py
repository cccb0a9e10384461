"""A model spread over several processes computes what it computes in one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.models.tiny_checkpoints import make_checkpoint

WORKER = Path(__file__).with_name("models_worker.py")
SHARDED = {"data_parallel_shard_degree": 2}
REPLICATED = {"data_parallel_replicate_degree": 2}
TENSOR = {"tensor_parallel_degree": 2}

# The tied model with norms of queries and keys, and the untied one with biases, hold every kind of parameter there is.
CASES: dict[str, dict[str, Any]] = {
    "qwen3_tied alone": {"world": 1},
    "qwen3_tied fsdp2": {"world": 2, "degrees": SHARDED},
    "qwen3_tied tp2": {"world": 2, "degrees": TENSOR},
    "qwen3_tied replicas": {"world": 2, "degrees": REPLICATED},
    "qwen3_tied full": {"world": 1, "options": {"activation_checkpointing": "full"}},
    "qwen3_tied selective": {"world": 1, "options": {"activation_checkpointing": "selective"}},
    "qwen3_tied full fsdp2": {"world": 2, "degrees": SHARDED, "options": {"activation_checkpointing": "full"}},
    "qwen3_tied bf16": {"world": 1, "options": {"dtype": "bfloat16"}},
    "qwen3_tied tp2 bit by bit": {"world": 2, "degrees": TENSOR, "bit_by_bit": True},
    "qwen3_tied fsdp2 bit by bit": {"world": 2, "degrees": SHARDED, "bit_by_bit": True},
    "qwen2 alone": {"world": 1},
    "qwen2 fsdp2": {"world": 2, "degrees": SHARDED},
    "qwen2 tp2": {"world": 2, "degrees": TENSOR},
    "qwen2 fsdp2 tp2": {"world": 4, "degrees": {**SHARDED, **TENSOR}},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoints, and a folder for each case that has run on them."""
    root = tmp_path_factory.mktemp("models")
    made = {name: root / name for name in ("qwen3_tied", "qwen2")}
    for name, folder in made.items():
        make_checkpoint(name, folder)
    made |= {name: root / name.replace(" ", "-") for name in CASES}
    cases = [{**case, "folder": str(made[name.split()[0]]), "out": str(made[name])} for name, case in CASES.items()]
    (root / "cases.json").write_text(json.dumps(cases))
    run = subprocess.run(
        [sys.executable, str(WORKER), str(root / "cases.json")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return made


def step_of(folders: dict[str, Path], case: str) -> dict[str, Any]:
    return torch.load(folders[case] / "result.pt", weights_only=True)


def assert_same_step(got: dict[str, Any], want: dict[str, Any], *, tolerance: float) -> None:
    torch.testing.assert_close(got["loss"], want["loss"], rtol=tolerance, atol=tolerance)
    assert got["gradients"].keys() == want["gradients"].keys()
    for name, gradient in want["gradients"].items():
        close = torch.allclose(got["gradients"][name], gradient, rtol=tolerance, atol=tolerance)
        assert close, f"{name}: largest difference {(got['gradients'][name] - gradient).abs().max():.3g}"


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case["world"] > 1])
def test_several_processes_find_the_loss_gradients_and_weights_of_one(folders: dict[str, Path], case: str) -> None:
    checkpoint = case.split()[0]
    spread, alone = step_of(folders, case), step_of(folders, f"{checkpoint} alone")
    assert_same_step(spread, alone, tolerance=1e-4)
    assert spread["weights"].keys() == alone["weights"].keys()
    assert all(torch.equal(spread["weights"][name], value) for name, value in alone["weights"].items())


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case["world"] > 1])
def test_parameters_stay_the_optimizers_after_a_pass_without_gradient(folders: dict[str, Path], case: str) -> None:
    assert step_of(folders, case)["same_parameters"]


@pytest.mark.parametrize("case", ["qwen3_tied fsdp2", "qwen2 fsdp2", "qwen2 tp2"])
def test_logits_can_be_taken_after_the_weights_were_put_back_into_shards(folders: dict[str, Path], case: str) -> None:
    alone = step_of(folders, f"{case.split()[0]} alone")
    assert torch.allclose(step_of(folders, case)["logits_later"], alone["logits_later"], atol=1e-4)


def test_tensor_parallelism_pads_rows_to_a_multiple_of_its_degree(folders: dict[str, Path]) -> None:
    assert set(step_of(folders, "qwen3_tied alone")["lengths"]) == {9, 5}
    assert set(step_of(folders, "qwen3_tied tp2")["lengths"]) == {10, 6}


@pytest.mark.parametrize("case", ["qwen3_tied tp2", "qwen2 fsdp2 tp2", "qwen3_tied full fsdp2"])
def test_what_several_processes_save_is_what_was_loaded(folders: dict[str, Path], case: str) -> None:
    saved = load_file(folders[case] / "hf" / "model.safetensors")
    original = load_file(folders[case.split()[0]] / "model.safetensors")
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in original)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputing_activations_changes_no_gradient_and_no_name(folders: dict[str, Path], kind: str) -> None:
    recomputed, alone = step_of(folders, f"qwen3_tied {kind}"), step_of(folders, "qwen3_tied alone")
    assert_same_step(recomputed, alone, tolerance=1e-6)


def test_one_process_in_float32_starts_no_process_group(folders: dict[str, Path]) -> None:
    assert not step_of(folders, "qwen2 alone")["distributed"]


def test_bfloat16_computes_in_bf16_and_keeps_float32_weights(folders: dict[str, Path]) -> None:
    rounded, exact = step_of(folders, "qwen3_tied bf16"), step_of(folders, "qwen3_tied alone")
    assert rounded["weight_dtypes"] == {"torch.float32"}
    assert all(gradient.dtype == torch.float32 for gradient in rounded["gradients"].values())
    # bf16 has 8 significant bits: near the exact loss, and not equal to it.
    difference = abs(float(rounded["loss"] - exact["loss"]))
    assert 1e-6 < difference < 0.05 * float(exact["loss"])
    assert all(torch.equal(rounded["weights"][name], value) for name, value in exact["weights"].items())
