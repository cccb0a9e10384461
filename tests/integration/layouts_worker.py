"""One GRPO step under many parallel layouts: `layouts_worker.py JOB`, {model, large, alone, out, worlds: {N: layouts}}.

This process imports TorchTitan once and forks N ranks for each world; the ranks take one step under each of its
layouts, one after the other, in the same process group.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from forge.actors.trainer import Trainer
from forge.batching import make_batch
from forge.config import LoRAConfig, ParallelismConfig
from forge.models._patches_torchtitan import use_device
from tests.integration.batches import groups, settings

ROW = 64  # tokens: several rows for each rank, and not the same number


class OwnMean(nn.Module):
    """A user's loss that divides by a mean over the whole batch, so that it takes two passes."""

    def forward(self, logprobs: torch.Tensor, advantages: torch.Tensor, padding_mask: torch.Tensor) -> torch.Tensor:
        mask = padding_mask.float()
        mean = (logprobs.exp() * mask).sum() / mask.sum()
        return -(logprobs * advantages * mask).sum() / mean / mask.sum()


KINDS: dict[str, dict[str, Any]] = {
    "dapo": {"loss": "dapo"},
    "own_mean": {"loss": OwnMean()},
    "lora": {"loss": "dapo", "lora": LoRAConfig(rank=4)},
}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def published(trainer: Trainer) -> dict[str, torch.Tensor]:
    """What a push would send; empty but on rank 0."""
    trainer.collect_weights()
    return {name: tensor.clone() for name, tensor in trainer._outgoing.items()}


def one_step(model: str, kind: str, parallelism: ParallelismConfig, *, start: str | None) -> dict[str, Any]:
    training = settings(max_tokens_per_microbatch=ROW, entropy_coef=0.01, max_norm=0.5)
    trainer = Trainer(model=model, training=training, parallelism=parallelism, **KINDS[kind])
    before = published(trainer)
    ranks = trainer.data_parallel_ranks()
    value = trainer.train_step(*make_batch(groups(), ranks=ranks, pad_id=0))
    found = {
        "loss": value,
        "metrics": {k: v for k, v in trainer.metrics().items() if not k.startswith(("time/", "throughput/"))},
        "gradients": {name: whole(p.grad) for name, p in trainer._model.named_parameters() if p.requires_grad},
        "before": before,
        "after": published(trainer),
    }
    if start is not None:
        assert trainer.load(start) == 1
        found["loaded"] = published(trainer)
        found["second loss"] = trainer.train_step(*make_batch(groups(seed=1), ranks=ranks, pad_id=0))
    return found


def peak_growth(work: Callable[[], object]) -> int:
    """By how many bytes memory grew at most while `work` ran."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = memory_of("VmRSS")
    work()
    return memory_of("VmHWM") - before


def memory_of(what: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)]
    return int(line.split()[1]) * 1024


def gather_large(model: str, parallelism: ParallelismConfig) -> dict[str, Any]:
    """What collecting the weights of a larger model takes on this rank, in float32 and in the bf16 of a generator."""
    trainer = Trainer(model=model, training=settings(), parallelism=parallelism)
    first = peak_growth(trainer.collect_weights)
    again = peak_growth(trainer.collect_weights)
    half = Trainer(model=model, training=settings(), parallelism=parallelism, weights_dtype="bfloat16")
    return {"first": first, "again": again, "bfloat16": peak_growth(half.collect_weights)}


def run_rank(job: dict[str, Any], world: int, rank: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, degrees in job["worlds"][str(world)].items():
        parallelism = ParallelismConfig(**{"data_parallel_shard_degree": 1, **degrees})
        for kind in KINDS:
            start = job["alone"] if kind == "dapo" and world > 1 else None
            found = one_step(job["model"], kind, parallelism, start=start)
            torch.save(found, Path(job["out"]) / f"{name} {kind} {rank}.pt")
        if world == 2:
            torch.save(gather_large(job["large"], parallelism), Path(job["out"]) / f"{name} memory {rank}.pt")
    if world > 1:
        dist.barrier()
    else:
        trainer = Trainer(
            model=job["model"],
            training=settings(max_tokens_per_microbatch=ROW, entropy_coef=0.01, max_norm=0.5),
            loss="dapo",
        )
        trainer.train_step(*make_batch(groups(), ranks=1, pad_id=0))
        trainer.save(job["alone"])
        asyncio.run(trainer.save_finished())
        found = {"loaded": published(trainer)}
        found["second loss"] = trainer.train_step(*make_batch(groups(seed=1), ranks=1, pad_id=0))
        torch.save(found, Path(job["out"]) / "alone second.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


def main(job_file: str) -> None:
    use_device("cpu")
    import forge.models.decoder
    import forge.models.parallel  # noqa: F401 - for the ranks

    job = json.loads(Path(job_file).read_text())
    fork = multiprocessing.get_context("fork")
    for world in sorted(map(int, job["worlds"])):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = [fork.Process(target=run_rank, args=(job, world, rank, port)) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(f"{world} ranks: exit statuses {[process.exitcode for process in ranks]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
