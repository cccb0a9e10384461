"""Which service's processes go to which machine and GPUs, and how many CPU threads each gets: arithmetic, no process.

    place([Request(service="trainer", procs=8, with_gpus=True), ...], [Machine(name="node1", gpus=("0", ...)), ...])

Importing this imports neither torch nor Monarch, so that what does not fit is told before anything starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from forge.types import UserError

MAX_GPU_SERVICE_THREADS = 8
"""A process that computes on a GPU gains nothing from more CPU threads than this."""


class InsufficientResources(UserError):
    """More GPUs or hosts are asked for than there are. Nothing was started."""


@dataclass(kw_only=True, slots=True)
class Request:
    """What one service asks for."""

    service: str
    procs: int = 1
    """Processes of one replica on each of its hosts; one GPU each if `with_gpus`."""
    num_replicas: int = 1
    hosts: int = 1
    """Machines that one replica spans."""
    with_gpus: bool = False
    threads: int | None = None
    """CPU threads of one process; None: a fair share."""
    heavy: bool = True
    """False for a service that computes little (rewards, storage): on the CPU it gets one thread and no share."""
    takes_idle_cores: bool = False
    """On the CPU its processes get all cores between them, in spite of the others: it and they often wait for each
    other, and what waits needs no core."""
    turns_with: str | None = None
    """The service whose devices it shares: one of the two computes at a time."""

    @property
    def processes(self) -> int:
        return self.procs * self.hosts * self.num_replicas

    @property
    def gpus_per_host(self) -> int:
        return self.procs if self.with_gpus else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a host has to give."""

    name: str = "this machine"
    cores: int
    gpus: tuple[str, ...] = ()
    """As values for CUDA_VISIBLE_DEVICES."""


@dataclass(kw_only=True, slots=True)
class Slot:
    """One replica's place on one machine."""

    machine: int
    """Position in the list of machines."""
    gpus: list[str]
    borrowed: bool = False
    """The GPUs are another service's, too."""


Placement = dict[tuple[str, int], list[Slot]]
"""(service, replica) → its slots, one for each host that it spans; ranks are numbered in this order."""


def place(requests: Sequence[Request], machines: Sequence[Machine]) -> Placement:
    """Finds a machine for every replica.

    A replica's ranks are next to each other: all on one machine, or `procs` on each of `hosts` machines. What spans
    most machines is placed first, then what needs most GPUs on one. A replica with GPUs goes where it leaves the fewest
    over, which keeps whole machines free for large ones and touches few machines; one on the CPU goes where most cores
    are free for each process.

    Raises:
        InsufficientResources: naming the service, what it needs and what there is.

    Example:
        >>> two = [Machine(name="a", cores=8), Machine(name="b", cores=8)]
        >>> placed = place([Request(service="trainer"), Request(service="generator")], two)
        >>> placed["trainer", 0][0].machine, placed["generator", 0][0].machine
        (0, 1)
    """
    check_gpus(requests, sum(len(machine.gpus) for machine in machines))
    free = [list(machine.gpus) for machine in machines]
    load = [0.0] * len(machines)  # processes that compute
    placement: Placement = {}
    for request in sorted(requests, key=lambda r: (-r.hosts, -r.gpus_per_host)):
        if request.turns_with is not None:
            continue
        for replica in range(request.num_replicas):
            chosen = _choose(request, replica, machines, free, load)
            slots = []
            for index in sorted(chosen):
                slots.append(Slot(machine=index, gpus=free[index][: request.gpus_per_host]))
                del free[index][: request.gpus_per_host]
                load[index] += _load(request)
            placement[request.service, replica] = slots
    for request in requests:
        if request.turns_with is not None:
            placement |= _borrow(request, placement)
    return placement


def _borrow(request: Request, placement: Placement) -> Placement:
    """Places for the replicas on the devices of the service that this one takes turns with, one after the other."""
    owners = [slot for (service, _), slots in placement.items() if service == request.turns_with for slot in slots]
    per_replica = request.gpus_per_host
    pieces = [
        Slot(machine=slot.machine, gpus=slot.gpus[start : start + per_replica], borrowed=True)
        for slot in owners
        for start in range(0, len(slot.gpus) - per_replica + 1, per_replica or len(slot.gpus) + 1)
    ]
    if per_replica and len(pieces) < request.num_replicas:
        raise InsufficientResources(
            f"{request.service} is to share the GPUs of {request.turns_with}, "
            f"{' + '.join(str(len(slot.gpus)) for slot in owners)}, and needs {_count(request.processes, 'GPU')}: "
            f"{_sum_of(request)}.\nWays out: fewer replicas or processes, or GPUs of its own "
            f"(services.{request.service}.colocate: false)."
        )
    return {(request.service, n): [pieces[n % len(pieces)]] for n in range(request.num_replicas)}


