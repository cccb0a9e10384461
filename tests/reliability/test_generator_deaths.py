"""A generator's processes are killed, vLLM's own workers included, and the replacement has the weights it must have."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import psutil
from safetensors.torch import load_file

from forge.actors.generator import Generator
from forge.provisioner import Provisioner
from forge.testing.tiny_model import make_tiny_model
from forge.weights import WeightStore
from tests.processes import shared_memory, shared_memory_left


def processes_of_generators() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if p.environ().get("FORGE_PROC_NAME") == "generator/0"]


def workers_of(actor: psutil.Process) -> list[psutil.Process]:
    return [p for p in actor.children() if "resource_tracker" not in " ".join(p.cmdline())]


async def until(condition, *, seconds):
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)


def test_a_killed_vllm_worker_costs_no_request_and_the_replacement_has_the_newest_weights(tmp_path):
    model = make_tiny_model(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    incidents: list[tuple[float, str]] = []

    async def scenario():
        store = await WeightStore.start(keep=1)
        service = await Generator.options(name="generator").as_service(
            model=str(model), dtype="float32", tensor_parallel=2, max_model_len=128, max_num_seqs=8, weights=store
        )
        for version in (1, 2):
            await store.publish(version, [(name, t * (1 + version / 10)) for name, t in weights.items()])
            await service.update_weights.fanout(version)
        (actor,) = processes_of_generators()
        first, second = workers_of(actor)
        owed = [asyncio.ensure_future(service.generate.route([5, 6, 7], n=2, max_new_tokens=60)) for _ in range(2)]
        await asyncio.sleep(0.2)
        os.kill(second.pid, signal.SIGKILL)
        killed_at = time.monotonic()
        await until(lambda: incidents, seconds=3)
        # While the replacement starts, the version it is told of is overtaken and dropped.
        await store.publish(3, weights.items())
        answers = await asyncio.gather(*owed)
        versions = {c.metadata["policy_version"] for answer in answers for c in answer}
        left = [p for p in (actor, first, second) if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        return incidents[0][0] - killed_at, versions, left, service.health()

    async def main():
        note = lambda incident: incidents.append((time.monotonic(), incident.cause))  # noqa: E731
        async with Provisioner(gpus=[], log_dir=tmp_path / "logs", on_incident=note):
            return await scenario()

    before = shared_memory()
    seconds, versions, left, health = asyncio.run(asyncio.wait_for(main(), 280))
    assert seconds < 3
    assert "It exited with status 1" in incidents[0][1]
    assert "vLLM's worker process" in (tmp_path / "logs" / "generator-0-0.log").read_text()
    assert versions == {3}
    assert left == []
    assert health == {"healthy": 1, "restarts": 1, "in_flight": 0, "retried": 2}
    assert shared_memory_left(before) == set()
