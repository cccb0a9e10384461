"""The thread that steps an inference engine, and the way in and out of it for asyncio code.

The engine lives on one thread from its construction to its end; nothing else touches it. Requests and other work reach
it through an inbox, results leave through futures on the caller's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class Request:
    """One sequence to generate."""

    id: str
    """Unique among the requests in flight."""
    prompt_ids: list[int]
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    max_new_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(kw_only=True, slots=True)
class Finished:
    """What became of a request."""

    id: str
    token_ids: list[int]
    """What was sampled, the token that ended it included."""
    logprobs: list[float]
    """[len(token_ids)] nats."""
    text: str | None
    """None where the engine did not need the text; the caller decodes `token_ids` then."""
    finish_reason: str
    """ "stop", "length" or "abort"."""
    stop_reason: int | str | None
    """The stop token or stop string; None for the model's own end of turn."""
    versions: tuple[int, int]
    """The oldest and the newest weights that wrote one of the tokens."""
    cached_tokens: int = 0
    """How many of the prompt's tokens were found in the prefix cache."""


class Engine(Protocol):
    """What the loop needs of an engine. All of it is called on the loop's thread."""

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""

    def add(self, request: Request) -> None:
        """Takes a request in; raises ValueError for one that it cannot serve."""

    def abort(self, request_id: str) -> None:
        """Forgets a request, if it is still there."""

    def step(self) -> list[Finished]:
        """One forward pass; what finished in it."""

    def counts(self) -> tuple[int, int]:
        """Requests running and waiting."""

    def start_afresh(self, key: int) -> None:
        """From here on the outcome depends on `key` and the requests to come alone. Nothing is in flight."""

    def close(self) -> None:
        """Frees everything. Called once, also after a step that raised."""


class EngineStopped(RuntimeError):
    """The engine failed or was shut down; `__cause__` is what made it fail."""


class Abandoned(RuntimeError):
    """The request was given up by `EngineLoop.hold`."""


