"""Trainer and generator on one GPU: the generator's sleep frees its memory, and it wakes with the new weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forge.actors.generator import Generator
from forge.placement import Request
from forge.provisioner import Provisioner
from forge.testing.tiny_model import make_tiny_model
from forge.weights import WeightStore

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PROMPT = [10, 20, 30] * 15


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_sleep_frees_the_gpu_and_new_weights_wake_the_generator(tmp_path: Path) -> None:
    first, second = (make_tiny_model(tmp_path / name, seed=seed) for name, seed in (("first", 0), ("second", 1)))
    new = load_file(second / "model.safetensors")
    reference = AutoModelForCausalLM.from_pretrained(second, dtype=torch.float32)

    async def scenario() -> None:
        async with Provisioner() as provisioner:
            generator_request = Request(service="generator", with_gpus=True, turns_with="trainer")
            provisioner.plan([Request(service="trainer", with_gpus=True), generator_request])
            store = await WeightStore.start()
            before = used_bytes()
            generator = await Generator.options(with_gpus=True, name="generator").as_actor(
                model=str(first),
                dtype="float32",
                device="cuda",
                max_model_len=128,
                gpu_memory_utilization=0.5,
                reserved_bytes=2 * 2**30,
                weights=store,
            )
            awake = used_bytes() - before
            await generator.sleep.call()
            asleep = used_bytes() - before
            print(f"generator: {awake / 2**30:.1f} GiB awake, {asleep / 2**30:.1f} GiB asleep")
            assert asleep < 0.2 * awake
            await store.publish(1, new.items())
            await generator.update_weights.call(1)
            assert used_bytes() - before > 0.8 * awake
            for completion in await generator.generate.call(PROMPT, n=3, max_new_tokens=20):
                ids = torch.tensor([PROMPT + completion.token_ids])
                with torch.no_grad():
                    logits = reference(ids).logits[0, len(PROMPT) - 1 : -1]
                expected = logits.log_softmax(-1).gather(-1, ids[0, len(PROMPT) :, None])[:, 0]
                assert (expected - torch.tensor(completion.logprobs)).abs().mean() < 1e-3
            await generator.shutdown()

    asyncio.run(asyncio.wait_for(scenario(), 300))
