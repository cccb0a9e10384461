"""The one process of a run on each host that looks after the others there."""

from __future__ import annotations

import asyncio
import fcntl
import os
import platform
from pathlib import Path
from typing import Any

from monarch.actor import Actor, default_bootstrap_cmd
from monarch.actor.concurrent import concurrent_endpoint

from forge.provisioner import available_cores, available_gpus
from forge.service import _bootstrap
from forge.service.hosts import LEASE_S, WORKER_LOCK, HostReport, _Ports, interface_of, kill_all, own_versions
from forge.service.watch import ProcessWatch
from forge.types import UserError


class HostAgent(Actor):
    """Says what the host has, watches the run's processes there, and ends them when the controller is silent."""

    def __init__(self) -> None:
        self._watch = ProcessWatch()
        self._ports = _Ports()
        self._ended: dict[int, str] = {}
        self._heard = 0.0
        self._lock: Any = None
        self._lease: asyncio.Task[None] | None = None

    @concurrent_endpoint(instrument=False)
    async def describe(self, address: str) -> HostReport | str:
        """What this host has; or why it cannot be used."""
        if lock := os.environ.get(WORKER_LOCK):
            self._lock = open(lock)  # noqa: SIM115, ASYNC230 (held for as long as this process lives)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return "another run uses it. Wait for that one, or start another worker on another port."
        try:
            interface = interface_of(address)
        except UserError as error:
            return str(error)
        self._heard = asyncio.get_running_loop().time()
        self._lease = asyncio.create_task(self._end_when_forgotten())
        return HostReport(
            cores=available_cores(),
            gpus=available_gpus(),
            interface=interface,
            python=platform.python_version(),
            versions=own_versions(),
        )

    @concurrent_endpoint(instrument=False)
    async def beat(self) -> dict[int, str]:
        """Which processes ended since the last call, and how."""
        self._heard = asyncio.get_running_loop().time()
        ended, self._ended = self._ended, {}
        return ended

    @concurrent_endpoint(instrument=False)
    async def watch(self, pid: int, log_file: str | None) -> None:
        def ended(reason: str) -> None:
            self._ended[pid] = reason

        self._watch.add(pid, Path(log_file) if log_file else None, ended)

    @concurrent_endpoint(instrument=False)
    async def kill(self, pid: int) -> None:
        self._watch.kill(pid)

    @concurrent_endpoint(instrument=False)
    async def reserve_port(self, address: str) -> int:
        return self._ports.reserve(address)

    @concurrent_endpoint(instrument=False)
    async def release_port(self, port: int) -> None:
        self._ports.release(port)

    async def _end_when_forgotten(self) -> None:
        """Waits for a silence of `LEASE_S`; then ends the run's processes here, and this one."""
        clock = asyncio.get_running_loop().time
        while clock() - self._heard < LEASE_S:  # noqa: ASYNC110 (what is waited for is that nothing comes)
            await asyncio.sleep(1)
        kill_all(self._watch.pids())
        os._exit(1)


def bootstrap_command() -> Any:
    """How Monarch starts the agent's process."""
    from forge.provisioner import python_path

    command = default_bootstrap_cmd()
    command.args = ["-m", _bootstrap.__name__]
    return command.with_env({"PYTHONPATH": python_path(), _bootstrap.NAME: "agent"})
