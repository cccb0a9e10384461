"""Spreading a TorchTitan decoder over processes: tensor parallelism, activation checkpointing, compilation, FSDP2.

Imports TorchTitan; see `forge.models.decoder`.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.qwen3.model import Qwen3Model

ActivationCheckpointing = Literal["none", "full", "selective"]


class Parallelism(Protocol):
    """How a model is spread (`forge.config.ParallelismConfig`)."""

    data_parallel_replicate_degree: int
    data_parallel_shard_degree: int
    tensor_parallel_degree: int
    pipeline_parallel_degree: int
    context_parallel_degree: int
    expert_parallel_degree: int


def parallel_dims(parallelism: Parallelism) -> ParallelDims:
    """The degrees as TorchTitan's `ParallelDims`, for the processes of the process group (1 where there is none).

    Raises:
        ValueError: the degrees do not multiply to the number of processes, or a kind is not available.
    """
    for kind in ("context", "expert"):  # forge.config refuses them, and says why
        degree = getattr(parallelism, f"{kind}_parallel_degree")
        if degree != 1:
            raise ValueError(f"parallelism.{kind}_parallel_degree must be 1, got {degree}.")
    replicate, shard = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
    tp, pp = parallelism.tensor_parallel_degree, parallelism.pipeline_parallel_degree
    world = dist.get_world_size() if dist.is_initialized() else 1
    if shard == -1:
        shard = max(world // (replicate * tp * pp), 1)
    if replicate * shard * tp * pp != world:
        needed = replicate * shard * tp * pp
        raise ValueError(
            f"the parallelism degrees must multiply to the number of trainer processes, but data_parallel_replicate "
            f"{replicate} x data_parallel_shard {shard} x tensor_parallel {tp} x pipeline_parallel {pp} = {needed} and "
            f"there are {world}. Set services.trainer.procs to {needed}, or change a degree."
        )
    # "partial_dtensor" is the backend of TorchTitan that runs on gloo, and it needs no type checking at run time.
    set_spmd_backend("partial_dtensor")
    return ParallelDims(
        dp_replicate=replicate,
        dp_shard=shard,
        cp=1,
        tp=tp,
        pp=pp,
        ep=1,
        world_size=world,
        spmd_backend="partial_dtensor",
    )


def apply_tensor_parallel(module: Qwen3Model, dims: ParallelDims) -> None:
    """Shard heads, feed-forward and vocabulary; between the layers, the sequence (its length must divide evenly)."""
    module.parallelize(dims)
    if module.enable_weight_tying:
        # Sharding made two parameters of one: FSDP would gather, and reduce the gradient of, each.
        module.tok_embeddings.weight = module.lm_head.weight


def apply_activation_checkpointing(module: Qwen3Model, kind: ActivationCheckpointing) -> None:
    """Recompute whole blocks in the backward pass ("full"), or all but the costly products ("selective")."""
    if kind == "full":
        FullAC.Config().build().apply(module)
    elif kind == "selective":
        SelectiveAC.Config().build().apply(module)
    elif kind != "none":
        raise ValueError(f"activation_checkpointing must be none, full or selective, got {kind!r}.")


def apply_compile(module: Qwen3Model) -> None:
    """Compile each block; attention is a graph break in it (`forge.models.decoder.TreeAttention`)."""
    for block in module.layers.values():
        block.compile()


def apply_fsdp(module: Qwen3Model, dims: ParallelDims, *, param_dtype: torch.dtype, device: torch.device) -> None:
    """Shard parameters, gradients and optimizer state (FSDP2); gradients are summed over the ranks, not averaged.

    Each block is a unit. Final norm and output projection belong to the root, and stay gathered from the forward pass
    to the end of the backward pass: the projection is applied to many chunks of tokens, outside the forward pass.
    TorchTitan's own `apply_fsdp_to_decoder` gives them a unit of two modules, whose hooks expect both to run once.
    """
    names = ["dp_replicate", "fsdp"] if dims.dp_replicate_enabled else ["fsdp"]
    mesh = dims.get_mesh(names)
    # Reductions in float32: gradients of many short responses are small beside each other's rounding in bf16.
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Alone on a CPU it only keeps the float32 weights. Rounding them twice a step instead of once is a tenth of a step
    # of 300 tokens, and so is dividing the gradients by 1.
    alone = device.type == "cpu" and mesh.size() == 1
    for block in module.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not alone)
    if not module.enable_weight_tying and module.tok_embeddings is not None:
        fully_shard(module.tok_embeddings, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if alone:
        return
    for unit in fsdp_units(module):
        # The loss is normalized over the whole batch, whichever rank holds how much of it.
        unit.set_gradient_divide_factor(1.0)
        if device.type == "cpu":
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def fsdp_units(module: torch.nn.Module) -> list[FSDPModule]:
    """The parts that FSDP2 gathers and reduces, each by itself; empty where it is not applied."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]
