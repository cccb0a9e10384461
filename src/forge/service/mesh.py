"""The Monarch side of a replica: one actor in each process, and a mesh that carries bytes to it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from monarch.actor import Actor
from monarch.actor.concurrent import concurrent_endpoint

from forge.service.worker import Worker

if TYPE_CHECKING:
    from forge.provisioner import ProcGroup


class HostedActor(Actor):
    """Runs in each process. Its endpoints are concurrent: none waits for another to finish."""

    def __init__(self) -> None:
        self._worker = Worker(int(os.environ["RANK"]))

    @concurrent_endpoint(instrument=False)
    async def start(self, spec: bytes) -> bytes:
        return await self._worker.start(spec)

    @concurrent_endpoint(instrument=False)
    async def call(self, message: bytes) -> bytes:
        return await self._worker.handle(message)

    @concurrent_endpoint(instrument=False)
    async def watch(self, _: bytes) -> bytes:
        return await self._worker.watch()

    @concurrent_endpoint(instrument=False)
    async def shutdown(self, _: bytes) -> bytes:
        return await self._worker.stop()


class MonarchMesh:
    """A `Mesh` over the processes of `group`."""

    def __init__(self, group: ProcGroup) -> None:
        self._group = group
        actors = group.mesh.spawn("forge_actor", HostedActor)
        self._endpoints = {
            "start": actors.start,
            "call": actors.call,
            "watch": actors.watch,
            "shutdown": actors.shutdown,
        }

    def send(self, kind: str, payload: bytes) -> Sequence[asyncio.Future[bytes]]:
        endpoint = self._endpoints[kind]
        if self._group.size == 1:
            return [endpoint.call_one(payload).as_asyncio()]
        return [reply.as_asyncio() for reply in endpoint.stream(payload)]

    async def stop(self) -> None:
        await self._group.stop()

    def on_death(self, callback: Callable[[int, str], None]) -> None:
        self._group.on_death(callback)
