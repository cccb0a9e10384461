"""New weights from trainer to generator: publish to first token, against memory copies and TorchStore's own way.

    python -m benchmarks.weight_sync [--json FILE]

SmolLM2-135M in the generator's dtype (538 MB in float32; 269 MB in bfloat16, where the CPU multiplies it), three real
processes: this one publishes as a trainer does, one keeps the weights, a generator takes them over and samples a token.
"TorchStore put/get" puts the same tensors one by one with TorchStore's client and gets them in the generator's process.
The yardstick is two memory copies of that size plus vLLM's own reload from memory. Medians of three, in turn, after one
round to warm up.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import SMOLLM2, median_of, parser, report
from forge.actors.generator import Generator
from forge.models.hf_folder import WeightFiles
from forge.precision import resolve_dtype
from forge.provisioner import Provisioner
from forge.service.handles import Service
from forge.weights import WeightStore

LIMIT = 4.0
ROUNDS = 3


class TimedGenerator(Generator):
    """A generator that can also do parts of an update alone."""

    async def reload_alone(self, version: int) -> float:
        """Seconds that vLLM takes to load what is in this process's memory already."""
        assert self._weights is not None
        weights = {name: tensor.clone() for name, tensor in (await self._weights.fetch(version)).items()}
        started = time.perf_counter()
        await self._loop.call(lambda engine: engine._llm.collective_rpc(_reload, args=(weights,)))
        return time.perf_counter() - started

    async def get_all(self, client: Any, names: list[str]) -> float:
        """Seconds that TorchStore's client takes to get the tensors."""
        started = time.perf_counter()
        for name in names:
            await client.get(name)
        return time.perf_counter() - started


def _reload(worker: Any, weights: dict[str, Tensor]) -> None:
    worker.model_runner.reload_weights(weights_iterator=iter(weights.items()))


async def plain_client(provisioner: Provisioner) -> Any:
    """TorchStore's own client, controller and storage; only the controller's endpoints are made async (Monarch 0.7)."""
    from forge.weights.torchstore_client import LocalClient, SingletonStrategy, StorageVolume, StoreController

    group = await provisioner.spawn("plain_store")
    strategy = SingletonStrategy()
    controller = group.mesh.spawn("plain_controller", StoreController)
    with contextlib.suppress(Exception):  # it is not initialized, but now TorchStore is imported there, by one thread
        await controller.keys.call_one()
    volumes = group.mesh.spawn("plain_volume", StorageVolume, id_func=SingletonStrategy.get_volume_id)
    await controller.init.call(strategy=strategy, num_storage_volumes=1, storage_volumes=volumes)
    await strategy.set_storage_volumes(volumes)
    return LocalClient(controller, strategy)


async def seconds(work: Awaitable[Any]) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


def copy_seconds(weights: dict[str, Tensor], target: dict[str, Tensor]) -> float:
    """One memory copy of all weights into memory that was used before."""
    started = time.perf_counter()
    for name, tensor in weights.items():
        target[name].copy_(tensor)
    return time.perf_counter() - started


async def one_round(
    version: int, weights: dict[str, Tensor], store: WeightStore, generator: Service, client: Any
) -> dict[str, float]:
    """All parts once, in seconds."""
    target = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    copy_seconds(weights, target)
    copied = copy_seconds(weights, target)
    started = time.perf_counter()
    await store.publish(version, weights.items())
    published = time.perf_counter()
    [parts] = await generator.update_weights.fanout(version)
    [completion] = await generator.generate.route([1, 2, 3], max_new_tokens=1)
    assert completion.metadata["policy_version"] == version
    whole = time.perf_counter() - started
    [reload] = await generator.reload_alone.fanout(version)

    async def put_all() -> None:
        for name, tensor in weights.items():
            await client.put(name, tensor)

    put = await seconds(put_all())
    [got] = await generator.get_all.fanout(client, list(weights))
    return {
        "memcpy": copied,
        "reload": reload,
        "publish": published - started,
        "fetch": parts["fetch"],
        "swap": parts["swap"],
        "whole": whole,
        "put_get": put + got,
    }


async def measure() -> tuple[list[dict[str, float]], float, str]:
    torch.set_num_threads(1)
    dtype = resolve_dtype("auto", with_gpus=False)
    with WeightFiles(SMOLLM2) as files:
        shapes = files.shapes().items()
        weights = {
            name: files.read(name, offsets=[0] * len(s), shape=s).to(getattr(torch, dtype)) for name, s in shapes
        }
    megabytes = sum(t.numel() * t.element_size() for t in weights.values()) / 1e6
    with tempfile.TemporaryDirectory() as logs:
        async with Provisioner(log_dir=Path(logs)) as provisioner:
            store = await WeightStore.start()
            generator = await TimedGenerator.options(name="generator", threads=2).as_service(
                model=str(SMOLLM2), dtype=dtype, max_model_len=64, max_num_seqs=8, weights=store
            )
            client = await plain_client(provisioner)
            rounds = [await one_round(v, weights, store, generator, client) for v in range(1, ROUNDS + 2)][1:]
            await generator.shutdown()
    return rounds, megabytes, dtype


def main() -> None:
    options = parser(__doc__).parse_args()
    rounds, megabytes, dtype = asyncio.run(measure())
    middle = {name: median_of([r[name] for r in rounds]) for name in rounds[0]}
    yardstick = 2 * middle["memcpy"] + middle["reload"]
    names = {
        "memcpy": "one memory copy",
        "reload": "vLLM's own reload, from memory",
        "publish": "publish",
        "fetch": "fetch",
        "swap": "swap",
        "whole": "publish to first token under the new weights",
        "put_get": "TorchStore put + get, without a reload",
    }
    rows = [
        {"part": text, "seconds": middle[key], "mb_per_s": megabytes / middle[key], "of": middle[key] / yardstick}
        for key, text in names.items()
    ]
    report(
        "weight_sync",
        rows,
        columns={
            "part": "part",
            "seconds": "s:.3f",
            "mb_per_s": "MB/s:,.0f",
            "of": "of two copies + reload:.2f",
        },
        json_path=options.json,
        dtype=dtype,
        megabytes=megabytes,
        rounds=rounds,
        limit=LIMIT,
    )


if __name__ == "__main__":
    main()
