"""A group of processes on this host: started through Monarch, watched through the kernel, ended for certain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from monarch.actor import Actor, default_bootstrap_cmd
from monarch.actor.concurrent import concurrent_endpoint

from forge.service import _bootstrap
from forge.service.monarch_runtime import host_mesh

if TYPE_CHECKING:
    from monarch.actor import HostMesh, ProcMesh

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 15.0
"""How long Monarch may take to end the processes of a group before they are killed."""
LOG_TAIL_LINES = 15
"""How much of a dead process's log goes into the message about it."""


class _Probe(Actor):
    """Says which process has which rank."""

    @concurrent_endpoint(instrument=False)
    async def pid(self) -> tuple[int, int]:
        return int(os.environ["RANK"]), os.getpid()


@dataclass(kw_only=True, slots=True)
class ProcSpec:
    """What `ProcGroup.start` needs to know."""

    name: str
    """Such as "generator/0"."""
    size: int
    """Number of processes, the ranks 0 .. size-1."""
    env: dict[str, str]
    """Added to the environment of every rank."""
    rank_env: list[dict[str, str]] = field(default_factory=list)
    """Added to the environment of one rank, by rank; empty: nothing."""
    log_dir: Path | None = None
    """Where each rank's output goes, in a file of its own; None: where the parent's goes."""


class ProcGroup:
    """`size` processes on this host, with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.

    Consumes nothing, produces a Monarch process mesh (`mesh`) and word of deaths, ends with `stop`. A death is noticed
    by the kernel's file descriptor for the process, in milliseconds; Monarch by itself takes about ten seconds.
    """

    def __init__(self, spec: ProcSpec) -> None:
        self.name = spec.name
        self.size = spec.size
        self.pids: list[int] = []
        self._spec = spec
        self._port = _PortReservation()
        self._pidfds: dict[int, int] = {}
        self._dead: dict[int, str] = {}
        self._listeners: list[Callable[[int, str], None]] = []
        self._stopped_listeners: list[Callable[[ProcGroup], None]] = []
        self._stop_task: asyncio.Task[None] | None = None
        self._all_ended = asyncio.Event()
        self.mesh: ProcMesh

    @classmethod
    async def start(cls, spec: ProcSpec) -> ProcGroup:
        """Starts the processes and waits until all of them answer."""
        group = cls(spec)
        try:
            await group._spawn(host_mesh())
        except BaseException:
            await group.stop()
            raise
        return group

    def on_death(self, callback: Callable[[int, str], None]) -> None:
        """Calls `callback(rank, reason)` when a process ends without `stop`; at once for those that already did."""
        self._listeners.append(callback)
        for rank, reason in self._dead.items():
            callback(rank, reason)

    def on_stop(self, callback: Callable[[ProcGroup], None]) -> None:
        """Calls `callback(group)` when `stop` has ended the processes."""
        self._stopped_listeners.append(callback)

    def log_file(self, rank: int) -> Path | None:
        """Where the output of `rank` goes."""
        if self._spec.log_dir is None:
            return None
        return self._spec.log_dir / f"{self.name.replace('/', '-')}-{rank}.log"

    async def stop(self) -> None:
        """Ends the processes: asks Monarch, and kills whatever is left after `STOP_TIMEOUT_S`. Never raises."""
        if self._stop_task is None:
            self._stop_task = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stop_task)  # whoever waits may be cancelled, stopping may not

    async def _stop(self) -> None:
        try:
            if hasattr(self, "mesh") and len(self._dead) < self.size:
                await asyncio.wait_for(self.mesh.stop().as_asyncio(), STOP_TIMEOUT_S)
        except Exception as error:
            logger.debug("stopping %s: %r", self.name, error)
        finally:
            for pid, pidfd in zip(self.pids, self._pidfds.values(), strict=False):
                _kill(pid, pidfd)
            await self._wait_for_exit()
            self._port.release()
            for listener in self._stopped_listeners:
                listener(self)

    async def _spawn(self, host: HostMesh) -> None:
        self.mesh = host.spawn_procs(
            per_host={"procs": self.size},
            name="forge_" + "".join(c if c.isalnum() else "_" for c in self.name),
            bootstrap_command=lambda point: self._command(point.rank),
        )
        probe = self.mesh.spawn("forge_probe", _Probe)
        answers = dict([answer for _, answer in await probe.pid.call()])
        self.pids = [answers[rank] for rank in range(self.size)]
        for rank, pid in enumerate(self.pids):
            self._watch(rank, pid)

    def _command(self, rank: int) -> object:
        spec = self._spec
        env = {
            **spec.env,
            **(spec.rank_env[rank] if spec.rank_env else {}),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port.port),
            _bootstrap.NAME: self.name if self.size == 1 else f"{self.name}.{rank}",
        }
        if (log_file := self.log_file(rank)) is not None:
            log_file.parent.mkdir(parents=True, exist_ok=True)
            env[_bootstrap.LOG_FILE] = str(log_file.resolve())
        command = default_bootstrap_cmd()
        command.args = ["-m", _bootstrap.__name__]
        return command.with_env(env)

    def _watch(self, rank: int, pid: int) -> None:
        pidfd = os.pidfd_open(pid)
        self._pidfds[rank] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._ended, rank)

    def _ended(self, rank: int) -> None:
        pidfd = self._pidfds[rank]
        asyncio.get_running_loop().remove_reader(pidfd)
        reason = f"{_how_it_ended(pidfd)} (pid {self.pids[rank]})." + self._log_tail(rank)
        self._dead[rank] = reason
        if len(self._dead) == self.size:
            self._all_ended.set()
        if self._stop_task is None:
            for listener in list(self._listeners):
                listener(rank, reason)

    def _log_tail(self, rank: int) -> str:
        path = self.log_file(rank)
        lines = _last_words(path) if path else []
        return f" From {path}:\n" + "\n".join(lines) if lines else ""

    async def _wait_for_exit(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_ended.wait(), STOP_TIMEOUT_S if self._pidfds else 0)
        for pidfd in self._pidfds.values():
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()


def _last_words(path: Path) -> list[str]:
    """The last lines of a log, or, after a crash in native code, those where it is reported."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    crash = next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    return lines[-LOG_TAIL_LINES:] if crash is None else lines[crash : crash + LOG_TAIL_LINES]


class _PortReservation:
    """A free TCP port on loopback that nobody else is given until `release`.

    The socket is bound but does not listen; with SO_REUSEADDR on both sides, a child can still bind and listen.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]

    def release(self) -> None:
        self._socket.close()


def _kill(pid: int, pidfd: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except OSError as error:
        logger.warning("could not kill process %d: %s", pid, error)


def _how_it_ended(pidfd: int) -> str:
    """The exit status, where Monarch has not collected it first."""
    try:
        info = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:
        info = None
    if info is None:
        return "It ended unexpectedly"
    if info.si_code == os.CLD_EXITED:
        return f"It exited with status {info.si_status}"
    hint = "; the kernel does that when memory runs out" if info.si_status == signal.SIGKILL else ""
    return f"It was killed by {signal.Signals(info.si_status).name}{hint}"
