"""Waits until the controller has ended, then ends what outlived it and removes what it left. See `scratch.py`.

Run as a script, with the folder as its argument and a pipe from the controller as its input. Standard library only.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import signal
import sys
import time

VARIABLE = "FORGE_RUN"
SHARED_MEMORY = "forge-weights-"
"""What names in /dev/shm start with; the name of the run's folder follows."""
PATIENCE_S = 5.0
"""How long processes that were killed may take to be gone."""


def main() -> None:
    folder = sys.argv[1]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    deadline = time.monotonic() + PATIENCE_S
    while left := processes_of(folder):
        late = time.monotonic() > deadline
        for pid in left:
            if late or not is_tracker(pid):
                kill(pid)
        if late:
            break
        time.sleep(0.05)
    remove(folder)


def is_tracker(pid: int) -> bool:
    """Whether it is one of Python's processes that free named shared memory once everybody who used it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def processes_of(folder: str) -> list[int]:
    """Living processes that carry the run's mark in their environment."""
    mark = f"{VARIABLE}={folder}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            # It may be another user's, or have ended meanwhile.
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    found.append(int(name))
    return found


def remove(folder: str) -> None:
    """The folder, and what its run kept in shared memory."""
    for path in glob.glob(f"/dev/shm/{SHARED_MEMORY}{os.path.basename(folder)}-*"):
        shutil.rmtree(path, ignore_errors=True)
    # A generator that ended while it started: vLLM names its shared memory after the file at which its workers meet.
    for meeting in glob.glob(f"{folder}/vllm_dist_*"):
        for path in glob.glob(f"/dev/shm/{os.path.basename(meeting)}-*"):
            with contextlib.suppress(OSError):
                os.unlink(path)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
