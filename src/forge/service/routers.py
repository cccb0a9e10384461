"""Which replica gets a request. A router sees the healthy replicas and picks one; it never waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class HasLoad(Protocol):
    """What a router may look at: `index` (0-based) and `in_flight` (requests sent and not yet answered)."""

    @property
    def index(self) -> int: ...

    @property
    def in_flight(self) -> int: ...


R = TypeVar("R", bound=HasLoad)


class Router(Protocol):
    """Consumes the healthy replicas (at least one), produces the one to use."""

    def pick(self, healthy: Sequence[R]) -> R: ...


class RoundRobin:
    """Each in turn, by index; a replica that died is skipped without disturbing the order of the others.

    Three replicas: 0, 1, 2, 0, ... and 0, 2, 0, 2 while replica 1 is dead.
    """

    def __init__(self) -> None:
        self._last = -1

    def pick(self, healthy: Sequence[R]) -> R:
        chosen = min(healthy, key=lambda replica: (replica.index <= self._last, replica.index))
        self._last = chosen.index
        return chosen


class LeastLoaded:
    """The replica with the fewest requests in flight; among equals, each in turn.

    Loads 3, 1, 2 give replica 1. All idle: 0, 1, 2, 0, ..., so that a slow trickle does not always hit replica 0.
    """

    def __init__(self) -> None:
        self._ties = RoundRobin()

    def pick(self, healthy: Sequence[R]) -> R:
        lowest = min(replica.in_flight for replica in healthy)
        return self._ties.pick([replica for replica in healthy if replica.in_flight == lowest])
