"""Who runs where: processes with their devices, CPU threads and environment, and whether there is enough of it all.

    async with Provisioner(log_dir=Path("runs/x/logs")) as provisioner:
        provisioner.plan([Request(service="trainer", procs=2, with_gpus=True), Request(service="reward", heavy=False)])
        ...                                      # as_actor and as_service start their processes here

Where is arithmetic (`placement.py`). On this machine alone, sockets are unix sockets, MASTER_ADDR is loopback, and
processes die with the controller.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import signal
import site
import subprocess
import sys
import sysconfig
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from forge.config import RestartsConfig
from forge.placement import Machine, Placement, Request, Slot, check_gpus, place, threads_on

if TYPE_CHECKING:
    from forge.service.hosts import Host
    from forge.service.procs import ProcGroup
    from forge.service.supervision import Incident

logger = logging.getLogger(__name__)


def available_cores() -> int:
    """CPU cores this process may use: its affinity, and the limit of its control group (a container's CPU quota)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores


def available_gpus(environ: Mapping[str, str] | None = None) -> list[str]:
    """The GPUs this process may use, as values for CUDA_VISIBLE_DEVICES: those named there, or all of the machine's.

    Asks the driver's own tool, because asking CUDA would start it in the controller and hold memory on a device.
    """
    environ = os.environ if environ is None else environ
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(_gpus_of_the_machine())]
    names = [name.strip() for name in visible.split(",")]
    chosen: list[str] = []
    for name in names:  # CUDA, too, ignores everything after the first entry that is not a device
        if not re.fullmatch(r"\d+|(GPU|MIG)-[\w./-]+", name) or name in chosen:
            break
        chosen.append(name)
    machine = _gpus_of_the_machine() if chosen else 0
    return [name for name in chosen if not name.isdecimal() or int(name) < machine] if machine else []


def _gpus_of_the_machine() -> int:
    for command, pattern in (
        (["nvidia-smi", "-L"], r"^GPU \d+:"),
        (["rocm-smi", "--showid", "--csv"], r"^card\d+,"),
    ):
        try:
            listing = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        if count := len(re.findall(pattern, listing, re.MULTILINE)):
            return count
    return 0


