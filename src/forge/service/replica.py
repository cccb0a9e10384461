"""One copy of an actor: its processes, what it is being asked, and whether it is alive."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from forge.service.errors import ActorFailed, ReplicaDied
from forge.service.wire import decode_reply, encode_call

logger = logging.getLogger(__name__)


class Mesh(Protocol):
    """The processes of one replica. Tests put another in its place where a stage is looked at alone."""

    def send(self, kind: str, payload: bytes) -> Sequence[asyncio.Future[bytes]]:
        """Sends to every rank; one future for each, in the order in which the replies arrive.

        `kind` is "start" (payload: an encoded class and its arguments), "call" (an encoded call), "watch" (answered
        when a thread or task of the process has died of an exception) or "shutdown".
        """

    async def stop(self) -> None:
        """Ends the processes, by force if they do not end by themselves."""

    def on_death(self, callback: Callable[[int, str], None]) -> None:
        """Calls `callback(rank, reason)` soon after a process ended without being told to."""


class State(enum.Enum):
    STARTING = "starting"
    HEALTHY = "healthy"
    FAILED = "failed"
    DEAD = "dead"
    STOPPED = "stopped"


_ENDED = (State.FAILED, State.DEAD, State.STOPPED)


class Replica:
    """Sends calls to one mesh and counts the unanswered ones.

    Consumes calls, produces their results, waits for the replies of the mesh, ends with `stop` or with the death of any
    of its processes: then every unanswered call fails with `ReplicaDied` at once, and later ones too. An exception that
    a method raises is an answer like any other; the replica stays healthy. One that ends a thread or task which the
    actor had started is nobody's answer: every call fails with `ActorFailed` then.
    """

    def __init__(self, mesh: Mesh, *, service: str, index: int) -> None:
        self.service = service
        self.index = index
        self.state = State.STARTING
        self.in_flight = 0
        self._mesh = mesh
        self._death: ReplicaDied | None = None
        self._failure: ActorFailed | None = None
        self._unanswered: set[asyncio.Future[bytes]] = set()
        self._listeners: list[Callable[[Replica], None]] = []
        self._failure_listeners: list[Callable[[ActorFailed], None]] = []
        self.on_load: Callable[[Replica, int], None] | None = None
        """Told of every change of `in_flight`, with what it was before."""
        mesh.on_death(self._process_died)

    @property
    def healthy(self) -> bool:
        return self.state is State.HEALTHY

    @property
    def death(self) -> ReplicaDied | None:
        """How it died, if it has."""
        return self._death

    def on_death(self, listener: Callable[[Replica], None]) -> None:
        """Calls `listener(replica)` once, when the replica has become DEAD; at once if it is."""
        self._listeners.append(listener)
        if self.state is State.DEAD:
            listener(self)

    def on_failure(self, listener: Callable[[ActorFailed], None]) -> None:
        """Calls `listener(failure)` once, when the replica has become FAILED."""
        self._failure_listeners.append(listener)

    async def start(self, spec: bytes) -> None:
        """Builds the actor on every rank. Raises what its `__init__` or `setup` raised."""
        for reply in self._mesh.send("watch", b""):
            reply.add_done_callback(self._watch_ended)
        await self._ask("start", spec)
        self.state = State.HEALTHY

    async def call(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, every_rank_answers: bool = False
    ) -> list[Any]:
        """Runs `method` on every rank; the results by rank (None for ranks above 0 unless `every_rank_answers`).

        Raises:
            ReplicaDied: a process of the replica ended before it answered.
            What the method raised on the rank that failed first; the other ranks are not waited for.
        """
        return await self._ask("call", encode_call(method, args, kwargs, every_rank_answers=every_rank_answers))

    async def stop(self, *, grace_s: float = 10.0) -> None:
        """Runs the actor's `shutdown` for at most `grace_s` seconds, then ends the processes."""
        if self.state is State.STOPPED:
            return
        if self.state is State.HEALTHY:
            try:
                await asyncio.wait_for(self._ask("shutdown", b""), grace_s)
            except Exception as error:
                logger.warning("shutdown of %s (replica %d): %r", self.service, self.index, error)
        self.state = State.STOPPED
        self._fail_unanswered()
        await self._mesh.stop()

    async def _ask(self, kind: str, payload: bytes) -> list[Any]:
        if self.state in _ENDED:
            raise self._unavailable()
        replies = self._mesh.send(kind, payload)
        self._unanswered.update(replies)
        self._count(1)
        try:
            results: list[Any] = [None] * len(replies)
            for reply in replies:
                rank, value = decode_reply(await self._answer(reply))
                results[rank] = value
            return results
        finally:
            self._count(-1)
            self._unanswered.difference_update(replies)
            for reply in replies:
                reply.cancel()  # of what is still open we only drop our interest: the method itself runs on

    def _count(self, change: int) -> None:
        before, self.in_flight = self.in_flight, self.in_flight + change
        if self.on_load is not None:
            self.on_load(self, before)

    async def _answer(self, reply: asyncio.Future[bytes]) -> bytes:
        try:
            return await reply
        except (ReplicaDied, ActorFailed):
            raise
        except Exception as error:  # not an answer: the transport gave up, which is how other hosts' deaths show
            self._process_died(None, str(error))
            raise self._unavailable() from error

    def _watch_ended(self, reply: asyncio.Future[bytes]) -> None:
        if reply.cancelled() or reply.exception() or self.state in _ENDED:  # a death is heard of in other ways
            return
        try:
            decode_reply(reply.result())
        except Exception as failure:
            self.state = State.FAILED
            self._failure = ActorFailed(f"{self.service} (replica {self.index}): {failure}")
            self._failure.__cause__ = failure.__cause__
            self._fail_unanswered()
            for listener in self._failure_listeners:
                listener(self._failure)

    def _process_died(self, rank: int | None, reason: str) -> None:
        if self.state in _ENDED:
            return
        self.state = State.DEAD
        which = "a process" if rank is None else f"the process of rank {rank}"
        self._death = ReplicaDied(
            f"{self.service} (replica {self.index}): {which} died. {reason}",
            service=self.service,
            replica=self.index,
            rank=rank,
        )
        self._fail_unanswered()
        for listener in self._listeners:
            listener(self)

    def _fail_unanswered(self) -> None:
        for reply in self._unanswered:
            if not reply.done():
                reply.set_exception(self._unavailable())
        self._unanswered.clear()

    def _unavailable(self) -> ReplicaDied | ActorFailed:
        """A new exception each time: one that is shared would collect the tracebacks of all who raise it."""
        if self._failure is not None:
            failed = ActorFailed(str(self._failure))
            failed.__cause__ = self._failure.__cause__
            return failed
        if self._death is not None:
            e = self._death
            return ReplicaDied(str(e), service=e.service, replica=e.replica, rank=e.rank)
        return ReplicaDied(
            f"{self.service} (replica {self.index}) was stopped before it answered.",
            service=self.service,
            replica=self.index,
        )
