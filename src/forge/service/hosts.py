"""The machines that processes run on: this one, and others where `forge worker` listens."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import platform
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from forge.placement import Machine
from forge.service.errors import HostLost
from forge.service.monarch_runtime import host_mesh
from forge.service.unseen import ended
from forge.service.watch import ProcessWatch
from forge.types import UserError

if TYPE_CHECKING:
    from monarch.actor import HostMesh

logger = logging.getLogger(__name__)
T = TypeVar("T")

BEAT_S = 0.5
"""How often a controller asks a host who died."""
SILENCE_S = 8.0
"""A host that says nothing for so long is lost. Longer than a busy machine makes a process wait."""
LEASE_S = 60.0
"""A host that hears nothing of its controller for so long ends that controller's processes."""
WORKER_LOCK = "FORGE_WORKER_LOCK"
"""A file that the agent of a run holds locked, so that a worker serves one run at a time."""
ATTACH_S = 30.0
"""How long a host may take to start its first process."""


class Host(Protocol):
    """One machine as the provisioner and a `ProcGroup` see it."""

    machine: Machine
    address: str
    """Where ranks on other hosts find a rank on this one."""
    env: dict[str, str]
    """What every process on this host is told."""
    worker: str | None
    """Monarch's address of it; None for this machine."""
    lost: HostLost | None
    """Why nothing can run here any more."""

    def watch(self, pid: int, log_file: Path | None, on_exit: Callable[[str], None]) -> None: ...

    def kill(self, pid: int) -> None: ...

    def forget(self, pid: int) -> None: ...

    async def settled(self) -> None:
        """Returns when what ended processes had started has ended too, as far as that can be seen from here."""
        ...

    async def reserve_port(self) -> int: ...

    def release_port(self, port: int) -> None: ...

    async def unless_lost(self, work: Awaitable[T]) -> T: ...


class _Ports:
    """Free TCP ports that nobody else is given until they are released.

    The sockets are bound but do not listen; with SO_REUSEADDR on both sides, a child can still bind and listen.
    """

    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket] = {}

    def reserve(self, address: str) -> int:
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((address, 0))
        port: int = held.getsockname()[1]
        self._sockets[port] = held
        return port

    def release(self, port: int) -> None:
        if (held := self._sockets.pop(port, None)) is not None:
            held.close()


class LocalHost:
    """This machine: everything stays on loopback and unix sockets."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.address = "127.0.0.1"
        self.env = {"GLOO_SOCKET_IFNAME": "lo"}
        self.worker: str | None = None
        self.lost: HostLost | None = None
        self._watch = ProcessWatch()
        self._ports = _Ports()

    def watch(self, pid: int, log_file: Path | None, on_exit: Callable[[str], None]) -> None:
        self._watch.add(pid, log_file, on_exit)

    def kill(self, pid: int) -> None:
        self._watch.kill(pid)

    def forget(self, pid: int) -> None:
        self._watch.forget(pid)

    async def settled(self) -> None:
        await self._watch.settled()

    async def reserve_port(self) -> int:
        return self._ports.reserve(self.address)

    def release_port(self, port: int) -> None:
        self._ports.release(port)

    async def unless_lost(self, work: Awaitable[T]) -> T:
        return await work


@dataclass(kw_only=True, slots=True)
class HostReport:
    """What a host says about itself."""

    cores: int
    gpus: list[str]
    interface: str
    """The network interface with its address, such as "eth0"."""
    python: str
    versions: dict[str, str] = field(default_factory=dict)


class RemoteHost:
    """A machine where `forge worker` listens.

    Consumes nothing, produces word of deaths: a task asks the host's agent twice a second which processes ended there.
    When the agent is silent for `SILENCE_S`, the host is lost, and with it all its processes. Ends with `close`.
    """

    def __init__(self, *, name: str, worker: str, address: str, agent: Any, procs: Any, report: HostReport) -> None:
        self.machine = Machine(name=name, cores=report.cores, gpus=tuple(report.gpus))
        self.address = address
        self.env = {
            "FORGE_HOST": name,
            "GLOO_SOCKET_IFNAME": report.interface,
            "NCCL_SOCKET_IFNAME": report.interface,
        }
        self.worker: str | None = worker
        self.lost: HostLost | None = None
        self._agent = agent
        self._procs = procs
        self._listeners: dict[int, Callable[[str], None]] = {}
        self._calls: set[asyncio.Task[Any]] = set()
        self._gone = asyncio.Event()
        self._beating = asyncio.create_task(self._beat())

    @classmethod
    async def attach(cls, name: str, *, scheme: str) -> RemoteHost:
        """Takes hold of the worker that listens at `name`, "ADDRESS:PORT".

        Raises:
            UserError: nobody listens there, another run holds it, or it has other versions than this machine.
        """
        from monarch.actor import attach_to_workers

        from forge.service.host_agent import HostAgent, bootstrap_command

        address, port = split_address(name)
        await _check_listening(name, address, port)
        worker = f"{scheme}://{address}:{port}"
        try:
            async with asyncio.timeout(ATTACH_S):
                mesh = attach_to_workers(ca="trust_all_connections", workers=[worker], name="forge_host")
                await mesh.initialized
                procs = mesh.spawn_procs(
                    per_host={"agents": 1}, name="forge_agent", bootstrap_command=lambda _: bootstrap_command()
                )
                agent = procs.spawn("forge_host_agent", HostAgent)
                answer = await agent.describe.call_one(address).as_asyncio()
        except TimeoutError:
            raise UserError(
                f"the forge worker at {name} took the connection and did not answer within {ATTACH_S:.0f} s. Look at "
                "what it printed. If it was started with another FORGE_SECRET than this program, or one of the two "
                "without any, they do not understand each other."
            ) from None
        if isinstance(answer, str):
            await _ended_quietly(procs)
            raise UserError(f"the forge worker at {name} cannot be used: {answer}")
        _check_versions(name, answer)
        return cls(name=name, worker=worker, address=address, agent=agent, procs=procs, report=answer)

    def watch(self, pid: int, log_file: Path | None, on_exit: Callable[[str], None]) -> None:
        self._listeners[pid] = on_exit
        self._call(self._agent.watch.call_one(pid, str(log_file) if log_file else None))

    def kill(self, pid: int) -> None:
        if pid in self._listeners:
            self._call(self._agent.kill.call_one(pid))

    def forget(self, pid: int) -> None:
        self._listeners.pop(pid, None)

    async def settled(self) -> None:
        pass  # its agent sees to it

    async def reserve_port(self) -> int:
        port: int = await self.unless_lost(self._agent.reserve_port.call_one(self.address).as_asyncio())
        return port

    def release_port(self, port: int) -> None:
        self._call(self._agent.release_port.call_one(port))

    async def unless_lost(self, work: Awaitable[T]) -> T:
        """The result of `work`, or `HostLost` as soon as this host is lost."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            assert self.lost is not None
            raise self.lost
        finally:
            gone.cancel()
            await ended(task)

    async def close(self) -> None:
        """Lets the worker go: it can serve another run."""
        if self._calls and self.lost is None:
            await asyncio.wait(self._calls, timeout=SILENCE_S)
        await ended(self._beating, *self._calls)
        if self.lost is None:
            await _ended_quietly(self._procs)

    async def _beat(self) -> None:
        misses = 0
        while self.lost is None:
            try:
                async with asyncio.timeout(SILENCE_S / 2):
                    ended = await self._agent.beat.call_one().as_asyncio()
            except Exception as error:  # silence, or Monarch's word that the other end is gone
                misses += 1
                if misses == 2:
                    self._is_lost(error)
                continue
            misses = 0
            for pid, reason in ended.items():
                if (listener := self._listeners.pop(pid, None)) is not None:
                    listener(f"On host {self.machine.name}: {reason}")
            await asyncio.sleep(BEAT_S)

    def _is_lost(self, error: Exception) -> None:
        name = self.machine.name
        logger.debug("host %s: %r", name, error)
        self.lost = HostLost(
            f"Host {name} is lost: its forge worker has not answered for {SILENCE_S:.0f} s. Either the machine or the "
            "worker went down, or the network between. Start the worker again (forge worker); then the same "
            "command with the same output_dir goes on from the last checkpoint.",
            host=name,
        )
        self._gone.set()
        listeners, self._listeners = list(self._listeners.values()), {}
        for listener in listeners:
            listener(str(self.lost))

    def _call(self, future: Any) -> None:
        """Sends without waiting. What fails shows in the next beats."""
        task = asyncio.ensure_future(future.as_asyncio())
        self._calls.add(task)

        def done(task: asyncio.Task[Any]) -> None:
            self._calls.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.debug("host %s: %r", self.machine.name, error)

        task.add_done_callback(done)


