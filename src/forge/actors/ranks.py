"""The ranks of one trainer: how they find each other, and what those that see different data tell each other."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge.models.loaded import LoadedModel
from forge.objective import OneRank, Ranks
from forge.precision import resolve_dtype
from forge.service.distributed import init_process_group


def start_process_group(device: str, dtype: str) -> torch.device:
    """Joins the other ranks, if there are any, and says which device this rank computes on.

    For bfloat16 a process on its own needs a group, too, of one: FSDP2 is what keeps the float32 weights beside it.
    """
    if device == "cuda":
        # The provisioner shows each process one GPU of its own; under another launcher all are visible.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if not alone or resolve_dtype(dtype, with_gpus=device == "cuda") == "bfloat16":
        # gloo beside nccl, for the few numbers on the CPU that ranks agree on.
        init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device)


class MeshRanks:
    """`Ranks` of the processes that see different data."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.index = dist.get_rank(group)
        self.count = dist.get_world_size(group)

    def sum(self, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=self._group)
        return total

    def max(self, value: float) -> float:
        largest = torch.tensor(float(value), dtype=torch.float64, device=self._device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        return float(largest)

    def gather(self, values: Tensor) -> list[Tensor]:
        """Ranks may hold different numbers of rows: all are padded to the most for the exchange, then cut."""
        rows = [int(n) for n in self._gather_equal(torch.tensor([len(values)], device=self._device))]
        padded = nn.functional.pad(values, (0, 0, 0, max(rows) - len(values)))
        return [piece[:n] for piece, n in zip(self._gather_equal(padded), rows, strict=True)]

    def _gather_equal(self, values: Tensor) -> list[Tensor]:
        pieces = [torch.empty_like(values) for _ in range(self.count)]
        dist.all_gather(pieces, values.contiguous(), group=self._group)
        return pieces


def data_parallel_ranks(model: LoadedModel, device: torch.device) -> Ranks:
    """This rank among those that see different data."""
    group = model.data_parallel_group()
    return OneRank() if group is None else MeshRanks(group, device)
