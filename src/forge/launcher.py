"""Where a run's processes may start: on this machine, where `forge worker` listens, or on the nodes of a SLURM job.

async with open_hosts(config.launcher, config.hosts) as hosts:      # [] stands for this machine alone
    async with Provisioner(hosts=hosts, log_dir=...) as provisioner:
        ...
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from forge.types import UserError

if TYPE_CHECKING:
    from forge.service.hosts import Host

logger = logging.getLogger(__name__)

LISTENS = "forge worker listens at "
"""What a worker prints before its address, once a controller can attach."""
SLURM_START_S = 120.0
"""How long the workers on the nodes of a SLURM job may take to start: Python from a network file system is slow."""
SLURM_STOP_S = 10.0
"""How long they may take to end."""


def host_names(launcher: str, hosts: Sequence[str]) -> list[str]:
    """What the machines are called, as far as this is known before a start; empty where it is not."""
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "0")) if launcher == "slurm" else 0
    return list(hosts) if launcher == "hosts" else [f"node {i}" for i in range(nodes)]


@asynccontextmanager
async def open_hosts(launcher: str, hosts: Sequence[str]) -> AsyncIterator[list[Host]]:
    """The hosts of a run, held until the context is left.

    Args:
        launcher: "local", "hosts" or "slurm".
        hosts: ADDRESS:PORT of each worker, for "hosts".

    Raises:
        UserError: a worker cannot be reached or used, or there is no SLURM job; nothing was started.
    """
    if launcher == "local":
        yield []
    elif launcher == "hosts":
        async with _attached(hosts) as attached:
            yield attached
    else:
        async with _slurm_workers() as addresses, _attached(addresses) as attached:
            yield attached


@asynccontextmanager
async def _attached(names: Sequence[str]) -> AsyncIterator[list[Host]]:
    from forge.service.hosts import RemoteHost, split_address
    from forge.service.monarch_runtime import host_mesh, listen_at
    from forge.service.trust import scheme_for, use_tls

    addresses = [split_address(name) for name in names]
    if len(set(addresses)) < len(addresses):
        raise UserError(f"hosts: each worker may be named once, got {', '.join(names)}.")
    scheme = scheme_for([address for address, _ in addresses])
    own = _address_towards(*addresses[0])
    use_tls(own)
    listen_at(f"{scheme}://{own}:{_free_port(own)}")
    host_mesh()
    results = await asyncio.gather(*(RemoteHost.attach(name, scheme=scheme) for name in names), return_exceptions=True)
    attached = [host for host in results if isinstance(host, RemoteHost)]
    try:
        for result in results:
            if isinstance(result, BaseException):
                raise result
        yield list(attached)
    finally:
        await asyncio.gather(*(host.close() for host in attached), return_exceptions=True)


def _address_towards(address: str, port: int) -> str:
    """Which of this machine's addresses others reach it at, on the way from `address`. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def _slurm_workers() -> AsyncIterator[list[str]]:
    """Starts one `forge worker` on each node of this SLURM job; their addresses."""
    if "SLURM_JOB_ID" not in os.environ:
        raise UserError(
            "launcher: slurm starts its processes on the nodes of the SLURM job that it runs in, and this is none. "
            "Submit one: sbatch --nodes=2 --gpus-per-node=8 run_grpo.sh --config FILE, or use --launcher local."
        )
    nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
    os.environ.setdefault("FORGE_SECRET", secrets.token_hex(16))  # srun hands the environment on
    command = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--unbuffered", "--overlap"]
    command += [
        f"--cpus-per-task={os.environ.get('SLURM_CPUS_ON_NODE', '1')}",
        "--kill-on-bad-exit=0",
        *os.environ.get("FORGE_SRUN_ARGS", "").split(),
    ]
    command += [sys.executable, "-m", "forge.cli", "worker", "--listen", "slurm"]
    # In a session of its own: Ctrl-C is for the controller. The workers end when their standard input does, which it
    # does whatever becomes of this process.
    workers = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        addresses = await _read_addresses(workers, nodes)
        if len(addresses) < nodes:
            raise UserError(
                f"srun started {len(addresses)} of {nodes} forge workers within {SLURM_START_S:.0f} s. What it said is "
                "above."
            )
        yield addresses
    finally:
        assert workers.stdin is not None
        workers.stdin.close()
        try:
            await asyncio.wait_for(workers.wait(), SLURM_STOP_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(workers.pid, signal.SIGKILL)
            await workers.wait()


async def _read_addresses(workers: asyncio.subprocess.Process, nodes: int) -> list[str]:
    assert workers.stdout is not None
    addresses: list[str] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SLURM_START_S):
            while len(addresses) < nodes and (line := await workers.stdout.readline()):
                if found := re.match(rf"{LISTENS}([\d.]+:\d+)", line.decode(errors="replace")):
                    addresses.append(found[1])
    return sorted(addresses)


def run_worker(listen: str) -> None:
    """Lets runs on other machines start processes here, one run at a time. Returns when SIGINT or SIGTERM says so.

    Args:
        listen: ADDRESS or ADDRESS:PORT (port 0: any); or "slurm", for the address that SLURM knows this node by.

    Raises:
        UserError: the address is not one of this machine, or can be reached from others and there is no secret.
    """
    from forge.service.hosts import WORKER_LOCK, interface_of
    from forge.service.trust import scheme_for, use_tls

    address, _, port_text = (f"{slurm_node_address()}:0" if listen == "slurm" else listen).partition(":")
    try:
        ip = str(ipaddress.IPv4Address(address))
        port = int(port_text or 0)
    except ValueError:
        raise UserError(f"--listen must be an IPv4 ADDRESS or ADDRESS:PORT, got {listen!r}.") from None
    interface_of(ip)
    scheme = scheme_for([ip])
    try:
        port = port or _free_port(ip)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((ip, port))
    except OSError as error:
        raise UserError(f"cannot listen at {ip}:{port}: {error.strerror or error}.") from None
    with tempfile.TemporaryDirectory(prefix="forge-worker-") as folder:
        lock = Path(folder) / "lock"
        lock.touch()
        use_tls(ip)
        os.environ[WORKER_LOCK] = str(lock)
        os.environ.setdefault("MONARCH_FILE_LOG_LEVEL", "error")
        _serve(f"{scheme}://{ip}:{port}", f"{ip}:{port}", until_input_ends=listen == "slurm")


def _serve(channel: str, name: str, *, until_input_ends: bool) -> None:
    from forge.service.monarch_runtime import without_the_line

    # scancel signals every process of a job, and the controller needs this one until its checkpoint is written.
    signal.signal(signal.SIGTERM, signal.SIG_IGN if until_input_ends else signal.default_int_handler)
    with without_the_line("Monarch internal logs are being written to"):
        from monarch.actor import start_worker_loop_forever

        serving = start_worker_loop_forever(ca="trust_all_connections", address=channel)
    print(f"{LISTENS}{name}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        if until_input_ends:
            sys.stdin.read()
        else:
            while True:
                signal.pause()
    del serving


def slurm_node_address() -> str:
    """The IP address by which SLURM reaches this node."""
    name = os.environ.get("SLURMD_NODENAME", "")
    try:
        shown = subprocess.run(
            ["scontrol", "show", "node", "--oneliner", name], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(
            f"--listen slurm is for the tasks of a SLURM job; scontrol says of node {name!r}: {error}"
        ) from None
    fields = dict(part.split("=", 1) for part in shown.split() if "=" in part)
    return socket.gethostbyname(fields.get("NodeAddr", name))
