"""Every config file that users start from is checked, placed and estimated; nothing is started or downloaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from apps.grpo.dry_run import describe
from apps.grpo.parts import services_of
from apps.sft.dry_run import describe as describe_sft
from forge import provisioner
from forge.config import GRPOConfig, ParallelismConfig, ServiceConfig, SFTConfig, TrainingConfig, load_config
from forge.estimate import assumed_machines, generator_memory, memory_lines, trainer_memory
from forge.models.architectures import check_architecture
from forge.models.published import published_config
from forge.parts import requests
from forge.placement import InsufficientResources, Machine, Request

ROOT = Path(__file__).parents[2]
USERS = Path(__file__).parent / "users_configs"
SFT_FILES = sorted((ROOT / "apps/sft").glob("*8b.yaml"))
FILES = sorted([*USERS.glob("*.yaml"), *(ROOT / "config").glob("*.yaml"), *(ROOT / "apps/grpo").glob("qwen*.yaml")])
OVERRIDES = {
    "distributed.yaml": ["trainer.procs=4"]
}  # as given it asks for 4 processes and has 2; see test_config_rules


@pytest.fixture(autouse=True)
def no_gpu_here(monkeypatch):
    monkeypatch.setattr(provisioner, "_gpus_of_the_machine", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize("path", FILES, ids=[f"{p.parent.name}/{p.name}" for p in FILES])
def test_a_users_config_is_placed_and_its_memory_estimated(path, tmp_path):
    lines = describe(load_config(GRPOConfig, path, OVERRIDES.get(path.name, [])), tmp_path)
    text = "\n".join(lines)
    assert "shapes as published" in lines[0]
    assert "assumed" in text
    for service in ("trainer", "generator", "reward"):
        assert any(line.split()[:1] == [service] and ("GPU" in line or "CPU" in line) for line in lines)
    assert "GiB for each device" in text
    assert "FLOP of a step" in text


@pytest.mark.parametrize("path", SFT_FILES, ids=[p.name for p in SFT_FILES])
def test_a_fine_tuning_config_is_placed_and_its_memory_estimated(path, tmp_path):
    lines = describe_sft(load_config(SFTConfig, path), tmp_path)
    text = "\n".join(lines)
    assert "shapes as published" in lines[0]
    assert "assumed: 1 × 8 GPUs" in text
    assert "FLOP of a step" in text


def test_the_toy_config_is_read_whole(tmp_path):
    text = "\n".join(describe(load_config(GRPOConfig, ROOT / "apps/grpo/toy.yaml"), tmp_path))
    assert "64 problems held out" in text
    assert "this machine CPU" in text


@pytest.mark.parametrize("name", ["qwen3_1_7b", "qwen3_8b", "qwen3_32b"])
def test_the_gpu_recipes_fit_gpus_of_80_gib(name, tmp_path):
    lines = describe(load_config(GRPOConfig, ROOT / f"apps/grpo/{name}.yaml"), tmp_path)
    assert [line for line in lines if line.startswith("warning")] == []


def test_the_recipe_for_three_gpus_needs_three():
    config = load_config(GRPOConfig, ROOT / "apps/grpo/qwen3_1_7b.yaml")
    assert sum(r.processes for r in requests(services_of(config)) if r.with_gpus) == 3


def test_the_trainers_memory_by_hand():
    """Qwen3-8B, float32 state on 4 FSDP ranks: 8,190,735,360 × 4 bytes / 4 = 7.628 GiB of gradients, twice that of
    moments; the weights also hold two gathered blocks and both embeddings in bfloat16."""
    arch = check_architecture(published_config("Qwen/Qwen3-8B"))
    row = trainer_memory(
        arch,
        TrainingConfig(dtype="bfloat16", seq_len=4096, max_tokens_per_microbatch=8192, activation_checkpointing="full"),
        ParallelismConfig(data_parallel_shard_degree=4),
        ServiceConfig(procs=4),
    )
    assert row.gradients == pytest.approx(7.628, abs=1e-3)
    assert row.optimizer == pytest.approx(15.257, abs=2e-3)
    embeddings = 2 * 151936 * 4096
    gathered = 2 * (2 * (8_190_735_360 - embeddings) / 36 + embeddings) / 2**30
    assert row.weights == pytest.approx(7.628 + gathered, abs=2e-3)
    block = 6 * 4096 + 3 * 4096 + 4 * 1024 + 4 * 12288
    assert row.activations == pytest.approx((8192 * 2 * (36 * 4096 + block) + 2 * 256 * 2**20) / 2**30, rel=1e-6)


def test_the_kv_cache_takes_what_the_weights_leave():
    """Qwen3-8B on two tensor-parallel GPUs of 80 GiB: 72 - 7.628 GiB on each, 2·36·8·128·2/2 = 73,728 bytes a token."""
    arch = check_architecture(published_config("Qwen/Qwen3-8B"))
    config = load_config(GRPOConfig, ROOT / "apps/grpo/qwen3_8b.yaml")
    row = generator_memory(arch, dtype="bfloat16", seq_len=4096, service=config.services.generator, device_gib=80)
    assert row.kv_cache == pytest.approx(72 - 7.628, abs=1e-3)
    assert "72 KiB of KV cache a token: 228 sequences of 4,096, the rest of 256 waits" in row.note


def test_what_does_not_fit_is_warned_about_with_the_knobs():
    arch = check_architecture(published_config("Qwen/Qwen2.5-7B-Instruct"))
    row = trainer_memory(arch, TrainingConfig(dtype="bfloat16"), ParallelismConfig(), ServiceConfig())
    (warning,) = [line for line in memory_lines([row], gpu=80, host=64) if line.startswith("warning")]
    assert "the trainer needs about 129 GiB of each GPU, and 72 of 80 GiB can be had" in warning
    assert "--trainer.procs" in warning


def test_a_machine_that_has_gpus_is_judged_by_them():
    here = Machine(cores=8, gpus=("0", "1"))
    wanted = [Request(service="trainer", procs=3, with_gpus=True)]
    assert assumed_machines(wanted, here) == [here]
    elsewhere = assumed_machines(wanted, Machine(cores=8))
    assert [len(m.gpus) for m in elsewhere] == [8]
    with pytest.raises(InsufficientResources):
        assumed_machines([Request(service="generator", procs=16, with_gpus=True)], Machine(cores=8))


def test_the_32b_recipe_takes_the_four_hosts_that_it_says(tmp_path):
    lines = describe(load_config(GRPOConfig, ROOT / "apps/grpo/qwen3_32b.yaml"), tmp_path)
    assert "placement  assumed: 4 × 8 GPUs; this machine has 0" in lines
    trainer = next(line for line in lines if line.split()[0] == "trainer")
    assert "host 0 GPU 0,1,2,3,4,5,6,7 + host 1 GPU 0,1,2,3,4,5,6,7" in trainer
