"""Monarch's runtime in this process: started once, without noise; over unix sockets unless there are other hosts."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.service import scratch

if TYPE_CHECKING:
    from monarch.actor import HostMesh

logger = logging.getLogger(__name__)


def listen_at(address: str) -> None:
    """Lets other hosts reach this process's runtime, which must not have been started yet.

    Args:
        address: such as "tcp://127.0.0.1:0"; port 0 is any.
    """
    from monarch.actor import enable_transport

    enable_transport(address)


@functools.cache
def host_mesh() -> HostMesh:
    """This host. The first call starts the runtime; it cannot be started again once it was shut down, so it stays until
    the interpreter exits, and what is stopped before that is the processes."""
    os.environ.setdefault("MONARCH_FILE_LOG_LEVEL", "error")
    scratch.folder()  # before Monarch is imported, so that its farewell comes before the janitor's
    import monarch.actor

    monarch.actor.config.prefix_python_logs_with_actor = False
    monarch.actor.unhandled_fault_hook = _fault_hook(monarch.actor.unhandled_fault_hook)
    with without_the_line("Monarch internal logs are being written to"), _temporary_files_in(scratch.folder()):
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
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """For native code, which reads the variable itself."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


@contextlib.contextmanager
def without_the_line(start: str) -> Iterator[None]:
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
