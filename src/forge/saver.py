"""Saving a trainer's checkpoints while it trains, and going back to the last one when the trainer dies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from forge.app import Run, Stopped
from forge.service import ActorHandle, ReplicaDied
from forge.types import UserError


class Saver:
    """Writes checkpoints of one trainer, one at a time, beside the training.

    A step is held up while the trainer copies its state to main memory; writing, flushing and naming go on beside the
    next steps. A failure ends the task group that `save` was given, and so the run.

    Example:
        >>> saver = Saver(run, parts.trainer)
        >>> await saver.check_room()                                 # before the first step
        >>> await saver.save(10, {"step": 10, ...}, tasks)           # returns after the copy
        >>> await saver.finished()                                   # checkpoints/step-10 is there
    """

    def __init__(self, run: Run[Any], trainer: ActorHandle) -> None:
        self._run = run
        self._trainer = trainer
        self._writing: asyncio.Task[None] | None = None
        self._needed = 0
        self.saved_step: int | None = run.start_step if run.resume_from else None
        """The newest step that is saved, or being saved."""

    async def check_room(self) -> None:
        """Learns how large a checkpoint is, and whether there is room for one.

        Raises:
            DiskFull: there is not.
        """
        self._needed = await self._trainer.checkpoint_bytes.call()
        self._run.checkpoints.check_room(self._needed)

    async def save(self, step: int, state: Any, tasks: asyncio.TaskGroup, *, best: int | None = None) -> None:
        """Begins the checkpoint of `step`, whose weights the trainer has now; waits for the last one before.

        Args:
            state: the controller's part (`forge.checkpoint.Checkpoints.commit`); it must not change any more.
            tasks: where the writing runs.
            best: the step of the best checkpoint so far, which is kept beside the latest.

        Raises:
            DiskFull: there is no room.
        """
        await self.finished()
        with self._run.metrics.timer("time/checkpoint"):
            partial = await asyncio.to_thread(self._run.checkpoints.begin, step, needed=self._needed)
            await self._trainer.save.call(str(partial))
        self.saved_step = step
        self._writing = tasks.create_task(self._write(step, state, best))

    async def finished(self) -> None:
        """Waits until the last checkpoint has its name."""
        if self._writing is not None:
            await self._writing

    async def _write(self, step: int, state: Any, best: int | None) -> None:
        checkpoints = self._run.checkpoints
        try:
            await self._trainer.save_finished.call()
            await asyncio.to_thread(self._run.flush_to_disk)
            await asyncio.to_thread(checkpoints.commit, step, state=state, best=best)
        except Exception as error:
            raise checkpoints.abandon(step, error, needed=self._needed) from error


async def with_trainer_restarts(run: Run[Any], trainer: ActorHandle, attempt: Callable[[], Awaitable[None]]) -> None:
    """Runs `attempt`, and once more whenever the trainer died in it: all its ranks are started again, and the run goes
    back to its last intact checkpoint, or to the start where there is none.

    Args:
        attempt: everything from `run.resume_from` to the end; it must build its own state anew.

    Raises:
        TooManyRestarts: the trainer died more often than `restarts` allows.
        What `attempt` raised, if it was not the trainer's death.
    """
    while True:
        try:
            return await attempt()
        except (ReplicaDied, BaseExceptionGroup) as error:
            if not _is_death_of(trainer, error):
                raise
        run.raise_if_stopped()
        run.console.phase("restarting the trainer")
        await run.unless_stopped(trainer.restart())
        await asyncio.to_thread(run.go_back)


def _is_death_of(trainer: ActorHandle, error: BaseException) -> bool:
    """Whether the trainer's death is in what was raised, and no other reason to end."""
    leaves = list(_leaves(error))
    if any(isinstance(leaf, Stopped | UserError) for leaf in leaves):
        return False
    return any(isinstance(leaf, ReplicaDied) and leaf.service == trainer.name for leaf in leaves)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
