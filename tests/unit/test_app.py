"""What a stopped run still waits for. The clock is the real one, with limits of fractions of a second."""

import asyncio
import gc
import signal
import types

import pytest

import forge.app
from forge.app import Dropped, Run, Stopped, launch
from forge.config import GRPOConfig
from forge.service.unseen import unseen_failures


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(forge.app, "STEP_SECONDS", 0.2)
    monkeypatch.setattr(forge.app, "SAVE_SECONDS", 0.3)
    monkeypatch.setattr(forge.app, "STOP_SECONDS", 1e6)  # it would end the tests
    made = Run.__new__(Run)
    made._signal, made._signalled_at = None, 0.0
    made.said = []
    made.console = types.SimpleNamespace(note=made.said.append, warn=made.said.append)
    return made


def within(seconds, coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


def stop_soon(run, number=signal.SIGTERM):
    asyncio.get_running_loop().call_later(0.02, run._on_signal, number)


def test_a_step_that_ends_in_time_counts(run):
    async def scenario():
        stop_soon(run)
        assert await run.finish_or_drop(asyncio.sleep(0.1, "done")) == "done"
        with pytest.raises(Stopped) as stopped:
            run.raise_if_stopped()
        assert stopped.value.exit_status == 143

    within(5, scenario())


def test_a_step_that_does_not_is_dropped(run):
    async def scenario():
        stop_soon(run)
        with pytest.raises(Dropped):
            await run.finish_or_drop(asyncio.sleep(60))

    within(2, scenario())


def test_a_wait_is_broken_off_at_once(run):
    async def scenario():
        stop_soon(run, signal.SIGINT)
        with pytest.raises(Stopped) as stopped:
            await run.unless_stopped(asyncio.sleep(60))
        assert stopped.value.exit_status == 130

    within(2, scenario())


@pytest.mark.parametrize("wait", ["unless_stopped", "finish_or_drop"])
def test_work_that_fails_in_the_moment_in_which_its_waiter_is_cancelled_is_not_an_unseen_failure(run, wait):
    """As when the trainer's death ends the step and the weight sync beside it: the sync's end cancels the step's."""
    unseen = []

    async def training():
        died = asyncio.Event()

        async def sync():
            await died.wait()
            raise LookupError("the sync's")

        async def step():
            await died.wait()
            raise LookupError("the step's")

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(sync())
                await asyncio.sleep(0)  # it waits first, so it hears first
                asyncio.get_running_loop().call_later(0.02, died.set)
                await getattr(run, wait)(step())
        except ExceptionGroup as group:
            return [str(error) for error in group.exceptions]

    async def scenario():
        with unseen_failures(unseen.append):
            assert await training() == ["the sync's"]  # so the step's waiter was cancelled
            await asyncio.sleep(0)  # the loop lets go of the step
            gc.collect()

    within(2, scenario())
    assert unseen == []


def test_a_checkpoint_that_takes_too_long_is_given_up(run):
    async def scenario():
        run._on_signal(signal.SIGUSR1)
        await run.last_checkpoint(asyncio.sleep(60))
        assert "no time to write a checkpoint" in run.said[-1]

    within(2, scenario())


def leave(status):
    raise SystemExit(status)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)])
def test_a_second_signal_ends_it_at_once(run, monkeypatch, number, status):
    async def scenario():
        monkeypatch.setattr("forge.app.os._exit", leave)
        run._on_signal(signal.SIGTERM)
        with pytest.raises(SystemExit) as left:
            run._on_signal(number)
        assert left.value.code == status

    within(2, scenario())


def test_what_holds_the_run_up_is_ended_by_force(run, monkeypatch):
    async def scenario():
        ended = []
        monkeypatch.setattr(forge.app, "STOP_SECONDS", 0.05)
        monkeypatch.setattr("forge.app.os._exit", ended.append)
        run._on_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        assert ended == [143]

    within(2, scenario())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_launch_leaves_the_signals_of_the_process_as_they_were(monkeypatch, number):
    before = signal.getsignal(number)
    monkeypatch.setattr("sys.argv", ["main", "--help"])
    with pytest.raises(SystemExit):
        launch("grpo", GRPOConfig, None, None)
    assert signal.getsignal(number) is before
