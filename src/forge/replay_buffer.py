"""Groups wait here between the rollouts and the trainer; how old they may get is bounded by construction.

Groups are numbered in the order in which they start. With P groups to a step and weights of version v at the
generators (versions count optimizer steps), a group may start while fewer than (v + S + 1)·P have been started. Taken
oldest first, group k is trained in step k // P, so that its weights are at most S steps old when it is trained.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from forge.types import Group


class ReplayBuffer:
    """A bounded, ordered meeting point of one rollout loop and one training loop.

    Args:
        groups_per_step: P, the groups that one optimizer step takes.
        max_staleness: S, in optimizer steps; 0 is strictly on-policy.
        steps: the optimizer steps of the whole run; no group is started that no step will take.
        first_step: the step that a resumed run goes on with.
        window: how many unfinished groups may be overtaken by finished ones in one step (default P). A group is
            overtaken only where everything left behind can still be trained in time: looking ahead never wastes data.

    Example:
        >>> buffer = ReplayBuffer(groups_per_step=2, max_staleness=0, steps=10)
        >>> group_id = await buffer.admit()      # a rollout starts
        >>> buffer.add(group)                    # ... and has finished
        >>> groups = await buffer.take(step=0)   # waits for two
        >>> buffer.advance(version=1)            # the generators have new weights: two more may start
    """

    def __init__(
        self, *, groups_per_step: int, max_staleness: int, steps: int, first_step: int = 0, window: int | None = None
    ) -> None:
        self._per_step = groups_per_step
        self._max_staleness = max_staleness
        self._steps = steps
        self._window = groups_per_step if window is None else window
        self._version = first_step
        self._started = first_step * groups_per_step  # minus those that were discarded: they do not count
        self._next_id = self._started
        self._running: set[int] = set()
        self._started_at: dict[int, int] = {}  # running or finished group → version of the weights when it started
        self._finished: dict[int, Group] = {}
        # Kept up to date with every group, so that whether a step is ready costs the same however many groups wait:
        self._running_since: Counter[int] = Counter()  # version → running groups that started at it
        self._head = self._next_id  # no running group is older
        self._ahead = 0  # finished groups that are older than that
        self._taking: int | None = None  # the step that `take` waits for
        self._changed = asyncio.Condition()
        self._end: Exception | None = None
        self.discarded = 0
        self.stale: list[Group] = []
        """Groups that got too old to be trained, for whoever keeps the books to take away."""

    def __len__(self) -> int:
        """Finished groups that no step has taken yet."""
        return len(self._finished)

    @property
    def running(self) -> int:
        """Groups that have started and not finished."""
        return len(self._running)

    def _may_start(self) -> bool:
        limit = min(self._version + self._max_staleness + 1, self._steps) * self._per_step
        return self._started < limit and self._end is None

    async def admit(self) -> int:
        """Waits for a free place and returns the id of the group that may start now."""
        async with self._changed:
            await self._changed.wait_for(self._may_start)
            return self._start()

    async def admit_wave(self) -> list[int]:
        """Waits until every group has finished and there are free places, and fills all of them at once."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._running and self._may_start())
            wave = []
            while self._may_start():
                wave.append(self._start())
            return wave

    def _start(self) -> int:
        group_id = self._next_id
        self._next_id += 1
        self._started += 1
        self._running.add(group_id)
        self._running_since[self._version] += 1
        self._started_at[group_id] = self._version
        return group_id

    async def add(self, group: Group) -> None:
        """Takes a finished group in."""
        async with self._changed:
            self._leave_running(group.id)
            self._finished[group.id] = group
            self._advance_head()
            if self._taking is not None and self._too_old(group, self._taking):
                self._give_up(group.id)
                self.stale.append(group)
            self._changed.notify_all()

    async def discard(self, *group_ids: int) -> None:
        """Gives groups up that will not be trained, running, finished or taken; as many others may start."""
        async with self._changed:
            for group_id in group_ids:
                self._give_up(group_id)
            self._changed.notify_all()

    def _give_up(self, group_id: int) -> None:
        if group_id in self._running:
            self._leave_running(group_id)
            self._advance_head()
        self._pop_finished(group_id)
        self._started_at.pop(group_id, None)
        self._started -= 1
        self.discarded += 1

    def _leave_running(self, group_id: int) -> None:
        self._running.remove(group_id)
        self._running_since[self._started_at[group_id]] -= 1

    def _pop_finished(self, group_id: int) -> Group | None:
        group = self._finished.pop(group_id, None)
        self._ahead -= group is not None and group_id < self._head
        return group

    def _advance_head(self) -> None:
        while self._head < self._next_id and self._head not in self._running:
            self._ahead += self._head in self._finished
            self._head += 1

    async def end(self, reason: Exception) -> None:
        """Nothing starts any more, and every `take` raises `reason`: the rollouts found no point in going on."""
        async with self._changed:
            self._end = self._end or reason  # the first reason is the one to tell
            self._changed.notify_all()

    async def advance(self, version: int) -> None:
        """Says which weights the generators have now."""
        async with self._changed:
            self._version = version
            self._changed.notify_all()

    async def take(self, step: int) -> list[Group]:
        """Waits for P groups, oldest first, none older than S steps when trained in optimizer step `step`."""
        async with self._changed:
            self._taking = step
            self._drop_stale(step)
            ids: list[int] | None = None
            while self._end is None and (ids := self._ready(step)) is None:
                await self._changed.wait()
            self._taking = None
            if self._end is not None:
                raise self._end
            # The groups stay counted as started: they make room when `advance` says that their step was published.
            for i in ids or []:
                del self._started_at[i]
            return [group for i in ids or [] if (group := self._pop_finished(i)) is not None]

    def _ready(self, step: int) -> list[int] | None:
        """The ids that `take` would return now, or None while it has to wait."""
        if len(self._finished) < self._per_step:
            return None
        if self._ahead < self._per_step and self._must_wait_for(step):
            return None
        waiting = sorted([*self._running, *self._finished])
        chosen = [i for i in waiting if i in self._finished][: self._per_step]
        if len(chosen) < self._per_step:
            return None
        overtaken = sum(i < chosen[-1] for i in self._running)
        if overtaken > self._window:
            return None
        taken = set(chosen)
        left = [i for i in waiting if i not in taken]
        # With P taken at every step from the next one on, is each of those left behind still taken in time?
        in_time = all(
            step + 1 + place // self._per_step - self._started_at[i] <= self._max_staleness
            for place, i in enumerate(left)
        )
        return chosen if in_time or overtaken == 0 else None

    def _must_wait_for(self, step: int) -> int:
        """Running groups that would be too old in any step after this one."""
        last = step - self._max_staleness
        return sum(count for version, count in self._running_since.items() if version <= last)

    def _too_old(self, group: Group, step: int) -> bool:
        return step - group.policy_version > self._max_staleness

    def _drop_stale(self, step: int) -> None:
        old = [g for g in self._finished.values() if self._too_old(g, step)]
        for group in old:
            self._give_up(group.id)
        if old:
            self.stale += old
            self._changed.notify_all()

    @property
    def finished(self) -> list[Group]:
        """Groups that wait to be trained."""
        return list(self._finished.values())

    @property
    def next_id(self) -> int:
        """The id of the group that starts next."""
        return self._next_id

    def load(self, *, finished: list[Group], running: list[int], next_id: int) -> None:
        """Goes on from where another buffer stood; `running` are the groups that have to be started once more."""
        self._finished = {g.id: g for g in finished}
        self._running = set(running)
        self._started_at = dict.fromkeys([*self._finished, *running], self._version)
        self._started_at |= {i: g.policy_version for i, g in self._finished.items()}
        self._running_since = Counter(self._started_at[i] for i in running)
        self._next_id = next_id
        self._head, self._ahead = min([*self._finished, *running], default=self._next_id), 0
        self._advance_head()
        self._started += len(self._finished) + len(running)
