"""Saving beside the training, and going back when the trainer dies; with a stand-in for the trainer."""

import asyncio
import json
import types

import pytest

from forge.app import Stopped
from forge.checkpoint import Checkpoints, DiskFull
from forge.observability.metrics import Metrics
from forge.saver import Saver, with_trainer_restarts
from forge.service import ReplicaDied


def run_in(folder, **more):
    notes = []
    run = types.SimpleNamespace(
        checkpoints=Checkpoints(folder, keep_latest_k=2),
        metrics=Metrics(),
        resume_from=None,
        start_step=0,
        flush_to_disk=lambda: None,
        raise_if_stopped=lambda: None,
        console=types.SimpleNamespace(warn=notes.append, phase=notes.append),
        notes=notes,
    )
    run.__dict__.update(more)
    return run


class Endpoint:
    def __init__(self, function):
        self.call = function


class Trainer:
    """Copies at once, writes until it is told to end."""

    name = "trainer"

    def __init__(self, nbytes=100):
        self.may_finish = asyncio.Event()
        self.error = None
        self.folders = []
        self.restarts = 0
        self.save, self.save_finished = Endpoint(self._save), Endpoint(self._finished)
        self.checkpoint_bytes = Endpoint(lambda: asyncio.sleep(0, nbytes))

    async def _save(self, folder):
        self.folders.append(folder)

    async def _finished(self):
        await self.may_finish.wait()
        if self.error:
            raise self.error

    async def restart(self):
        self.restarts += 1


def within(seconds, coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


def test_saving_returns_after_the_copy_and_the_checkpoint_has_its_name_after_the_writing(tmp_path):
    async def scenario():
        run, trainer = run_in(tmp_path), Trainer()
        saver = Saver(run, trainer)
        async with asyncio.TaskGroup() as tasks:
            await saver.save(4, {"step": 4}, tasks)
            assert [p.name for p in tmp_path.iterdir()] == ["step-4.partial"]
            trainer.may_finish.set()
            await saver.finished()
        assert json.loads((tmp_path / "step-4" / "state.json").read_text()) == {"step": 4}

    within(5, scenario())


def test_the_next_save_waits_for_the_one_before(tmp_path):
    async def scenario():
        run, trainer = run_in(tmp_path), Trainer()
        saver = Saver(run, trainer)
        async with asyncio.TaskGroup() as tasks:
            await saver.save(4, {"step": 4}, tasks)
            second = asyncio.create_task(saver.save(5, {"step": 5}, tasks))
            await asyncio.sleep(0.05)
            assert len(trainer.folders) == 1
            trainer.may_finish.set()
            await second
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step-4", "step-5"]

    within(5, scenario())


def test_a_failure_of_the_writing_ends_the_training_that_goes_on_beside_it(tmp_path):
    async def scenario():
        run, trainer = run_in(tmp_path), Trainer()
        trainer.error = OSError(28, "No space left on device")
        trainer.may_finish.set()
        saver = Saver(run, trainer)
        async with asyncio.TaskGroup() as tasks:
            await saver.save(4, {"step": 4}, tasks)
            await asyncio.sleep(60)  # the training

    with pytest.raises(ExceptionGroup) as failed:
        within(5, scenario())
    assert isinstance(failed.value.exceptions[0], DiskFull)
    assert list(tmp_path.iterdir()) == []  # the half-written one takes no room


def test_room_for_a_checkpoint_is_looked_for_before_the_first_step(tmp_path):
    async def scenario():
        with pytest.raises(DiskFull):
            await Saver(run_in(tmp_path), Trainer(nbytes=10**18)).check_room()

    within(5, scenario())


def died(service):
    return ReplicaDied(f"{service} died", service=service)


@pytest.mark.parametrize("wrapped", [False, True])
def test_after_the_trainers_death_it_is_restarted_and_the_run_goes_back(tmp_path, wrapped):
    async def scenario():
        trainer, attempts, gone_back = Trainer(), [], []

        async def attempt():
            attempts.append(len(gone_back))
            if len(attempts) < 3:
                error = died("trainer")
                raise ExceptionGroup("tasks", [ExceptionGroup("inner", [error])]) if wrapped else error

        run = run_in(tmp_path, go_back=lambda: gone_back.append(True))
        run.unless_stopped = lambda work: work
        await with_trainer_restarts(run, trainer, attempt)
        assert (attempts, trainer.restarts) == ([0, 1, 2], 2)

    within(5, scenario())


@pytest.mark.parametrize(
    "error",
    [died("generator"), ValueError("a bug"), ExceptionGroup("tasks", [died("trainer"), Stopped(15)])],
)
def test_nothing_else_is_a_reason_to_restart_the_trainer(tmp_path, error):
    async def scenario():
        trainer = Trainer()

        async def attempt():
            raise error

        with pytest.raises(type(error)):
            await with_trainer_restarts(run_in(tmp_path), trainer, attempt)
        assert trainer.restarts == 0

    within(5, scenario())
