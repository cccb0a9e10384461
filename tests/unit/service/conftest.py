import asyncio
from collections.abc import Callable

import pytest

from forge.service.worker import Worker


class InProcessMesh:
    """Stands in for the processes of a replica: each rank is a `Worker` in this process."""

    def __init__(self, size: int = 1) -> None:
        self._workers = [Worker(rank) for rank in range(size)]
        self._tasks: set[asyncio.Task[None]] = set()
        self.stopped = False
        self.failure: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.die: Callable[[int, str], None] = lambda rank, reason: None

    def send(self, kind: str, payload: bytes) -> list[asyncio.Future[bytes]]:
        """The futures are listed by rank, not in the order of arrival."""
        return [self._ask(worker, kind, payload) for worker in self._workers]

    def _ask(self, worker: Worker, kind: str, payload: bytes) -> asyncio.Future[bytes]:
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def answer() -> None:
            if kind == "watch":  # listens to the whole process, which is the test's here
                result = await self.failure
            elif kind == "shutdown":
                result = await worker.stop()
            else:
                result = await (worker.start(payload) if kind == "start" else worker.handle(payload))
            if not reply.done():
                reply.set_result(result)

        task = asyncio.ensure_future(answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return reply

    async def stop(self) -> None:
        self.stopped = True

    def on_death(self, callback: Callable[[int, str], None]) -> None:
        self.die = callback


@pytest.fixture
def new_mesh() -> type[InProcessMesh]:
    return InProcessMesh