def _choose(
    request: Request, replica: int, machines: Sequence[Machine], free: list[list[str]], load: list[float]
) -> list[int]:
    fitting = [index for index, gpus in enumerate(free) if len(gpus) >= request.gpus_per_host]
    if len(fitting) < request.hosts:
        raise InsufficientResources(_does_not_fit(request, replica, machines, free))

    def cost(index: int) -> tuple[float, float, int]:
        left_over = len(free[index]) - request.gpus_per_host if request.with_gpus else 0
        return left_over, (load[index] + _load(request)) / machines[index].cores, index

    return sorted(fitting, key=cost)[: request.hosts]


def _load(request: Request) -> float:
    """Cores' worth of work on each of its hosts."""
    return request.procs * (1.0 if request.heavy else 0.01)


def _does_not_fit(request: Request, replica: int, machines: Sequence[Machine], free: list[list[str]]) -> str:
    name = f"services.{request.service}"
    if request.hosts > len(machines):
        return (
            f"Insufficient hosts: {name}.hosts is {request.hosts}, and there {'is' if len(machines) == 1 else 'are'} "
            f"{len(machines)} ({', '.join(m.name for m in machines)}). Ways out: name more in `hosts` (launcher: "
            f"hosts), ask SLURM for more (sbatch --nodes={request.hosts}), or lower {name}.hosts."
        )
    there = ", ".join(
        f"{machine.name} {len(gpus)} of {len(machine.gpus)}" for machine, gpus in zip(machines, free, strict=True)
    )
    spans = f"on each of {request.hosts} hosts" if request.hosts > 1 else "on one host"
    return (
        f"Insufficient GPU resources: {request.service} (replica {replica}) needs {_count(request.procs, 'GPU')} "
        f"{spans}, and after placing the larger services these are free: {there}.\nWays out: lower {name}.procs, raise "
        f"{name}.hosts so that a replica spans several hosts (the trainer can), or put a service on the CPU "
        "(with_gpus: false)."
    )


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
    on_gpus = [request for request in requests if request.with_gpus and request.turns_with is None]
    needed = sum(request.processes for request in on_gpus)
    if needed <= available:
        return
    width = max(len(request.service) for request in on_gpus)
    lines = [f"  {r.service:<{width}}  {r.processes} = {_sum_of(r)}" for r in on_gpus]
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


def _sum_of(request: Request) -> str:
    hosts = f" × {_count(request.hosts, 'host')}" if request.hosts > 1 else ""
    return f"{_count(request.num_replicas, 'replica')}{hosts} × {_count(request.procs, 'process')}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}{'es' if noun.endswith('s') else 's'}"


def threads_per_process(cores: int, requests: Sequence[Request]) -> dict[str, int]:
    """CPU threads of one process of each service on a machine that runs all of these.

    An explicit `threads` wins. Otherwise: one for light services; the cores shared evenly among the processes that
    compute on the CPU, but all of them for one that takes idle cores; the same share, but at most 8, for those that
    compute on a GPU. Never less than one. Services that take turns leave each other the whole of their share.

    Example:
        >>> threads_per_process(2, [Request(service="ref_model"), Request(service="generator", takes_idle_cores=True),
        ...                         Request(service="reward", heavy=False)])
        {'ref_model': 1, 'generator': 2, 'reward': 1}
    """

    def share(request: Request) -> int:
        at_once = [r for r in requests if not _take_turns(r, request)]
        sharing = sum(r.processes for r in at_once if r.threads is None and (r.heavy or r.with_gpus))
        taken = sum(r.processes * r.threads for r in at_once if r.threads is not None)
        return max(1, (cores - taken) // max(1, sharing))

    def threads(request: Request) -> int:
        if request.threads is not None:
            return request.threads
        if request.with_gpus:
            return min(share(request), MAX_GPU_SERVICE_THREADS)
        if request.takes_idle_cores:
            return max(1, cores // request.processes)
        return share(request) if request.heavy else 1

    return {request.service: threads(request) for request in requests}


def _take_turns(one: Request, other: Request) -> bool:
    return one.turns_with == other.service or other.turns_with == one.service


def threads_on(placement: Placement, requests: Sequence[Request], machines: Sequence[Machine]) -> list[dict[str, int]]:
    """For each machine: `threads_per_process` among the replicas that are placed there."""
    shares = []
    for index, machine in enumerate(machines):
        here = []
        for r in requests:
            replicas = sum(
                any(slot.machine == index for slot in placement[r.service, n]) for n in range(r.num_replicas)
            )
            if replicas:
                here.append(replace(r, num_replicas=replicas, hosts=1))
        shares.append(threads_per_process(machine.cores, here))
    return shares
