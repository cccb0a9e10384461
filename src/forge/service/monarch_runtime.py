"""Monarch's runtime in this process: started once, over unix sockets, without noise."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch.actor import HostMesh

logger = logging.getLogger(__name__)


@functools.cache
def host_mesh() -> HostMesh:
    """This host. The first call starts the runtime; it cannot be started again once it was shut down, so it stays until
    the interpreter exits, and what is stopped before that is the processes."""
    os.environ.setdefault("MONARCH_FILE_LOG_LEVEL", "error")
    remove_dead_socket_folders()
    import monarch.actor

    monarch.actor.config.prefix_python_logs_with_actor = False
    monarch.actor.unhandled_fault_hook = _fault_hook(monarch.actor.unhandled_fault_hook)
    with _without_the_line("Monarch internal logs are being written to"):
        return monarch.actor.this_host()


def _fault_hook(previous: Any) -> Any:
    """Deaths of our own processes are known already (`ProcGroup`) and must not end the program, which is what Monarch
    does with a failure that nobody handles. Failures of anything else go to the hook that was there."""

    def hook(failure: Any) -> None:
        name = str(failure.mesh_name)
        if name.startswith(("forge_", "logger")):
            logger.debug("%s", failure.report())
        else:
            previous(failure)

    return hook


@contextlib.contextmanager
def _without_the_line(start: str) -> Iterator[None]:
    """Drops the lines on stderr that begin with `start`; native code writes one, and no setting turns it off."""
    sys.stderr.flush()
    original = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(original, 2)
            os.close(original)
            captured.seek(0)
            for line in captured.read().splitlines(keepends=True):
                if not line.startswith(start.encode()):
                    os.write(2, line)


def remove_dead_socket_folders() -> None:
    """Removes what runs that were killed left in the temporary folder: Monarch's folders of sockets nobody listens on.

    A folder counts only if its name is Monarch's (`.tmp` and 6 letters or digits), it is ours, a minute old, and holds
    nothing but sockets that refuse a connection.
    """
    for folder in Path(tempfile.gettempdir()).glob(".tmp??????"):
        with contextlib.suppress(OSError):
            status = folder.stat(follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or time.time() - status.st_mtime < 60:
                continue
            entries = list(folder.iterdir())
            if entries and all(_is_dead_socket(entry) for entry in entries):
                for entry in entries:
                    entry.unlink()
                folder.rmdir()


def _is_dead_socket(path: Path) -> bool:
    if not stat.S_ISSOCK(path.stat(follow_symlinks=False).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED
