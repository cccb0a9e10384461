"""A group of processes on one host or several: started through Monarch, watched by their hosts, ended for certain."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch.actor import Actor, default_bootstrap_cmd
from monarch.actor.concurrent import concurrent_endpoint

from forge.service import _bootstrap, scratch
from forge.service.hosts import Host, mesh_of

if TYPE_CHECKING:
    from monarch.actor import ProcMesh

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 15.0
"""How long Monarch may take to end the processes of a group before they are killed."""


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
    """Number of processes, the ranks 0 .. size-1; a multiple of the number of hosts."""
    hosts: Sequence[Host]
    """Where they run: the first ranks on the first host, and so on."""
    env: dict[str, str]
    """Added to the environment of every rank."""
    rank_env: list[dict[str, str]] = field(default_factory=list)
    """Added to the environment of one rank, by rank; empty: nothing."""
    log_dir: Path | None = None
    """Where each rank's output goes, in a file of its own; None: where the parent's goes."""


class ProcGroup:
    """`size` processes, with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.

    Consumes nothing, produces a Monarch process mesh (`mesh`) and word of deaths, ends with `stop`. A death is noticed
    by the hosts (on this machine by the kernel, in milliseconds); Monarch by itself takes about ten seconds.
    """

    def __init__(self, spec: ProcSpec) -> None:
        self.name = spec.name
        self.size = spec.size
        self.hosts = list(spec.hosts)
        self.pids: list[int] = []
        self._spec = spec
        self._per_host = spec.size // len(spec.hosts)
        self._port = 0
        self._dead: dict[int, str] = {}
        self._listeners: list[Callable[[int, str], None]] = []
        self._stopped_listeners: list[Callable[[ProcGroup], None]] = []
        self._stop_task: asyncio.Task[None] | None = None
        self._all_ended = asyncio.Event()
        self.mesh: ProcMesh

    @classmethod
    async def start(cls, spec: ProcSpec) -> ProcGroup:
        """Starts the processes and waits until all of them answer.

        Raises:
            HostLost: one of the hosts went down meanwhile.
        """
        group = cls(spec)
        try:
            await group._spawn()
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
        return (self._spec.log_dir / f"{self.name.replace('/', '-')}-{rank}.log").resolve()

    async def stop(self, *, now: bool = False) -> None:
        """Ends the processes: asks Monarch, and kills whatever is left after `STOP_TIMEOUT_S`. Never raises.

        Args:
            now: kill them without asking, which takes milliseconds.
        """
        if now:
            self._kill()
        if self._stop_task is None:
            self._stop_task = asyncio.ensure_future(self._stop(now=now))
        await asyncio.shield(self._stop_task)  # whoever waits may be cancelled, stopping may not

    def _kill(self) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self._dead:
                self._host(rank).kill(pid)

    async def _stop(self, *, now: bool) -> None:
        try:
            # A mesh with a host that is lost would be waited for in vain; the others' processes are killed below.
            if hasattr(self, "mesh") and not now and len(self._dead) < self.size and not self._lost_hosts():
                await asyncio.wait_for(self.mesh.stop().as_asyncio(), STOP_TIMEOUT_S)
        except Exception as error:
            logger.debug("stopping %s: %r", self.name, error)
        finally:
            self._kill()
            await self._wait_for_exit()
            await asyncio.gather(*(host.settled() for host in self.hosts))
            if self._port:
                self.hosts[0].release_port(self._port)
            for listener in self._stopped_listeners:
                listener(self)

    async def _spawn(self) -> None:
        self._port = await self.hosts[0].reserve_port()
        self.mesh = mesh_of(self.hosts).spawn_procs(
            per_host={"procs": self._per_host},
            name="forge_" + "".join(c if c.isalnum() else "_" for c in self.name),
            bootstrap_command=lambda point: self._command(point.rank),
        )
        probe = self.mesh.spawn("forge_probe", _Probe)
        answers = dict([answer for _, answer in await self._unless_lost(probe.pid.call().as_asyncio())])
        self.pids = [answers[rank] for rank in range(self.size)]
        for rank, pid in enumerate(self.pids):
            self._host(rank).watch(pid, self.log_file(rank), functools.partial(self._ended, rank))

    async def _unless_lost(self, work: Awaitable[Any]) -> Any:
        for host in self.hosts:
            work = host.unless_lost(work)
        return await work

    def _command(self, rank: int) -> object:
        spec = self._spec
        env = {
            **(scratch.variables() if self._host(rank).worker is None else {}),
            **spec.env,
            **self._host(rank).env,
            **(spec.rank_env[rank] if spec.rank_env else {}),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % self._per_host),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self._per_host),
            "MASTER_ADDR": self.hosts[0].address if len(self.hosts) > 1 else "127.0.0.1",
            "MASTER_PORT": str(self._port),
            _bootstrap.NAME: self.name if self.size == 1 else f"{self.name}.{rank}",
        }
        if len(self.hosts) == 1:  # ranks of one machine have nothing to say to the network
            env["GLOO_SOCKET_IFNAME"] = "lo"
        if (log_file := self.log_file(rank)) is not None:
            env[_bootstrap.LOG_FILE] = str(log_file)
        command = default_bootstrap_cmd()
        command.args = ["-m", _bootstrap.__name__]
        return command.with_env(env)

    def _host(self, rank: int) -> Host:
        return self.hosts[rank // self._per_host]

    def _lost_hosts(self) -> list[Host]:
        return [host for host in self.hosts if host.lost is not None]

    def _ended(self, rank: int, reason: str) -> None:
        self._dead[rank] = reason
        if len(self._dead) == self.size:
            self._all_ended.set()
        if self._stop_task is None:
            for listener in list(self._listeners):
                listener(rank, reason)

    async def _wait_for_exit(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_ended.wait(), STOP_TIMEOUT_S if self.pids else 0)
        for rank, pid in enumerate(self.pids):
            self._host(rank).forget(pid)
