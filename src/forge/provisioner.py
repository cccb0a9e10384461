"""Who runs where: processes with their devices, CPU threads and environment, and whether there is enough of it all.

    async with Provisioner(log_dir=Path("runs/x/logs")) as provisioner:
        provisioner.plan([Request(service="trainer", procs=2, with_gpus=True), Request(service="reward", heavy=False)])
        ...                                      # as_actor and as_service start their processes here

Everything is on this host: sockets are unix sockets, MASTER_ADDR is loopback, processes die with the controller.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import site
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from forge.config import RestartsConfig
from forge.types import UserError

if TYPE_CHECKING:
    from forge.service.procs import ProcGroup
    from forge.service.supervision import Incident

logger = logging.getLogger(__name__)

MAX_GPU_SERVICE_THREADS = 8
"""A process that computes on a GPU gains nothing from more CPU threads than this."""


class InsufficientResources(UserError):
    """More GPUs are asked for than there are. Nothing was started."""


@dataclass(kw_only=True, slots=True)
class Request:
    """What one service asks for."""

    service: str
    procs: int = 1
    """Processes of one replica; one GPU each if `with_gpus`."""
    num_replicas: int = 1
    with_gpus: bool = False
    threads: int | None = None
    """CPU threads of one process; None: a fair share."""
    heavy: bool = True
    """False for a service that computes little (rewards, storage): on the CPU it gets one thread and no share."""

    @property
    def processes(self) -> int:
        return self.procs * self.num_replicas


def check_gpus(requests: Sequence[Request], available: int) -> None:
    """Compares what is asked for with what exists.

    Raises:
        InsufficientResources: naming each service's share of the sum, and the ways out.

    Example:
        >>> check_gpus([Request(service="trainer", procs=2, with_gpus=True),
        ...             Request(service="ref_model", with_gpus=True)], 2)
        InsufficientResources: Insufficient GPU resources: 3 GPUs are needed, 2 are available.
          trainer    2 = 1 replica × 2 processes
          ref_model  1 = 1 replica × 1 process
        Ways out: drop the reference model (services.ref_model: null, or grpo.beta: 0), or ...
    """
    on_gpus = [request for request in requests if request.with_gpus]
    needed = sum(request.processes for request in on_gpus)
    if needed <= available:
        return
    width = max(len(request.service) for request in on_gpus)
    lines = [
        f"  {r.service:<{width}}  {r.processes} = {_count(r.num_replicas, 'replica')} × {_count(r.procs, 'process')}"
        for r in on_gpus
    ]
    if any(request.service == "ref_model" for request in on_gpus):
        ways_out = (
            "drop the reference model (services.ref_model: null), or put it on the CPU (ref_model.with_gpus: false)"
        )
    else:
        ways_out = "lower procs or num_replicas of a service, or put one on the CPU (with_gpus: false)"
    raise InsufficientResources(
        f"Insufficient GPU resources: {_count(needed, 'GPU')} needed, {available} available.\n"
        + "\n".join(lines)
        + f"\nWays out: {ways_out}."
    )


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}{'es' if noun.endswith('s') else 's'}"


def threads_per_process(cores: int, requests: Sequence[Request]) -> dict[str, int]:
    """CPU threads of one process of each service.

    An explicit `threads` wins. Otherwise: one for light services; the cores shared evenly among the processes that
    compute on the CPU; the same share, but at most 8, for those that compute on a GPU. Never less than one.

    Example:
        >>> threads_per_process(2, [Request(service="trainer"), Request(service="generator"),
        ...                         Request(service="reward", heavy=False)])
        {'trainer': 1, 'generator': 1, 'reward': 1}
    """
    sharing = sum(r.processes for r in requests if r.threads is None and (r.heavy or r.with_gpus))
    taken = sum(r.processes * r.threads for r in requests if r.threads is not None)
    share = max(1, (cores - taken) // max(1, sharing))

    def threads(request: Request) -> int:
        if request.threads is not None:
            return request.threads
        if request.with_gpus:
            return min(share, MAX_GPU_SERVICE_THREADS)
        return share if request.heavy else 1

    return {request.service: threads(request) for request in requests}


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
    """Starts groups of processes and knows which devices they hold.

    Consumes requests, produces `ProcGroup`s, ends with `shutdown`, after which nothing that it started is running.

    Args:
        log_dir: each process writes what it prints into a file of its own there; None: where the parent's goes.
        cores: CPU cores to share out; None: those this process may use.
        gpus: devices to hand out, as values for CUDA_VISIBLE_DEVICES; None: those this process may use.
        restarts: how often replicas that died are replaced, where their options do not say it themselves.
        on_incident: told when a replica died, and when its replacement is ready; None writes it to the log.
    """

    _current: ClassVar[Provisioner | None] = None

    def __init__(
        self,
        *,
        log_dir: Path | None = None,
        cores: int | None = None,
        gpus: Sequence[str] | None = None,
        restarts: RestartsConfig | None = None,
        on_incident: Callable[[Incident], None] | None = None,
    ) -> None:
        self._log_dir = log_dir
        self._cores = cores or available_cores()
        self._gpus = list(available_gpus() if gpus is None else gpus)
        self._free_gpus = list(self._gpus)
        self._threads: dict[str, int] = {}
        self._groups: dict[ProcGroup, list[str]] = {}
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
        return self

    async def __aexit__(self, *_: object) -> None:
        Provisioner._current = self._previous
        await self.shutdown()

    def plan(self, requests: Sequence[Request]) -> dict[str, int]:
        """Checks the sum of all GPUs and settles CPU threads, before anything starts; the threads by service.

        Raises:
            InsufficientResources: see `check_gpus`.
        """
        check_gpus(requests, len(self._gpus))
        self._threads = threads_per_process(self._cores, requests)
        return dict(self._threads)

    async def spawn(
        self,
        service: str,
        *,
        replica: int = 0,
        procs: int = 1,
        gpus_per_proc: int = 0,
        threads: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ProcGroup:
        """Starts the processes of one replica. Its GPUs are its own until the group has been stopped.

        Raises:
            InsufficientResources: not enough GPUs are free.
        """
        from forge.service.procs import ProcGroup, ProcSpec

        gpus = self._take_gpus(service, procs * gpus_per_proc)
        of_rank = [gpus[rank * gpus_per_proc : (rank + 1) * gpus_per_proc] for rank in range(procs)]
        n_threads = str(threads or self._threads.get(service, 1))
        spec = ProcSpec(
            name=f"{service}/{replica}",
            size=procs,
            env={
                "OMP_NUM_THREADS": n_threads,
                "MKL_NUM_THREADS": n_threads,
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONPATH": _python_path(sys.path),
                **(env or {}),
            },
            # Its own GPUs, numbered from 0. A service on the CPU sees none.
            rank_env=[{"CUDA_VISIBLE_DEVICES": ",".join(own)} for own in of_rank],
            log_dir=self._log_dir,
        )
        try:
            group = await ProcGroup.start(spec)
        except BaseException:
            self._free_gpus += gpus
            raise
        self._groups[group] = gpus
        group.on_stop(self._stopped)
        return group

    def fail(self, error: BaseException) -> None:
        """Something died that nobody can replace: `ends_on_failure` raises it. The first error counts."""
        if not self._failed().done():
            self._failed().set_result(error)

    @asynccontextmanager
    async def ends_on_failure(self) -> AsyncIterator[None]:
        """Cancels the block and raises the error as soon as `fail` is called, whatever the block is waiting for."""

        async def watch() -> None:
            raise await asyncio.shield(self._failed())

        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(watch())
                try:
                    yield
                finally:
                    watching.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    def _failed(self) -> asyncio.Future[BaseException]:
        if self._failure is None:
            self._failure = asyncio.get_running_loop().create_future()
        return self._failure

    async def shutdown(self) -> None:
        """Ends every process that is still running, all groups at once."""
        await asyncio.gather(*(group.stop() for group in list(self._groups)))

    def _take_gpus(self, service: str, count: int) -> list[str]:
        if count > len(self._free_gpus):
            check_gpus([Request(service=service, procs=count, with_gpus=True)], len(self._free_gpus))
        taken, self._free_gpus = self._free_gpus[:count], self._free_gpus[count:]
        return taken

    def _stopped(self, group: ProcGroup) -> None:
        self._free_gpus += self._groups.pop(group, [])


def _python_path(search_path: Sequence[str]) -> str:
    """This process's own module search path, so that a child finds every module that was imported here."""
    installed = {Path(folder).resolve() for folder in (*sysconfig.get_paths().values(), *site.getsitepackages())}
    folders = [Path(entry).resolve() for entry in search_path if Path(entry).is_dir()]
    own = [str(f) for f in folders if f not in installed and f.name != "lib-dynload"]
    return os.pathsep.join(dict.fromkeys(own))
