"""A model spread over two worker processes says what one process says, before and after new weights."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import cloudpickle
import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from forge.actors.generator import Generator
from forge.service import scratch
from forge.testing.tiny_model import make_tiny_model
from forge.types import Completion

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the generator's process cannot import this module

PROMPT = [10, 20, 30] * 15


class OneFile:
    """A weight source for tests, whose every version is the same file."""

    def __init__(self, path: str) -> None:
        self.path = path

    async def fetch(self, version: int) -> dict[str, Tensor]:
        return load_file(self.path)


def mean_difference(model: Path, completion: Completion) -> float:
    """From the log-probabilities of transformers in one process, nats per token."""
    ids = torch.tensor([PROMPT + completion.token_ids])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, ids[0, len(PROMPT) :, None])[:, 0]
    return float((expected - torch.tensor(completion.logprobs)).abs().mean())


def test_two_workers_agree_with_one_process_before_and_after_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # the generator knows how little it needs
    first, second = (make_tiny_model(tmp_path / name, seed=seed) for name, seed in (("first", 0), ("second", 1)))

    async def scenario() -> None:
        generator = await Generator.options(threads=1).as_actor(
            model=str(first),
            dtype="float32",
            tensor_parallel=2,
            max_model_len=128,
            weights=OneFile(str(second / "model.safetensors")),
        )
        try:
            (actor,) = [p for p in psutil.Process().children() if "forge.service" in " ".join(p.cmdline())]
            workers = [p for p in actor.children() if "resource_tracker" not in " ".join(p.cmdline())]
            assert len(workers) == 2  # of vLLM; that the model is split is what makes TP need both for an answer
            for completion in await generator.generate.call(PROMPT, n=3, max_new_tokens=20):
                assert mean_difference(first, completion) < 1e-5
            await generator.update_weights.call(1)
            for completion in await generator.generate.call(PROMPT, n=3, max_new_tokens=20):
                assert mean_difference(second, completion) < 1e-5 < mean_difference(first, completion)
            assert not list(Path("/dev/shm").glob(f"forge-weights-{scratch.folder().name}-*"))
        finally:
            await generator.shutdown()

    asyncio.run(asyncio.wait_for(scenario(), 240))
