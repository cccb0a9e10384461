"""Word of the deaths of processes on this machine: from the kernel, in milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

from forge.service._janitor import is_tracker, kill

logger = logging.getLogger(__name__)

CHILDREN_GRACE_S = 1.0
"""How long what a process had started may take to end by itself after it."""
TRACKER_GRACE_S = 10.0
_PIDFD_GET_INFO = 0xC040FF0B
"""_IOWR(0xFF, 11, 64 bytes), Linux 6.13 and later."""
_PIDFD_INFO_EXIT = 1 << 3
"""Linux 6.15 and later."""
LOG_TAIL_LINES = 15
"""How much of a dead process's log goes into the message about it."""


class ProcessWatch:
    """Consumes process ids, produces one call for each when it ends, waits on the kernel's file descriptors."""

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def add(self, pid: int, log_file: Path | None, on_exit: Callable[[str], None]) -> None:
        """Calls `on_exit(reason)` once, when `pid` has ended; at once if it has already."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            on_exit(f"It ended unexpectedly (pid {pid})." + _log_tail(log_file))
            return
        self._pidfds[pid] = pidfd

        def ended() -> None:
            asyncio.get_running_loop().remove_reader(pidfd)
            reason = f"{_how_it_ended(pidfd)} (pid {pid})." + _log_tail(log_file)
            del self._pidfds[pid]
            os.close(pidfd)
            ending = asyncio.ensure_future(_end_group(pid))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            on_exit(reason)

        asyncio.get_running_loop().add_reader(pidfd, ended)

    def kill(self, pid: int) -> None:
        """Ends a process that is watched, if it has not ended by itself."""
        pidfd = self._pidfds.get(pid)
        if pidfd is None:
            return
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        except OSError as error:
            logger.warning("could not kill process %d: %s", pid, error)

    async def settled(self) -> None:
        """Returns when what the ended processes had started has ended too."""
        await asyncio.gather(*self._ending, return_exceptions=True)

    def forget(self, pid: int) -> None:
        """Watches `pid` no longer."""
        if (pidfd := self._pidfds.pop(pid, None)) is not None:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def pids(self) -> list[int]:
        """Those that are watched and have not ended."""
        return list(self._pidfds)


def _log_tail(path: Path | None) -> str:
    lines = _last_words(path) if path else []
    return f" From {path}:\n" + "\n".join(lines) if lines else ""


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


async def _end_group(leader: int) -> None:
    """Ends what a process had started (each leads a process group), such as vLLM's workers: after a moment in which
    they can do it themselves. Python's resource tracker gets longer: it frees the others' shared memory after them."""
    began = time.monotonic()
    while members := _members(leader):
        waited = time.monotonic() - began
        for pid in members:
            if waited > (TRACKER_GRACE_S if is_tracker(pid) else CHILDREN_GRACE_S):
                kill(pid)
        if waited > TRACKER_GRACE_S:
            return
        await asyncio.sleep(0.05)


def _members(leader: int) -> list[int]:
    """Living processes in the group of `leader`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                found.append(int(stat.parent.name))
    return found


def _how_it_ended(pidfd: int) -> str:
    """The exit status, as far as the kernel tells: Monarch may have collected it first, and kernels before 6.15 forget
    it then."""
    try:
        info = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:
        info = None
    if info is not None:
        status = info.si_status << 8 if info.si_code == os.CLD_EXITED else info.si_status
    elif (collected := _collected_status(pidfd)) is not None:
        status = collected
    else:
        return "It ended unexpectedly"
    if os.WIFEXITED(status):
        return f"It exited with status {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    hint = "; the kernel does that when memory runs out" if number == signal.SIGKILL else ""
    return f"It was killed by {signal.Signals(number).name}{hint}"


def _collected_status(pidfd: int) -> int | None:
    """The wait status of a process that its parent has waited for already; None where it is not known."""
    info = bytearray(64)  # struct pidfd_info of <linux/pidfd.h>
    struct.pack_into("Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    known = struct.unpack_from("Q", info, 0)[0] & _PIDFD_INFO_EXIT
    return int(struct.unpack_from("i", info, 60)[0]) if known else None
