"""The other end of a call: builds the actor inside its process and runs its methods. No Monarch here."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from forge.service.actor import ForgeActor, endpoints_of
from forge.service.errors import ActorFailed
from forge.service.unseen import unseen_failures
from forge.service.wire import decode, decode_call, encode_error, encode_reply


class SerialThread:
    """One daemon thread that runs functions one at a time, in the order they came.

    Consumes functions, produces their results on the caller's event loop, waits for the next, ends with the process.
    A daemon, so that a method that hangs cannot keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._queue.get()()

    async def run(self, function: Callable[[], Any]) -> Any:
        """The result of `function()`, or what it raised, `BaseException`s included."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def deliver(value: Any, error: BaseException | None) -> None:
            if done.done():  # whoever waited was cancelled
                return
            if error is None:
                done.set_result((value, None))
            else:
                done.set_result((None, error))  # StopIteration cannot be set as an exception of a future

        def job() -> None:
            try:
                value, error = context.run(function), None
            except BaseException as raised:
                value, error = None, raised
            with contextlib.suppress(RuntimeError):  # the loop is closed when the process is ending
                loop.call_soon_threadsafe(deliver, value, error)

        self._queue.put(job)
        value, error = await done
        if error is not None:
            raise error
        return value


class Worker:
    """One actor of class `cls` in this process; `handle` turns an encoded call into an encoded reply.

    The reply of a method that raised carries the exception; `handle` itself does not raise.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._thread = SerialThread("forge-actor")
        self._actor: ForgeActor | None = None
        self._methods: dict[str, Callable[..., Any]] = {}

    async def start(self, spec: bytes) -> bytes:
        """Builds the actor from an encoded `(class, init kwargs)` and runs its `setup`."""
        try:
            self._actor = await self._thread.run(lambda: self._build(spec))
            self._methods = {name: getattr(self._actor, name) for name in endpoints_of(type(self._actor))}
            setup = getattr(self._actor, "setup", None)
            if setup is not None:
                await self._invoke(setup)
            return encode_reply(self._rank, os.getpid())
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            return encode_error(self._rank, error)

    async def handle(self, message: bytes) -> bytes:
        """Runs one call. Async methods interleave at their awaits; the others queue for the one thread."""
        try:
            call = decode_call(message)
            result = await self._invoke(self._methods[call.method], *call.args, **call.kwargs)
            return encode_reply(self._rank, result if self._rank == 0 or call.every_rank_answers else None)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and _being_cancelled():
                raise  # the process is being stopped; there is nobody to answer
            return encode_error(self._rank, error)

    async def watch(self) -> bytes:
        """Answers when a thread or task of this process has died of an exception that nobody else would hear of."""
        failed: asyncio.Future[ActorFailed] = asyncio.get_running_loop().create_future()
        with unseen_failures(lambda failure: None if failed.done() else failed.set_result(failure)):
            return encode_error(self._rank, await failed)

    async def stop(self) -> bytes:
        """Runs the actor's own `shutdown`, if it has one."""
        try:
            shutdown = getattr(self._actor, "shutdown", None)
            if shutdown is not None:
                await self._invoke(shutdown)
            return encode_reply(self._rank, None)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            return encode_error(self._rank, error)

    @staticmethod
    def _build(spec: bytes) -> ForgeActor:
        cls, init_kwargs = decode(spec)
        actor: ForgeActor = cls(**init_kwargs)
        return actor

    async def _invoke(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(*args, **kwargs)
        result = await self._thread.run(lambda: method(*args, **kwargs))
        return await result if inspect.isawaitable(result) else result


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
