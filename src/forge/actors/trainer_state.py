"""Named tensors to and from a folder of safetensors shards, under any parallel layout."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter


def write_state(tensors: dict[str, Tensor], folder: Path) -> None:
    """Every rank writes its own shards. Safetensors, because what is read back must never be a pickle."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    dcp.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())


def read_state(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fills the given tensors in place with the values of the same names."""
    dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not dist.is_initialized())
