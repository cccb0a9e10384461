"""A small recorder: scalars are added during a step, and become one dict when it ends."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import SupportsFloat

from forge.observability.catalogue import Kind, UnknownMetric, describe


class _Series:
    """The values of one name within one step."""

    __slots__ = ("kind", "last", "maximum", "total", "weight")

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.total = 0.0
        self.weight = 0.0
        self.maximum = -math.inf
        self.last = math.nan

    def add(self, value: float, weight: float) -> None:
        self.total += value * weight
        self.weight += weight
        self.last = value
        # max() would keep whichever came first when one is NaN.
        self.maximum = value if math.isnan(value) or value > self.maximum else self.maximum

    def result(self) -> float:
        if self.kind == "mean":
            return self.total / self.weight if self.weight else math.nan
        return {"sum": self.total, "max": self.maximum, "last": self.last}[self.kind]


class Metrics:
    """Collects the scalars of a step. May be used from several threads and tasks.

    The catalogue says how the values of one name become one (mean, sum, max or last), unless `kind` does.

    Example:
        >>> metrics = Metrics()
        >>> metrics.add("reward/mean", 0.0); metrics.add("reward/mean", 1.0, weight=3.0)
        >>> metrics.add("groups/zero_variance", 1); metrics.add("groups/zero_variance", 1)
        >>> metrics.flush(7)
        {'step': 7.0, 'reward/mean': 0.75, 'groups/zero_variance': 2.0}
    """

    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}
        self._lock = threading.Lock()

    def add(self, name: str, value: SupportsFloat, *, weight: float = 1.0, kind: Kind | None = None) -> None:
        """Records one value.

        Args:
            name: one of the catalogue; another one, as a user's loss may have, is averaged.
            value: a number, or a tensor with one element.
            weight: how much it counts in a mean, such as the number of tokens it is itself a mean of.
            kind: overrides the catalogue's; the first call for a name within a step decides.
        """
        number = float(value)
        with self._lock:
            series = self._series.get(name)
            if series is None:
                series = self._series[name] = _Series(kind or _kind(name))
            series.add(number, weight if series.kind == "mean" else 1.0)

    def update(self, values: Mapping[str, SupportsFloat]) -> None:
        """Records several values, such as what a trainer's step measured."""
        for name, value in values.items():
            self.add(name, value)

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Adds the seconds that the block takes, also when it raises: `with metrics.timer("time/train"): ...`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def flush(self, step: int) -> dict[str, float]:
        """The step's metrics, `step` first; the recorder is empty afterwards."""
        with self._lock:
            series, self._series = self._series, {}
        return {"step": float(step), **{name: s.result() for name, s in series.items()}}


def _kind(name: str) -> Kind:
    try:
        return describe(name).kind
    except UnknownMetric:
        return "mean"