class Provisioner:
    """Starts groups of processes and knows where they are and which devices they hold.

    Consumes requests, produces `ProcGroup`s, ends with `shutdown`, after which nothing that it started is running.

    Args:
        hosts: the machines to use (`forge.launcher.open_hosts`); None: this one.
        log_dir: each process writes what it prints into a file of its own there; None: where the parent's goes.
        cores: CPU cores of this machine to share out; None: those this process may use.
        gpus: devices of this machine to hand out, as values for CUDA_VISIBLE_DEVICES; None: those this process may use.
        restarts: how often replicas that died are replaced, where their options do not say it themselves.
        on_incident: told when a replica died, and when its replacement is ready; None writes it to the log.
    """

    _current: ClassVar[Provisioner | None] = None

    def __init__(
        self,
        *,
        hosts: Sequence[Host] | None = None,
        log_dir: Path | None = None,
        cores: int | None = None,
        gpus: Sequence[str] | None = None,
        restarts: RestartsConfig | None = None,
        on_incident: Callable[[Incident], None] | None = None,
    ) -> None:
        self._log_dir = log_dir
        self._hosts_given = hosts
        self.machines = [host.machine for host in hosts] if hosts else [this_machine(cores=cores, gpus=gpus)]
        self._free_gpus = [list(machine.gpus) for machine in self.machines]
        self._placement: Placement = {}
        self._threads: list[dict[str, int]] = [{} for _ in self.machines]
        self._groups: dict[ProcGroup, list[Slot]] = {}
        self.restarts = restarts or RestartsConfig()
        self.on_incident: Callable[[Incident], None] = on_incident or (lambda incident: logger.warning("%s", incident))
        self._failure: asyncio.Future[BaseException] | None = None

    @classmethod
    def current(cls) -> Provisioner:
        """The one entered by `async with`, or else one with default arguments."""
        if Provisioner._current is None:
            Provisioner._current = Provisioner()
        return Provisioner._current

    async def __aenter__(self) -> Provisioner:
        self._previous, Provisioner._current = Provisioner._current, self
        _let_signals_wake_the_loop()
        return self

    async def __aexit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        Provisioner._current = self._previous
        await self.shutdown(now=error is not None)

    def plan(self, requests: Sequence[Request]) -> Placement:
        """Checks the sum of all GPUs, finds a place for every replica and settles CPU threads, before anything starts.

        Raises:
            InsufficientResources: see `forge.placement.place`.
        """
        self._placement = place(requests, self.machines)
        self._threads = threads_on(self._placement, requests, self.machines)
        return self._placement

    def first_on_each_machine(self, service: str, *, besides: str) -> list[int]:
        """The first replica of a service on each machine where it has any, but for the first one of another service."""
        of_machine: dict[int, int] = {}
        for (name, replica), slots in self._placement.items():
            if name == service:
                of_machine.setdefault(slots[0].machine, replica)
        other = self._placement.get((besides, 0))
        of_machine.pop(other[0].machine if other else 0, None)
        return list(of_machine.values())

    async def spawn(
        self,
        service: str,
        *,
        replica: int = 0,
        procs: int = 1,
        gpus_per_proc: int = 0,
        threads: int | None = None,
        env: Mapping[str, str] | None = None,
        near: tuple[str, int] | None = None,
    ) -> ProcGroup:
        """Starts the processes of one replica, where `plan` placed it. Its GPUs are its own until it has been stopped.

        Args:
            procs: of the replica, over all hosts that the plan gave it.
            near: for what has no place in the plan: the service and replica whose first host it shares.

        Raises:
            InsufficientResources: not enough GPUs are free.
            HostLost: the hosts that it could run on are gone.
        """
        from forge.service.procs import ProcGroup, ProcSpec

        slots = self._take(service, replica, procs * gpus_per_proc, near)
        gpus = [gpu for slot in slots for gpu in slot.gpus]
        of_rank = [gpus[rank * gpus_per_proc : (rank + 1) * gpus_per_proc] for rank in range(procs)]
        n_threads = str(threads or min(self._threads[slot.machine].get(service, 1) for slot in slots))
        spec = ProcSpec(
            name=f"{service}/{replica}",
            size=procs,
            hosts=[self._hosts[slot.machine] for slot in slots],
            env={
                "OMP_NUM_THREADS": n_threads,
                "MKL_NUM_THREADS": n_threads,
                # Processes share cores: a thread that spins while it waits for its share of a product slows another's.
                "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
                "PYTHONPATH": python_path(),
                **(env or {}),
            },
            # Its own GPUs, numbered from 0. A service on the CPU sees none.
            rank_env=[{"CUDA_VISIBLE_DEVICES": ",".join(own)} for own in of_rank],
            log_dir=self._log_dir,
        )
        try:
            group = await ProcGroup.start(spec)
        except BaseException:
            self._give_back(slots)
            raise
        self._groups[group] = slots
        group.on_stop(self._stopped)
        return group

    def fail(self, error: BaseException) -> None:
        """Something died that nobody can replace: `ends_on_failure` raises it. The first error counts."""
        if not self._failed().done():
            self._failed().set_result(error)

    @asynccontextmanager
    async def ends_on_failure(self) -> AsyncIterator[None]:
        """Cancels the block, whatever it waits for, and raises the error as soon as `fail` is called, or a thread or
        task of this process has died of an exception that nobody else would hear of."""

        from forge.service.unseen import unseen_failures

        async def watch() -> None:
            raise await asyncio.shield(self._failed())

        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(watch())
                try:
                    with unseen_failures(self.fail):
                        yield
                finally:
                    watching.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group.exceptions[0].__cause__

    def _failed(self) -> asyncio.Future[BaseException]:
        if self._failure is None:
            self._failure = asyncio.get_running_loop().create_future()
        return self._failure

    async def shutdown(self, *, now: bool = False) -> None:
        """Ends every process that is still running, all groups at once; `now`: by force, which takes milliseconds."""
        await asyncio.gather(*(group.stop(now=now) for group in list(self._groups)))

    @functools.cached_property
    def _hosts(self) -> Sequence[Host]:
        from forge.service.hosts import LocalHost

        return self._hosts_given or [LocalHost(self.machines[0])]

    def _take(self, service: str, replica: int, count: int, near: tuple[str, int] | None) -> list[Slot]:
        """The planned slots, if they are free; else room on one host."""
        planned = self._placement.get((service, replica))
        if planned is not None and all(self._is_free(slot) for slot in planned):
            slots = planned
        else:
            slots = [self._elsewhere(service, count, near)]
        for slot in slots:
            if not slot.borrowed:
                self._free_gpus[slot.machine] = [gpu for gpu in self._free_gpus[slot.machine] if gpu not in slot.gpus]
        return slots

    def _is_free(self, slot: Slot) -> bool:
        free = slot.borrowed or set(slot.gpus) <= set(self._free_gpus[slot.machine])
        return self._hosts[slot.machine].lost is None and free

    def _elsewhere(self, service: str, count: int, near: tuple[str, int] | None) -> Slot:
        up = [index for index, host in enumerate(self._hosts) if host.lost is None]
        if not up:
            lost = self._hosts[0].lost
            assert lost is not None
            raise lost
        anchor = self._placement.get(near) if near else None
        if anchor and anchor[0].machine in up and not count:
            return Slot(machine=anchor[0].machine, gpus=[])
        index = max(up, key=lambda i: (len(self._free_gpus[i]), -i))
        if count > len(self._free_gpus[index]):
            check_gpus([Request(service=service, procs=count, with_gpus=True)], len(self._free_gpus[index]))
        return Slot(machine=index, gpus=self._free_gpus[index][:count])

    def _give_back(self, slots: list[Slot]) -> None:
        for slot in slots:
            if not slot.borrowed:
                self._free_gpus[slot.machine] += slot.gpus

    def _stopped(self, group: ProcGroup) -> None:
        self._give_back(self._groups.pop(group, []))


def _let_signals_wake_the_loop() -> None:
    """Ctrl-C may reach any of Monarch's threads; an event loop that sleeps in the main one hears of it only once it
    has a signal handler, whichever. This one is for a signal that does nothing, and goes when the loop is closed."""
    if threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGURG, lambda: None)


def this_machine(*, cores: int | None = None, gpus: Sequence[str] | None = None) -> Machine:
    """What this process may use of the machine it runs on, unless it is given."""
    return Machine(cores=cores or available_cores(), gpus=tuple(available_gpus() if gpus is None else gpus))


def python_path(search_path: Sequence[str] | None = None) -> str:
    """This process's own module search path, so that a child finds every module that was imported here."""
    installed = {Path(folder).resolve() for folder in (*sysconfig.get_paths().values(), *site.getsitepackages())}
    folders = [Path(entry).resolve() for entry in search_path or sys.path if Path(entry).is_dir()]
    own = [str(f) for f in folders if f not in installed and f.name != "lib-dynload"]
    return os.pathsep.join(dict.fromkeys(own))