def mesh_of(hosts: Sequence[Host]) -> HostMesh:
    """One Monarch mesh over these hosts, in this order."""
    workers = [host.worker for host in hosts if host.worker is not None]
    if not workers:
        return host_mesh()
    from monarch.actor import attach_to_workers

    return attach_to_workers(ca="trust_all_connections", workers=workers, name="forge_hosts")


def split_address(name: str) -> tuple[str, int]:
    """ADDRESS:PORT → the IP address (names are looked up) and the port.

    Raises:
        UserError: it is not of that form, or there is no such machine.
    """
    host, _, port = name.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"hosts: {name!r} must be ADDRESS:PORT, as `forge worker` prints it, such as 10.0.0.5:9000.")
    with contextlib.suppress(ValueError):
        return str(ipaddress.IPv4Address(host)), int(port)
    try:
        found = socket.getaddrinfo(host, int(port), family=socket.AF_INET, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"hosts: there is no machine {host!r} ({error.strerror or error}).") from None
    return str(found[0][4][0]), int(port)


async def _check_listening(name: str, address: str, port: int) -> None:
    try:
        async with asyncio.timeout(5):
            _, writer = await asyncio.open_connection(address, port)
    except (OSError, TimeoutError) as error:
        reason = getattr(error, "strerror", None) or "no answer within 5 s"
        raise UserError(
            f"hosts: no forge worker listens at {name} ({reason}). Start one there: forge worker --listen {name}"
        ) from None
    writer.close()


def _check_versions(name: str, report: HostReport) -> None:
    here = own_versions()
    other = {package: v for package, v in report.versions.items() if here.get(package) != v}
    if report.python != platform.python_version():
        other["python"], here["python"] = report.python, platform.python_version()
    if other:
        told = ", ".join(
            f"{package} {version} (here {here.get(package, 'missing')})" for package, version in other.items()
        )
        raise UserError(f"the forge worker at {name} runs other versions: {told}. Install the same on every machine.")


def own_versions() -> dict[str, str]:
    """Of what two ends of a connection must have alike."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("torch", "torchmonarch", "torchtitan", "torchstore"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


async def _ended_quietly(procs: Any) -> None:
    with contextlib.suppress(Exception):
        async with asyncio.timeout(10):
            await procs.stop().as_asyncio()


def interface_of(address: str) -> str:
    """The name of the network interface with this address; "lo" for the whole of 127.0.0.0/8."""
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == address for a in addresses):
            return name
    raise UserError(f"no network interface of this machine has the address {address}.")


def kill_all(pids: Sequence[int]) -> None:
    """SIGKILL to each of them that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
