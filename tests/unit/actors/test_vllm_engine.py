"""What surrounds vLLM and can be looked at without it: checks of new weights, how they travel, memory, environment."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from forge import precision
from forge.actors.vllm_engine import VllmEngine, check_weights, checkpoint_shapes, staged
from forge.actors.vllm_setup import configure_environment, kv_cache_bytes, resolve_dtype

EXPECTED = {"model.a": (2, 3), "model.b": (4,)}


def weights() -> dict[str, torch.Tensor]:
    return {name: torch.ones(shape) for name, shape in EXPECTED.items()}


def test_all_tensors_of_the_checkpoint_in_their_shapes_are_accepted() -> None:
    check_weights(weights(), EXPECTED)
    check_weights(weights() | {"lm_head.weight": torch.ones(2, 3)}, EXPECTED)  # tied, and given all the same


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.b": None}, r"1 tensors are missing \(model.b\) and 0 are unknown \(none\)"),
        ({"model.c": torch.ones(1)}, r"0 tensors are missing \(none\) and 1 are unknown \(model.c\)"),
        ({"model.b": torch.ones(5)}, r"model.b has the shape \(5,\), but \(4,\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    changed = {name: tensor for name, tensor in (weights() | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        check_weights(changed, EXPECTED)


def test_shapes_are_read_from_all_files_of_a_local_folder(tmp_path: Path) -> None:
    save_file({"model.a": torch.ones(2, 3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"model.b": torch.ones(4)}, tmp_path / "model-00002-of-00002.safetensors")
    assert checkpoint_shapes(str(tmp_path)) == EXPECTED
    assert checkpoint_shapes("organization/model-on-a-hub") is None


def test_one_worker_gets_the_tensors_themselves_and_several_a_file_that_is_gone_afterwards() -> None:
    async def test() -> None:
        given = weights()
        async with staged(given, tensor_parallel=1) as form:
            assert form is given
        async with staged(given, tensor_parallel=2) as path:
            assert isinstance(path, str)
            assert all(torch.equal(tensor, given[name]) for name, tensor in load_file(path).items())
        assert not os.path.exists(os.path.dirname(path))

    asyncio.run(test())


def test_auto_is_bfloat16_only_where_the_hardware_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_dtype("auto", device="cuda") == "bfloat16"
    for capable, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(precision, "cpu_multiplies_bfloat16", lambda can=capable: can)
        assert resolve_dtype("auto", device="cpu") == expected
        assert resolve_dtype("float32", device="cpu") == "float32"


def test_bfloat16_on_a_cpu_without_it_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(precision, "cpu_multiplies_bfloat16", lambda: False)
    with caplog.at_level(logging.WARNING):
        assert resolve_dtype("bfloat16", device="cpu") == "bfloat16"
    assert "services.generator.dtype: float32" in caplog.text


def kv_bytes(*, sequences: int, length: int = 100, layers: int = 30) -> int:
    """SmolLM2's 30 layers of 3 heads of 64 in float32, in blocks of 16: 30 · 2 · 3 · 64 · 4 = 46,080 bytes a token."""
    model = SimpleNamespace(
        get_num_layers=lambda parallel: layers,
        get_num_kv_heads=lambda parallel: 3,
        get_head_size=lambda: 64,
        dtype=torch.float32,
        max_model_len=length,
    )
    return kv_cache_bytes(
        SimpleNamespace(
            model_config=model,
            parallel_config=None,
            cache_config=SimpleNamespace(block_size=16),
            scheduler_config=SimpleNamespace(max_num_seqs=sequences),
        )
    )


def test_the_kv_cache_holds_all_sequences_in_whole_blocks_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * 2**30))
    spare, one = 32 * 46_080, 112 * 46_080  # 100 tokens take 7 blocks
    assert kv_bytes(sequences=10) == spare + 10 * one
    assert kv_bytes(sequences=1000) == spare + 2**30  # 1 GiB is more than 8 / 16 GiB
    assert kv_bytes(sequences=1000, length=64_000) == spare + 64_000 * 46_080  # one sequence must fit
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * 2**30))
    assert kv_bytes(sequences=10_000) == spare + 4 * 2**30


def test_the_environment_keeps_what_the_user_set_except_where_the_engine_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "environ", {"VLLM_HOST_IP": "10.0.0.1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    configure_environment(str(tmp_path), device="cpu")
    assert os.environ["VLLM_HOST_IP"] == "10.0.0.1"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_hub_models_may_use_the_network_and_gpus_need_no_cpu_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"FORGE_LOG_LEVEL": "debug"})
    configure_environment("organization/model", device="cuda")
    assert "HF_HUB_OFFLINE" not in os.environ
    assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"


class PauseState(Enum):
    UNPAUSED = 0
    PAUSED_ALL = 2


def test_steps_under_way_are_finished_under_the_old_weights_before_a_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM on a GPU keeps batches whose results are still to come; the CPU build has none, so this one is made up."""
    interface = ModuleType("interface")
    interface.PauseState = PauseState  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.core.sched.interface", interface)
    events: list[str] = []
    queue = ["batch 1", "batch 2"]
    scheduler = SimpleNamespace(
        set_pause_state=lambda state: events.append(state.name),
        get_request_counts=lambda: (0, 0),
        waiting=[],
    )

    def step() -> list[Any]:
        events.append(queue.pop(0))
        return []

    llm = SimpleNamespace(
        engine_core=SimpleNamespace(engine_core=SimpleNamespace(batch_queue=queue, scheduler=scheduler)),
        step=step,
        collective_rpc=lambda method, args: events.append(method),
        set_weight_version=lambda version: events.append(f"version {version}"),
        is_sleeping=lambda: False,
    )
    engine = VllmEngine.__new__(VllmEngine)
    engine.__dict__.update(_llm=llm, _drained=[], _salt=0, version=0, _settings=SimpleNamespace(seed=0))
    engine.load_weights(1, {})
    assert events == [
        *("PAUSED_ALL", "batch 1", "batch 2", "UNPAUSED"),
        *("forge_load_weights", "version 1", "forge_seed"),
    ]
