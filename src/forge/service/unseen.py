"""Exceptions that nobody would hear of: what ends a thread, or a task that nobody awaits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from forge.service.errors import ActorFailed


@contextmanager
def unseen_failures(report: Callable[[ActorFailed], None]) -> Iterator[None]:
    """Within the block, tells `report`, on the running event loop, what threads of this process and tasks of the loop
    died of, as the `__cause__` of an `ActorFailed`. It is still written where it always was."""
    loop = asyncio.get_running_loop()
    of_threads, of_tasks = threading.excepthook, loop.get_exception_handler()

    def thread_died(args: threading.ExceptHookArgs) -> None:
        of_threads(args)
        if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
            name = args.thread.name if args.thread else "?"
            loop.call_soon_threadsafe(report, _failed(f"the thread {name!r}", args.exc_value))

    def task_died(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        task, error = context.get("future"), context.get("exception")
        if isinstance(task, asyncio.Task) and isinstance(error, Exception):
            report(_failed(f"the task {task.get_name()!r}", error))

    threading.excepthook = thread_died
    loop.set_exception_handler(task_died)
    try:
        yield
    finally:
        threading.excepthook = of_threads
        loop.set_exception_handler(of_tasks)


async def ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancels those that are still under way, and takes note of how each ended, so that its error is not an unseen one.

    For whoever starts a task and may be cancelled before it has looked at the result.
    """
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _failed(what: str, error: BaseException) -> ActorFailed:
    failed = ActorFailed(f"{what} died of {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
