"""Small training steps on groups of processes: `models_worker.py CASES.json`, a list of {folder, world, out, ...}.

Importing TorchTitan takes longer than the steps, so this process imports it once and forks the ranks of every case.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from forge.attention import TreeLayout
from forge.models._patches_torchtitan import use_device
from forge.models.build import load_model
from forge.models.loaded import LoadedModel
from forge.service.distributed import init_process_group

# Two rows of tokens, of odd and of different lengths: tensor parallelism over 2 has to pad them.
ROWS = [[7, 3, 91, 12, 5, 44, 60, 2, 33], [18, 18, 70, 1, 9]]
ALONE = {f"{kind}_degree": 1 for kind in ("data_parallel_replicate", "data_parallel_shard")} | {
    f"{kind}_parallel_degree": 1 for kind in ("tensor", "pipeline", "context", "expert")
}


def losses_of_row(model: LoadedModel, row: list[int], hidden: torch.Tensor, *, total: int) -> Iterator[torch.Tensor]:
    """The row's next-token loss, as its share of `total` targets, from logits in two chunks."""
    tokens = torch.tensor(row)
    for chunk in torch.arange(len(row) - 1).chunk(2):
        logits = model.logits(hidden[chunk]).float()
        yield torch.nn.functional.cross_entropy(logits, tokens[chunk + 1], reduction="sum") / total


def hidden_of_row(model: LoadedModel, row: list[int]) -> torch.Tensor:
    positions = torch.arange(len(row))
    return model.hidden_states(torch.tensor([row]), positions[None], TreeLayout.from_lengths([len(row)]))


def loss_of_rows(model: LoadedModel, rows: list[list[int]], *, total: int) -> torch.Tensor:
    """All rows forward, for one backward pass."""
    return torch.stack(
        [loss for row in rows for loss in losses_of_row(model, row, hidden_of_row(model, row), total=total)]
    ).sum()


def backward_bit_by_bit(model: LoadedModel, rows: list[list[int]], *, total: int) -> torch.Tensor:
    """One row after the other, and in a row each chunk's logits before the hidden states behind them."""
    losses = []
    for row in rows:
        hidden = hidden_of_row(model, row)
        leaf = hidden.detach().requires_grad_()
        for loss in losses_of_row(model, row, leaf, total=total):
            loss.backward()
            losses.append(loss.detach())
        hidden.backward(leaf.grad)
    return torch.stack(losses).sum()


def gradients(model: LoadedModel) -> dict[str, torch.Tensor]:
    """Whole gradients by Hugging Face name."""
    whole = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        whole[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
    return whole


def one_step(case: dict[str, Any]) -> None:
    """Load, score, train, gather and save as this rank of the case; rank 0 writes what it found."""
    options = {"dtype": "float32", "device": "cpu", "seq_len": 64, **case.get("options", {})}
    degrees = SimpleNamespace(**{**ALONE, **case.get("degrees", {})})
    if case["world"] > 1 or options["dtype"] == "bfloat16":
        init_process_group("gloo")
    model = load_model(case["folder"], parallelism=degrees, **options)
    group = model.data_parallel_group()
    mine = ROWS if group is None else ROWS[dist.get_rank(group) :: dist.get_world_size(group)]
    total = sum(len(row) - 1 for row in ROWS)
    parameters = dict(model.named_parameters())
    lengths: list[int] = []
    model.module.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    with torch.no_grad():  # a pass without a backward pass leaves nothing behind
        loss_of_rows(model, mine, total=total)
    same_parameters = all(now is parameters[name] for name, now in model.named_parameters())
    if case.get("bit_by_bit"):
        loss = backward_bit_by_bit(model, mine, total=total)
    else:
        loss = loss_of_rows(model, mine, total=total)
        loss.backward()
        loss = loss.detach()
    if group is not None:
        dist.all_reduce(loss, group=group)
    result = {
        "loss": loss,
        "gradients": gradients(model),
        "weights": dict(model.hf_tensors(torch.float32)),
        "weight_dtypes": {str(p.dtype) for _, p in model.named_parameters()},
        "distributed": dist.is_initialized(),
        "same_parameters": same_parameters,
        "lengths": lengths,
        "logits_later": model.logits(torch.ones(2, 32, dtype=model.dtype)).detach(),
    }
    out = Path(case["out"])
    model.save_hf(out / "hf")
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(result, out / "result.pt")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def run_rank(case: dict[str, Any], rank: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case["world"])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    one_step(case)


def main(cases_file: str) -> None:
    use_device("cpu")
    import forge.models.decoder
    import forge.models.parallel  # noqa: F401 - for the ranks

    fork = multiprocessing.get_context("fork")
    for case in json.loads(Path(cases_file).read_text()):
        Path(case["out"]).mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = [fork.Process(target=run_rank, args=(case, rank, port)) for rank in range(case["world"])]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(f"case {case} failed: exit statuses {[process.exitcode for process in ranks]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
