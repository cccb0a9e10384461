"""A run that is broken and started again by the same command is the run that was never broken, bit for bit.

Strictly on-policy (training.max_staleness: 0), with real processes on the CPU. The evaluations and checkpoints of the
interrupted run fall on other moments of its life than those of the uninterrupted one, and must leave no trace.
"""

from __future__ import annotations

import random
import signal

import pytest

from tests.reliability.runs import curve, evaluations, ledger, newest, starting

SYNC = (
    "--training.max_staleness", "0", "--training.steps", "12", "--checkpoint.interval", "3",
    "--eval.samples", "8", "--eval.interval", "4",
)  # fmt: skip


pytestmark = pytest.mark.timeout(900)  # several starts; 10 s each on an idle machine, a minute on a crowded one


@pytest.fixture(scope="module")
def start():
    """Starts runs, and ends what a failed test leaves."""
    with starting() as start_one:
        yield start_one


@pytest.fixture(scope="module")
def uninterrupted(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    start(folder, *SYNC).finish()
    assert [row[0] for row in curve(folder)] == list(range(1, 13))
    return folder


def assert_same(folder, whole) -> None:
    assert curve(folder) == curve(whole)
    assert evaluations(folder) == evaluations(whole)
    assert ledger(folder) == ledger(whole)


def test_kills_of_the_controller_and_a_preemption_leave_no_trace(start, uninterrupted, tmp_path):
    """SIGKILL while a checkpoint is written, SIGUSR1, as SLURM sends it, at a random step, SIGKILL while it starts."""
    folder = tmp_path / "run"
    first = start(folder, *SYNC)
    first.until_saving(after=3)
    first.kill()
    assert newest(folder) == 3  # step 6 was not there yet

    second = start(folder, *SYNC)
    second.until_step(random.Random(7).randrange(7, 11))
    assert second.stop(signal.SIGUSR1) == 143
    assert newest(folder) == curve(folder)[-1][0]  # it wrote a checkpoint of its last step
    assert "Traceback" not in second.output

    third = start(folder, *SYNC)
    third.child("generator/0")
    third.kill()

    last = start(folder, *SYNC)
    last.finish()
    assert_same(folder, uninterrupted)


def test_a_killed_trainer_goes_back_to_the_last_checkpoint_and_leaves_no_trace(start, uninterrupted, tmp_path):
    """The generator is the same process before and after."""
    folder = tmp_path / "run"
    app = start(folder, *SYNC)
    generator = app.child("generator/0")
    app.until_step(5)  # the last checkpoint is of step 3
    app.child("trainer/0").kill()
    app.until_step(12)
    generator_stayed = generator.is_running()
    app.finish()
    assert "trainer (replica 0): the process of rank 0 died" in app.output
    assert generator_stayed
    assert_same(folder, uninterrupted)
