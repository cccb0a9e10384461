"""Two runs at once do not meet; and a thread that dies, wherever it is, ends its run in ten seconds with the cause."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import psutil
import pytest

from forge.provisioner import Provisioner
from forge.service import ActorFailed, ForgeActor
from forge.testing import toy_reward
from forge.weights import WeightStore, WeightStoreError

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a child cannot import this file by its name

ROOT = Path(__file__).parents[2]

# Python runs it at the start of every process that finds it: here in those of a run, where it breaks vLLM's engine.
SITECUSTOMIZE = """
import os, sys, threading, time

def break_the_engine():
    while "forge.actors.vllm_engine" not in sys.modules:
        time.sleep(0.1)
    engine = sys.modules["forge.actors.vllm_engine"]
    while not hasattr(engine, "VllmEngine"):
        time.sleep(0.1)
    whole, calls = engine.VllmEngine.step, []

    def step(self):
        calls.append(1)
        if len(calls) > 20:
            open(os.environ["FAULT_TOLD"], "a").close()
            raise FloatingPointError("the engine is broken on purpose")
        return whole(self)

    engine.VllmEngine.step = step

if os.environ.get("FORGE_PROC_NAME", "").startswith("generator"):
    threading.Thread(target=break_the_engine, daemon=True).start()
"""


def reward_with_a_thread(prompt: str, response: str, target: str) -> float:
    """A reward that has a thread of its own, which fails."""

    def work():
        Path(os.environ["FAULT_TOLD"]).touch()
        raise LookupError("the reward's own thread is broken on purpose")

    if threading.active_count() and not getattr(reward_with_a_thread, "started", False):
        reward_with_a_thread.started = True
        threading.Timer(1.0, work).start()
    return toy_reward(prompt, response, target)


class Careless(ForgeActor):
    async def lose_a_task(self):
        async def work():
            raise LookupError("nobody awaits me")

        asyncio.ensure_future(work())  # noqa: RUF006 - that is what is tested

    def lose_a_thread(self):
        threading.Thread(target=lambda: 1 / 0, name="helper").start()

    async def wait(self):
        await asyncio.sleep(600)


def start(folder: Path, *overrides: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "apps.grpo.main", "--config", "apps/grpo/toy.yaml", "--output_dir", str(folder)]
    return subprocess.Popen(
        [*command, "--eval.samples", "0", *overrides],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def listening(run: subprocess.Popen[str]) -> set[str]:
    """The addresses at which a run's processes can be reached, Monarch's and vLLM's own among them."""
    found = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                sockets = process.net_connections(kind="inet")
                found |= {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}
    return found


def test_two_runs_at_once_both_finish_and_are_reached_over_loopback_only(tmp_path):
    runs = [start(tmp_path / name, "--training.steps", "3") for name in ("a", "b")]
    metrics = [tmp_path / name / "metrics.jsonl" for name in ("a", "b")]
    reached: set[str] = set()
    while any(run.poll() is None for run in runs) and not all(p.exists() and p.stat().st_size for p in metrics):
        reached = reached.union(*map(listening, runs))
        time.sleep(0.5)
    for path, run in zip(metrics, runs, strict=True):
        out, _ = run.communicate(timeout=200)
        assert run.returncode == 0, out[-3000:]
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    assert reached == {"127.0.0.1"}


@pytest.fixture(scope="module")
def broken_runs(tmp_path_factory):
    """Two runs, each with a thread that dies in one of its processes."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    path = os.pathsep.join([str(folder), *(p for p in sys.path if p)])
    runs = {
        "engine": start(folder / "engine", PYTHONPATH=path, FAULT_TOLD=str(folder / "engine-told")),
        "reward": start(
            folder / "reward", "--rewards", "[tests.reliability.test_fail_fast.reward_with_a_thread]",
            "--training.steps", "100000", FAULT_TOLD=str(folder / "reward-told"),
        ),
    }  # fmt: skip
    ended = {}
    try:
        deadline = time.time() + 200
        while len(ended) < 2 and time.time() < deadline:
            ended |= {name: time.time() for name, run in runs.items() if name not in ended and run.poll() is not None}
            time.sleep(0.05)
    finally:
        for run in runs.values():
            run.kill()
    return {
        name: (run.communicate()[0], run.returncode, ended[name] - (folder / f"{name}-told").stat().st_mtime)
        for name, run in runs.items()
    }


@pytest.mark.parametrize(
    ("where", "cause"),
    [
        ("engine", "FloatingPointError('the engine is broken on purpose')"),
        ("reward", "LookupError: the reward's own thread is broken on purpose"),
    ],
)
def test_a_thread_that_dies_ends_the_run_with_status_1_and_its_cause_on_the_last_lines(broken_runs, where, cause):
    out, status, seconds = broken_runs[where]
    assert status == 1, out[-3000:]
    assert cause in "\n".join(out.splitlines()[-4:])
    assert "Traceback" in out
    assert seconds < 10


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("lose_a_task", r"careless \(replica 0\): the task '.*' died of LookupError: nobody awaits me"),
        ("lose_a_thread", r"careless \(replica 0\): the thread 'helper' died of ZeroDivisionError: division by zero"),
    ],
)
def test_what_dies_unseen_in_an_actor_fails_its_calls_and_ends_what_its_owner_waits_for(method, message):
    async def lose_it(provisioner, actor):
        async with provisioner.ends_on_failure():
            await getattr(actor, method).call()
            await asyncio.sleep(600)

    async def main():
        async with Provisioner(gpus=[]) as provisioner:
            actor = await Careless.as_actor()
            waiting = asyncio.ensure_future(actor.wait.call())
            started = time.monotonic()
            with pytest.raises(ActorFailed, match=message) as info:
                await lose_it(provisioner, actor)
            with pytest.raises(ActorFailed, match=message):
                await waiting
            return time.monotonic() - started, str(info.value.__cause__)

    seconds, traceback = asyncio.run(asyncio.wait_for(main(), 60))
    assert seconds < 10
    assert "Traceback" in traceback


def test_the_death_of_the_weight_store_ends_what_its_owner_waits_for():
    async def main():
        async with Provisioner(gpus=[]) as provisioner, provisioner.ends_on_failure():
            store = await WeightStore.start()
            os.kill(store._groups[0].pids[0], signal.SIGKILL)
            await asyncio.sleep(600)

    started = time.monotonic()
    with pytest.raises(WeightStoreError, match=r"The weight store died\. It was killed by SIGKILL"):
        asyncio.run(asyncio.wait_for(main(), 60))
    assert time.monotonic() - started < 30


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_dies_unseen_in_the_controller_ends_it_too():
    async def main(fail):
        async with Provisioner(gpus=[]) as provisioner, provisioner.ends_on_failure():
            fail()
            await asyncio.sleep(600)

    async def lost():
        raise LookupError("nobody awaits me")

    for fail in (lambda: threading.Thread(target=lambda: 1 / 0).start(), lambda: asyncio.ensure_future(lost())):
        with pytest.raises(ActorFailed, match="died of"):
            asyncio.run(asyncio.wait_for(main(fail), 10))
