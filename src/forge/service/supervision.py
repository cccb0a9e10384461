"""What becomes of a replica that died: another in its place, as often as the limit allows, with growing pauses.

starter = Starter(options, init_kwargs, provisioner)
replica = await starter.start(0)
...                                       # it dies
replica = await starter.replace(replica)
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from forge.config import RestartsConfig
from forge.service.errors import ReplicaDied, TooManyRestarts
from forge.service.replica import Mesh, Replica

LONGEST_BACKOFF_S = 60.0

Prepare = Callable[[Replica], Awaitable[None]]
"""What a new replica goes through before it is handed out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """A replica died, and what was done about it."""

    service: str
    replica: int
    cause: str
    seconds: float | None = None
    """From the death until the replacement was ready; None: it is being started."""

    def __str__(self) -> str:
        if self.seconds is None:
            return f"{self.cause} A replacement is being started."
        return f"{self.service} (replica {self.replica}) is back after {self.seconds:.1f} s."


class Restarts:
    """The restarts of one service, counted against their limit.

    Example, with max 2, window_s 600 and backoff_s 1:
        >>> restarts.next_delay(died), restarts.next_delay(died)
        (0.0, 1.0)
        >>> restarts.next_delay(died)     # within ten minutes of the first
        TooManyRestarts: generator was restarted 2 times in 600 s, as often as restarts.max = 2 allows. ...
    """

    def __init__(self, service: str, limits: RestartsConfig, *, now: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._service = service
        self._limits = limits
        self._now = now
        self._recent: deque[float] = deque()

    def next_delay(self, death: ReplicaDied) -> float:
        """Counts one restart and says how many seconds to wait before it: none before the first one within the window,
        `backoff_s` before the second, and twice as long each time.

        Raises:
            TooManyRestarts: the limit is reached; `death` is its cause.
        """
        now, limits = self._now(), self._limits
        while self._recent and now - self._recent[0] > limits.window_s:
            self._recent.popleft()
        if len(self._recent) >= limits.max:
            raise TooManyRestarts(
                f"{self._service} was restarted {len(self._recent)} times in {limits.window_s:g} s, as often as "
                f"restarts.max = {limits.max} allows. {death}"
            ) from death
        earlier = len(self._recent)
        self._recent.append(now)
        self.count += 1
        return min(limits.backoff_s * 2.0 ** (earlier - 1), LONGEST_BACKOFF_S) if earlier else 0.0


class Starter:
    """Starts the replicas of one actor, and others in the place of those that died.

    Args:
        service: its name, for messages.
        spec: the encoded class and its arguments.
        new_mesh: starts the processes of one replica, given its number.
        limits: how often.
        on_incident: told of each death, and of each replacement that is ready.
        on_failure: told when there will be no replacement: the run has to end.
    """

    def __init__(
        self,
        service: str,
        spec: bytes,
        new_mesh: Callable[[int], Awaitable[Mesh]],
        *,
        limits: RestartsConfig,
        on_incident: Callable[[Incident], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.supervised = limits.max > 0
        self.restarts = Restarts(service, limits)
        self.fail = on_failure
        self._service = service
        self._spec = spec
        self._new_mesh = new_mesh
        self._on_incident = on_incident

    async def start(self, index: int) -> Replica:
        """A new replica, ready; another attempt is made if one of its processes dies meanwhile.

        Raises:
            TooManyRestarts: the limit is reached.
            What the actor's `__init__` or `setup` raised; nothing is left running then.
        """
        began = time.monotonic()
        try:
            return await self._start_once(index, None)
        except ReplicaDied as death:
            if not self.supervised:
                raise
            return await self._start_another(index, death, began=began)

    async def replace(self, old: Replica, prepare: Prepare | None = None) -> Replica:
        """Ends what is left of `old` and starts another replica of the same number.

        Args:
            old: dead, or to be given up.
            prepare: awaited with the new replica before it is handed out.

        Raises:
            as `start` does, and what `prepare` raised.
        """
        began = time.monotonic()
        death = old.death or ReplicaDied(f"{old.service} (replica {old.index}) is restarted.", service=old.service)
        return await self._start_another(old.index, death, began=began, old=old, prepare=prepare)

    async def _start_another(
        self,
        index: int,
        death: ReplicaDied,
        *,
        began: float,
        old: Replica | None = None,
        prepare: Prepare | None = None,
    ) -> Replica:
        while True:
            delay = self.restarts.next_delay(death)
            self._tell(index, death)
            if old is not None:
                await old.stop()
            await asyncio.sleep(delay)
            try:
                replica = await self._start_once(index, prepare)
            except ReplicaDied as again:
                death = again
                continue
            self._tell(index, death, seconds=time.monotonic() - began)
            return replica

    async def _start_once(self, index: int, prepare: Prepare | None) -> Replica:
        replica = Replica(await self._new_mesh(index), service=self._service, index=index)
        replica.on_failure(self.fail)
        try:
            await replica.start(self._spec)
            if prepare is not None:
                await prepare(replica)
        except BaseException:
            await replica.stop()
            raise
        return replica

    def _tell(self, index: int, death: ReplicaDied, *, seconds: float | None = None) -> None:
        cause = str(death).partition(" From ")[0]  # without the log's last lines
        self._on_incident(Incident(service=self._service, replica=index, cause=cause, seconds=seconds))
