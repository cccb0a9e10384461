"""Whether what processes held, and they themselves, are gone."""

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil


def alive(pid: int) -> bool:
    """A zombie is not: who should collect it is none of ours, and not every init does."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def gone(pids: Iterable[int], seconds: float = 10.0) -> bool:
    """Waits for the end of all of them, for some seconds at most."""
    pids = list(pids)
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


def listening(processes: Iterable[psutil.Process]) -> set[int]:
    """Ports on which they listen. Compare with before: other tests of a process may have left some open."""
    connections = [c for process in processes for c in process.net_connections(kind="inet")]
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


def shared_memory_left(before: set[str], seconds: float = 10.0) -> set[str]:
    """Names in /dev/shm that `before` had not and nobody uses, after some seconds at most.

    What somebody uses is another run's, which may be tested at the same time; a process of ours that lived on is
    looked for on its own.
    """
    deadline = time.monotonic() + seconds
    while (left := _unused(shared_memory() - before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _unused(names: set[str]) -> set[str]:
    used = ""
    for path in Path("/proc").glob("[0-9]*/maps") if names else ():
        with contextlib.suppress(OSError):
            used += path.read_text()
    return {name for name in names if name not in used}
