"""Word of the deaths of processes on this machine: from the kernel, in milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

LOG_TAIL_LINES = 15
"""How much of a dead process's log goes into the message about it."""


class ProcessWatch:
    """Consumes process ids, produces one call for each when it ends, waits on the kernel's file descriptors."""

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}

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
