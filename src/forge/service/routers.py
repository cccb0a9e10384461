"""Which replica gets a request. A router sees the healthy replicas and picks one; it never waits."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from forge.service.replica import Replica


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


class LoadOrder:
    """What `LeastLoaded` picks, without looking at every replica: a pick costs the same for three and for a thousand.

    Consumes word of each change of a replica's load; produces the least loaded one, among equals the one that has been
    so the longest. For replicas that stay healthy: when one dies, or comes, a new order is made.
    """

    def __init__(self, healthy: Sequence[Replica]) -> None:
        self._of_load: defaultdict[int, OrderedDict[Replica, None]] = defaultdict(OrderedDict)
        self._lowest = min(replica.in_flight for replica in healthy)
        for replica in healthy:
            self._of_load[replica.in_flight][replica] = None
            replica.on_load = self._moved

    def first(self) -> Replica:
        """The replica to use."""
        while not self._of_load[self._lowest]:
            self._lowest += 1
        return next(iter(self._of_load[self._lowest]))

    def _moved(self, replica: Replica, before: int) -> None:
        self._of_load[before].pop(replica, None)
        self._of_load[replica.in_flight][replica] = None
        self._lowest = min(self._lowest, replica.in_flight)
