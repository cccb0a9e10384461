"""MathJudge: asks math-verify whether two expressions are equal, in a process that is killed when it takes too long."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

START_SECONDS = 60.0  # importing sympy takes 0.5 s, and far longer on a machine that is busy
_WORKER = Path(__file__).with_name("math_worker.py")


class MathJudge:
    """Compares expressions in one worker process, started when first needed and replaced after it was killed.

    Usable from any thread (one comparison at a time), after a fork, and across processes by pickling: each process has
    a worker of its own.

    Args:
        seconds: CPU time that one comparison may take. On the clock it may take four times that, for a busy machine.

    Example:
        >>> MathJudge(seconds=2.0).is_equal("x^2-1", "(x-1)(x+1)")
        True
    """

    def __init__(self, *, seconds: float) -> None:
        self.seconds = seconds
        self._prepare()

    def _prepare(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._stop: Any = None

    def __getstate__(self) -> dict[str, float]:
        return {"seconds": self.seconds}

    def __setstate__(self, state: dict[str, float]) -> None:
        self.seconds = state["seconds"]
        self._prepare()

    def is_equal(self, target: str, answer: str) -> bool:
        """Whether the expressions are equal; False if they cannot be read or compared in time.

        Raises:
            RuntimeError: the worker cannot be started.
        """
        job = {"target": target, "answer": answer, "seconds": self.seconds}
        if self._owner not in (0, os.getpid()):  # after a fork the worker is the parent's: not ours to use or to end
            self._stop.detach()
            self._prepare()
        with self._lock:
            process = self._running()
            reply = _exchange(process, job, seconds=4 * self.seconds)
            if reply is None:
                logger.info("comparing %.80r with %.80r was given up after %g s", answer, target, self.seconds)
                self._discard()
            return bool(reply and reply["equal"])

    def close(self) -> None:
        """End the worker; a later comparison starts another."""
        with self._lock:
            self._discard()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._discard()
        if self._process is None:
            self._start()
        assert self._process is not None
        return self._process

    def _start(self) -> None:
        # -P: the script's folder, whose files have the names of well-known packages, stays off the import path.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._owner = os.getpid()
        self._stop = weakref.finalize(self, _end, self._process)
        if _receive(self._process, seconds=START_SECONDS) is None:
            try:
                reason = f"exit status {self._process.wait(timeout=1.0)}"
            except subprocess.TimeoutExpired:
                reason = f"no sign of life for {START_SECONDS:g} s"
            self._discard()
            raise RuntimeError(
                f"The worker that compares mathematical answers did not start ({reason}). "
                f"Check that `{sys.executable} -c 'import math_verify'` works, or install math-verify 0.9."
            )

    def _discard(self) -> None:
        if self._stop is not None:
            self._stop()
        self._process = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()


def _exchange(process: subprocess.Popen[bytes], job: dict[str, Any], *, seconds: float) -> dict[str, Any] | None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(job).encode() + b"\n")
    except OSError:
        return None
    return _receive(process, seconds=seconds)


def _receive(process: subprocess.Popen[bytes], *, seconds: float) -> dict[str, Any] | None:
    """The worker's next line, or None if it ended or said nothing in time."""
    assert process.stdout is not None
    descriptor, line = process.stdout.fileno(), b""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + seconds
    while not line.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        chunk = os.read(descriptor, 4096)
        if not chunk:
            return None
        line += chunk
    reply: dict[str, Any] = json.loads(line)
    return reply
