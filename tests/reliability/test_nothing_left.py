"""Whatever ends a run, no process, file, shared memory or port of it is left: here, a controller that is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.processes import gone

# Two actors; one of them starts a program in a session of its own, keeps a port and writes a file in shared memory.
SCRIPT = """
import asyncio, os, socket, subprocess, sys, tempfile
from forge.provisioner import Provisioner
from forge.service import ForgeActor

class Messy(ForgeActor):
    def start(self):
        from forge.service.scratch import shared_name
        self.socket = socket.create_server(("127.0.0.1", 0))
        tempfile.mkstemp()
        tempfile.mkdtemp(prefix=shared_name(), dir="/dev/shm")
        _, meeting = tempfile.mkstemp(prefix="vllm_dist_")  # as vLLM does, and names the next after it
        open(f"/dev/shm/{os.path.basename(meeting)}-tp:0-[0-1]-cpushm_0", "w").close()
        detached = subprocess.Popen(["sleep", "600"], start_new_session=True)
        return os.getpid(), detached.pid, self.socket.getsockname()[1]

async def main():
    async with Provisioner(gpus=[]):
        service = await Messy.options(num_replicas=2).as_service()
        for answer in await service.start.fanout():
            print(*answer, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@contextlib.contextmanager
def controller(temporary: Path):
    """A program that is waiting; yields it with what it has started: [(pid of an actor, pid it started, port)]."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    try:
        assert process.stdout is not None
        started = [tuple(int(word) for word in process.stdout.readline().split()) for _ in range(2)]
        yield process, started
    finally:
        process.kill()
        process.communicate()


def janitor_of(process: subprocess.Popen) -> psutil.Process:
    (janitor,) = [p for p in psutil.Process(process.pid).children() if "_janitor" in " ".join(p.cmdline())]
    return janitor


def listening() -> set[int]:
    return {c.laddr.port for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN}


@pytest.fixture
def temporary(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t")  # short: the names of sockets in it may have 108 characters
    yield folder
    assert not list(Path("/dev/shm").glob("forge-weights-no-run*"))


def test_a_killed_controller_leaves_nothing_though_one_actor_is_stopped_and_another_program_detached(temporary):
    with controller(temporary) as (process, started):
        janitor = janitor_of(process)
        (folder,) = temporary.iterdir()
        of_vllm = [
            path for meeting in folder.glob("vllm_dist_*") for path in Path("/dev/shm").glob(f"{meeting.name}-*")
        ]
        assert len(of_vllm) == 2
        pids = [pid for actor, detached, _ in started for pid in (actor, detached)]
        ports = {port for _, _, port in started}
        assert ports <= listening()
        os.kill(started[0][0], signal.SIGSTOP)
        process.kill()
        process.wait()
        assert gone([*pids, janitor.pid])
        assert list(temporary.iterdir()) == []
        assert not list(Path("/dev/shm").glob(f"forge-weights-{folder.name}-*"))
        assert not any(path.exists() for path in of_vllm)
        assert not ports & listening()


def test_what_a_killed_janitor_could_not_remove_the_next_start_does_and_never_a_living_run(temporary):
    with controller(temporary) as (dead, started):
        janitor_of(dead).kill()
        dead.kill()
        dead.wait()
        assert gone([actor for actor, _, _ in started])  # they die with the controller
        for _, detached, _ in started:
            os.kill(detached, signal.SIGKILL)
        (orphan,) = temporary.iterdir()
        with controller(temporary) as (living, _):
            (own,) = temporary.iterdir()
            assert own != orphan
            with controller(temporary) as (another, _):
                assert len(list(temporary.iterdir())) == 2
                another.terminate()
                another.wait()
                assert own.is_dir()
            assert living.poll() is None
