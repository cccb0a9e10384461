"""Which number format `dtype: auto` stands for. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # the last is Arm's


def resolve_dtype(dtype: str, *, with_gpus: bool) -> str:
    """ "float32" or "bfloat16".

    "auto" is bfloat16 on a GPU and on a CPU that multiplies bfloat16 matrices in hardware; other CPUs emulate it,
    hundreds of times slower than float32 (0.3 against 130 GFLOP/s, measured on two AVX2 cores).
    """
    if dtype != "auto":
        return dtype
    return "bfloat16" if with_gpus or cpu_multiplies_bfloat16() else "float32"


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16 matrices."""
    return bool(cpu_flags() & _BF16_FLAGS)


def cpu_flags() -> set[str]:
    """The instruction sets of this machine's CPU, as Linux names them; empty where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    return next(
        (set(line.split(":", 1)[1].split()) for line in text.splitlines() if line.startswith(("flags", "Features"))),
        set(),
    )
