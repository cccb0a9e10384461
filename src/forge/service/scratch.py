"""The run's own folder for temporary files, which is gone when the run is, whatever ended it.

Monarch's sockets, what vLLM's workers meet at and the temporary files of the actors lie in it. Who is killed by SIGKILL
removes nothing, so others do: the *janitor*, a small process that waits for the controller's end, ends what outlived it
and removes the folder; and should that have been killed too, the next start, by the lock that only a living controller
holds.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import getpass
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from forge.service import _janitor

VARIABLE = _janitor.VARIABLE
"""In the environment of every process of the run: the folder, by which the janitor knows them."""
LONGEST_PLACE = 60
"""Characters; a socket's path may have 107, and Monarch's adds 38 to it."""
_PREFIX = "forge-"
_LOCK = "lock"


@functools.cache
def folder() -> Path:
    """The folder of this controller. The first call makes it, and removes those of controllers that are dead."""
    remove_dead()
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=_place()))
    lock = os.open(made / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # held until this process ends
    named = made.with_name(made.name.removeprefix("."))  # locked already when others can see it
    made.rename(named)
    _start_janitor(named)
    return named


def remove_dead() -> None:
    """Removes the folders of controllers that have ended without anybody cleaning up, never that of a living one."""
    for found in _place().glob(f"{_PREFIX}????????"):
        with contextlib.suppress(OSError):
            lock = os.open(found / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _janitor.remove(str(found))
            finally:
                os.close(lock)


def _place() -> Path:
    """The system's folder for temporary files, unless the names of sockets in it would be too long for the kernel."""
    usual = tempfile.gettempdir()
    return Path(usual if len(usual) <= LONGEST_PLACE else "/tmp")


def variables() -> dict[str, str]:
    """What the processes of the run get to know of the folder."""
    own = str(folder())
    # What PyTorch compiles is worth keeping for the next run.
    caches = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    return {
        VARIABLE: own,
        "TMPDIR": own,
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", caches),
    }


def shared_name() -> str:
    """What the name of anything in /dev/shm has to start with, for the janitor to know it as this run's."""
    return f"{_janitor.SHARED_MEMORY}{os.path.basename(os.environ.get(VARIABLE, 'no-run'))}-"


def _start_janitor(own: Path) -> None:
    janitor = subprocess.Popen(
        [sys.executable, "-I", "-S", _janitor.__file__, str(own)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},
        cwd="/",
        start_new_session=True,  # Ctrl-C and signals to the group are not for it
    )

    owner = os.getpid()

    @atexit.register
    def say_goodbye() -> None:
        """Registered before Monarch's own, so this runs after it."""
        if os.getpid() != owner:  # a child that was forked
            return
        assert janitor.stdin is not None
        janitor.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            janitor.wait(10)
        shutil.rmtree(own, ignore_errors=True)
