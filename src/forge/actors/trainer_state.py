"""Named tensors to and from a folder of safetensors shards, under any parallel layout; written in the background."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter


class BackgroundWriter:
    """Copies a trainer's state to main memory, and writes the copy while training goes on.

    Every rank has one, writes its own shards, and takes part in each call. Safetensors, because what is read back must
    never be a pickle.
    """

    def __init__(self) -> None:
        # A group of its own: its messages must not meet those of the step that runs meanwhile.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forge-checkpoint")
        self._writing: list[Future[Any]] = []

    def start(self, tensors: dict[str, Tensor], folder: Path, *, also: Callable[[], None] | None = None) -> None:
        """Returns when the tensors are copied and may change; `also` is another thing to write, on its own thread.

        Raises:
            RuntimeError: the last one is still being written.
        """
        if self._writing:
            raise RuntimeError("a checkpoint is still being written: await finished() before the next one.")
        folder.mkdir(parents=True, exist_ok=True)
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        alone = self._group is None
        written = dcp.async_save(tensors, storage_writer=writer, process_group=self._group, no_dist=alone)
        assert isinstance(written, Future)
        self._writing = [written]
        if also is not None:
            self._writing.append(self._thread.submit(also))

    async def finished(self) -> None:
        """Waits for what is being written; raises what it raised."""
        writing, self._writing = self._writing, []
        results = await asyncio.gather(*map(asyncio.wrap_future, writing), return_exceptions=True)
        for error in results:
            if isinstance(error, CheckpointException):  # no Exception itself; holds those of the ranks
                first = next(iter(error.failures.values()))[0]
                raise OSError(f"writing the checkpoint failed: {first}") from first
            if isinstance(error, BaseException):
                raise error


def read_state(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fills the given tensors in place with the values of the same names."""
    dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not dist.is_initialized())


def save_random_state(path: Path) -> None:
    """Writes the states of torch's and Python's generators, which a custom loss may draw from, as JSON."""
    state = {"torch": torch.get_rng_state().tolist(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state().tolist()
    path.write_text(json.dumps(state))


def load_random_state(path: Path) -> None:
    """Puts them back; nothing where the checkpoint has none, as for a rank that did not exist then."""
    if not path.exists():
        return
    state = json.loads(path.read_text())
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