class EngineLoop:
    """Runs an engine on a thread of its own.

    Args:
        make_engine: builds the engine; called on the thread.
        name: of the thread.

    Example:
        >>> loop = EngineLoop(make_engine)
        >>> await loop.start()
        >>> [finished] = await loop.generate([Request(id="a", prompt_ids=[1, 2, 3])])
        >>> await loop.stop()
    """

    def __init__(self, make_engine: Callable[[], Engine], *, name: str = "forge-engine") -> None:
        self._make_engine = make_engine
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[Engine], None]] = deque()
        self._stopping = False
        self._held = False
        self._failure: BaseException | None = None
        self._pending: dict[str, _Promise[Finished]] = {}
        self._promises: set[_Promise[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._counts = (0, 0)
        self._busy_s = self._idle_s = 0.0
        self._idle_since: float | None = None

    async def start(self) -> None:
        """Builds the engine and returns when it is ready. Raises what building it raised."""
        ready = self._post(lambda engine: None)
        self._thread.start()
        try:
            await ready
        except EngineStopped as stopped:
            raise stopped.__cause__ or stopped from None

    async def generate(self, requests: list[Request]) -> list[Finished]:
        """Generates all of them, side by side with whatever else is in flight; in the order given.

        A caller that is cancelled takes its requests out of the engine.

        Raises:
            ValueError: the engine cannot serve one of them (the others are dropped).
            EngineStopped: the engine failed or was shut down.
        """
        loop = asyncio.get_running_loop()
        promises = [_Promise[Finished](loop) for _ in requests]

        def admit(engine: Engine) -> None:
            for request, promise in zip(requests, promises, strict=True):
                try:
                    engine.add(request)
                    self._pending[request.id] = promise
                except ValueError as error:
                    promise.fail(error)

        admitted = self._post(admit)
        try:
            await admitted
            return list(await asyncio.gather(*(promise.future for promise in promises)))
        except BaseException:
            with contextlib.suppress(EngineStopped):
                self._post(lambda engine: self._abort(engine, [request.id for request in requests])).cancel()
            for promise in promises:
                promise.future.cancel()
            raise

    async def hold(self, key: int) -> None:
        """Gives up what is in flight (its callers get `Abandoned`), makes a fresh start from `key`, and steps no more
        until `release`, so that the requests which come meanwhile begin together."""

        def abandon(engine: Engine) -> None:
            for request_id, promise in list(self._pending.items()):
                self._abort(engine, [request_id])
                promise.fail(Abandoned("the request was given up, because the run makes a fresh start."))
            engine.start_afresh(key)
            self._held = True

        await self._post(abandon)

    async def release(self) -> None:
        """Goes on after `hold`."""

        def resume(engine: Engine) -> None:
            self._held = False

        await self._post(resume)

    async def call(self, function: Callable[[Any], T], *, fatal: bool = False) -> T:
        """Runs `function(engine)` between two steps and returns its result.

        Args:
            function: the shorter, the better: nothing is generated meanwhile.
            fatal: an exception leaves the engine unusable, so it ends the loop as well.
        """

        def run(engine: Engine) -> T:
            try:
                return function(engine)
            except Exception as error:
                raise _Fatal(error) if fatal else error from None

        return await self._post(run)

    def stats(self) -> dict[str, float]:
        """Since the engine was ready: `busy_s`, seconds in its steps, and `idle_s`, seconds without anything to do (the
        rest went into swapping weights and the like). And how many sequences were `running` and `waiting` after the
        last step. Raises EngineStopped when there will be no more steps."""
        with self._wake:
            self._check_open()
            idle_s = self._idle_s
            if self._idle_since is not None:
                idle_s += time.perf_counter() - self._idle_since
        running, waiting = self._counts
        return {"busy_s": self._busy_s, "idle_s": idle_s, "running": running, "waiting": waiting}

    async def stop(self) -> None:
        """Ends the thread after the step it is in; what is unfinished raises EngineStopped. Safe to call twice."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    # Below, `_post` runs on callers' threads and everything else on the engine's.

    def _post(self, function: Callable[[Engine], T]) -> asyncio.Future[T]:
        promise: _Promise[T] = _Promise(asyncio.get_running_loop())

        def job(engine: Engine) -> None:
            self._promises.discard(promise)
            try:
                promise.resolve(function(engine))
            except _Fatal as fatal:
                promise.fail(self._stopped(fatal.error))
                raise fatal.error from None
            except Exception as error:
                promise.fail(error)

        with self._wake:
            self._check_open()
            self._promises.add(promise)
            self._inbox.append(job)
            self._wake.notify()
        return promise.future

    def _run(self) -> None:
        """Consumes the inbox; produces finished requests; waits for the inbox when the engine has nothing to do; ends
        when stopped or when the engine raises."""
        engine: Engine | None = None
        try:
            engine = self._make_engine()
            while (jobs := self._next_jobs(engine)) is not None:
                for job in jobs:
                    job(engine)
                if engine.busy and not self._held:
                    self._step(engine)
        except BaseException as error:
            if not isinstance(error, ValueError):  # a bad setting is the caller's to report
                logger.error("the engine failed: %r", error)
            self._failure = error
        finally:
            self._end(engine)

    def _next_jobs(self, engine: Engine) -> list[Callable[[Engine], None]] | None:
        with self._wake:
            while not (self._inbox or self._stopping or (engine.busy and not self._held)):
                self._idle_since = time.perf_counter()
                self._wake.wait()
                self._idle_s += time.perf_counter() - self._idle_since
                self._idle_since = None
            if self._stopping:
                return None
            jobs = list(self._inbox)
            self._inbox.clear()
            return jobs

    def _step(self, engine: Engine) -> None:
        started = time.perf_counter()
        finished = engine.step()
        self._busy_s += time.perf_counter() - started
        self._counts = engine.counts()
        for result in finished:
            promise = self._pending.pop(result.id, None)
            if promise is not None:  # else its caller was cancelled
                promise.resolve(result)

    def _abort(self, engine: Engine, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self._pending.pop(request_id, None) is not None:
                engine.abort(request_id)

    def _end(self, engine: Engine | None) -> None:
        with self._wake:
            self._stopping = True
            self._inbox.clear()
        try:
            if engine is not None:
                engine.close()
        except Exception as error:
            logger.warning("closing the engine: %r", error)
        for promise in [*self._pending.values(), *self._promises]:
            promise.fail(self._stopped(self._failure))
        self._pending.clear()
        self._promises.clear()

    def _check_open(self) -> None:
        if self._stopping or self._failure is not None:
            raise self._stopped(self._failure)

    def _stopped(self, cause: BaseException | None) -> EngineStopped:
        """A new exception for each caller, since a traceback grows on the one that is raised."""
        if cause is None:
            return EngineStopped("the generator was shut down.")
        stopped = EngineStopped(f"the generator's engine failed and serves no more: {cause!r}")
        stopped.__cause__ = cause
        return stopped


class _Fatal(Exception):
    """Carries an exception that ends the loop."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Promise(Generic[T]):
    """A future on an event loop, settled from another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.future: asyncio.Future[T] = loop.create_future()

    def resolve(self, value: T) -> None:
        self._deliver(lambda: self.future.set_result(value))

    def fail(self, error: BaseException) -> None:
        self._deliver(lambda: self.future.set_exception(error))

    def _deliver(self, settle: Callable[[], None]) -> None:
        def unless_done() -> None:
            if not self.future.done():  # the caller may have been cancelled
                settle()

        with contextlib.suppress(RuntimeError):  # the caller's event loop was closed: nobody waits
            self._loop.call_soon_threadsafe(unless_done)
