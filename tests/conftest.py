"""What every test runs under: few threads, no network, caches of its own, and nothing left running afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

_CACHE = tempfile.mkdtemp(prefix="forge-tests-")
_MARK = f"{os.getpid()}-{uuid.uuid4().hex}"
_MARK_NAME = "FORGE_TEST_SESSION"

# Set here, before anything imports torch or vLLM, and inherited by every process that a test starts.
os.environ |= {
    _MARK_NAME: _MARK,
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # the actors of a test share the cores
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HOME": f"{_CACHE}/huggingface",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CACHE_ROOT": f"{_CACHE}/vllm",
    "VLLM_CONFIG_ROOT": f"{_CACHE}/vllm-config",
    "VLLM_NO_USAGE_STATS": "1",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_DIR": _CACHE,
    "WANDB_CACHE_DIR": f"{_CACHE}/wandb",
    "MPLCONFIGDIR": f"{_CACHE}/matplotlib",
}

_GRACE_SECONDS = 10.0  # processes that were told to stop may need a moment
_LIBRARY_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor/compile_worker")
_JANITOR = "forge/service/_janitor.py"  # ends with the process that started Monarch, which may be pytest itself
_HELPERS = (*_LIBRARY_HELPERS, _JANITOR)


def pytest_sessionfinish() -> None:
    shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.fixture(autouse=True, scope="module")
def nothing_left_running() -> Iterator[None]:
    """Fails the last test of a module that leaves a process behind, and ends that process.

    Per module, since the tests of one may share an expensive service; that service's fixture must end it.
    """
    before = {process.pid for process in _started_by_us()}
    yield
    left = [process for process in _started_by_us() if process.pid not in before]
    _, left = psutil.wait_procs(left, timeout=_GRACE_SECONDS)
    described = [_describe(process) for process in left]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=_GRACE_SECONDS)
    assert not described, "processes left behind by the tests of this module:\n" + "\n".join(described)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run folder that does not exist yet."""
    return tmp_path / "runs" / "a"


def _started_by_us() -> list[psutil.Process]:
    """Our descendants, and processes that got away from us but carry our mark in their environment."""
    us = psutil.Process()
    found = {process.pid: process for process in us.children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != us.pid and process.environ().get(_MARK_NAME) == _MARK:
                found[process.pid] = process
    return [process for process in found.values() if _counts(process)]


def _counts(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        command = " ".join(process.cmdline())
        return process.status() != psutil.STATUS_ZOMBIE and not any(helper in command for helper in _HELPERS)
    return False


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"  {process.pid}: {' '.join(process.cmdline())[:200]}"
    return f"  {process.pid}: ended meanwhile"
