"""How much arithmetic a trainer step needs, and how much this process can do: their ratio is `throughput/mfu`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from forge.models.architectures import Architecture
from forge.packing import PackedRow

_SECONDS = 0.1
"""Spent on measuring."""


def training_flops(architecture: Architecture, rows: Sequence[PackedRow], *, weights_train: bool = True) -> float:
    """Useful floating-point operations of forward and backward over packed rows: what is in them, once.

    Matrix products of the blocks for every token, visible pairs of attention, and the output layer for the scored
    hidden states. Nothing that is computed twice to save memory counts, nor padding, norms, softmax or the optimizer.

    Args:
        weights_train: False where the matrices are frozen (LoRA), so that no gradient of theirs is taken.

    Example: one layer with 100 matrix weights a token and no attention → 2 · 100 forward, 4 · 100 backward a token.
    """
    arch = architecture
    q_dim, kv_dim = arch.n_heads * arch.head_dim, arch.n_kv_heads * arch.head_dim
    block = arch.dim * (2 * q_dim + 2 * kv_dim) + 3 * arch.dim * arch.hidden_dim
    tokens = sum(row.num_tokens for row in rows)
    scored = sum(len(torch.unique(row.score_index_M)) for row in rows)
    pairs = sum(row.layout.num_pairs for row in rows)
    products = 3 if weights_train else 2  # forward, and the gradients of inputs and weights
    matrices = 2.0 * products * (tokens * arch.n_layers * block + scored * arch.dim * arch.vocab_size)
    return matrices + 3 * 4.0 * pairs * q_dim * arch.n_layers


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second that matrix products reach on this process's device or threads.

    bfloat16 on NVIDIA and AMD GPUs from TorchTitan's table of data sheets, anything else measured, in about 0.1 s.
    """
    if device.type == "cuda":
        if dtype == torch.bfloat16:
            from torchtitan.tools.utils import get_peak_flops

            return float(get_peak_flops(torch.cuda.get_device_name(device)))
        return _measured(4096, device, dtype)
    # One thread, in seconds of its own, times the threads: when a run starts, other processes want the cores as well.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        slow = _measured(128, device, dtype) < 5e9  # bfloat16 is emulated
        return threads * _measured(128 if slow else 512, device, dtype)
    finally:
        torch.set_num_threads(threads)


def _measured(size: int, device: torch.device, dtype: torch.dtype) -> float:
    """The best of several square products."""

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            return time.perf_counter()
        return time.thread_time()

    a = torch.ones(size, size, dtype=dtype, device=device)
    torch.mm(a, a)  # loads the library
    best, until = float("inf"), time.perf_counter() + _SECONDS / 2
    while best == float("inf") or time.perf_counter() < until:
        started = clock()
        torch.mm(a, a)
        best = min(best, clock() - started)
    return 2.0 * size**3 / max(best, 1e-9)
