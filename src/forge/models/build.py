"""A Hugging Face checkpoint as a TorchTitan model, ready to train or to score with, on one process or many."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from forge.models import memory
from forge.models._patches_torchtitan import use_device
from forge.models.architectures import (
    Architecture,
    check_architecture,
    check_pipeline_parallel,
    check_seq_len,
    check_tensor_parallel,
)
from forge.models.hf_folder import ModelNotFound, WeightFiles, read_config, resolve_folder
from forge.models.loaded import LoadedModel, Weight
from forge.models.pipeline import Stage
from forge.precision import resolve_dtype

if TYPE_CHECKING:
    from torchtitan.distributed import ParallelDims

    from forge.models.lora import LoRA
    from forge.models.parallel import ActivationCheckpointing, Parallelism

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(
    model: str,
    *,
    parallelism: Parallelism,
    dtype: str,
    device: str,
    seq_len: int,
    activation_checkpointing: ActivationCheckpointing = "none",
    compile: bool = False,
    trainable: bool = True,
    lora: LoRA | None = None,
    seed: int = 0,
) -> LoadedModel:
    """Build the TorchTitan model of a Hugging Face checkpoint and load its weights.

    Every rank calls it, in the process group that `forge.service.distributed.init_process_group` started. Without one
    it is a model in one process, which computes in float32 or is not trained.

    Args:
        model: a local folder, a hub id, or `hf://` and a hub id.
        parallelism: degrees; a data_parallel_shard_degree of -1 means the rest of the ranks.
        dtype: "float32"; "bfloat16": computes in bf16, with float32 weights for the optimizer and float32 gradient
            reductions; "auto": see `forge.precision`.
        device: "cpu" or "cuda" (this process's current CUDA device).
        seq_len: the longest single sequence in tokens; a packed row may be longer.
        activation_checkpointing: "none", "full" or "selective".
        compile: run the blocks through torch.compile.
        trainable: False for a frozen model: no gradients, and with bfloat16 no float32 weights.
        lora: trains adapters beside the weights, which are frozen then (`forge.config.LoRAConfig`).
        seed: of the adapters' first values.

    Raises:
        UnsupportedArchitecture: the checkpoint would be computed wrongly; the message says why.
        ModelNotFound: no such model, or weights missing, superfluous, torn or of another shape than config.json says.
        ValueError: degrees that do not fit the model or the number of processes; a seq_len beyond the model's.

    Example:
        >>> model = load_model("tiny", parallelism=ParallelismConfig(), dtype="float32", device="cpu", seq_len=512)
        >>> hidden_TD = model.hidden_states(tokens_1T, positions_1T, TreeLayout.from_lengths([tokens_1T.shape[1]]))
        >>> logits_NV = model.logits(hidden_TD[-4:])
    """
    folder = resolve_folder(model)
    config = read_config(folder)
    architecture = _checked(config, parallelism, seq_len=seq_len)
    compute_dtype = _DTYPES[resolve_dtype(dtype, with_gpus=device == "cuda")]
    on, dims, stage = _place(device, parallelism)
    module, weights, adapters = _stage_of_decoder(architecture, stage, seq_len=seq_len, lora=lora)
    trained = (adapters if lora else weights) if trainable else {}
    _spread(
        module,
        dims,
        compute_dtype=compute_dtype,
        device=on,
        trained=[getattr(w.module, w.attribute) for w in trained.values() if w.module is not None],
        activation_checkpointing=activation_checkpointing,
        compile=compile,
    )
    _materialize(module, weights, folder, device=on)
    if lora:
        from forge.models.lora import initialize

        initialize(adapters, seed=seed)
    bytes_per_token = memory.activation_bytes_per_token(
        architecture, number_bytes=compute_dtype.itemsize, checkpointing=activation_checkpointing, trainable=trainable
    )
    return LoadedModel(
        module=module,
        weights=weights,
        adapters=adapters,
        lora=lora,
        stage=stage,
        config=config,
        architecture=architecture,
        parallel_dims=dims,
        folder=folder,
        device=on,
        dtype=compute_dtype,
        bytes_per_token=bytes_per_token,
        seq_len=seq_len,
    )


def _checked(config: dict[str, Any], parallelism: Parallelism, *, seq_len: int) -> Architecture:
    """What config.json describes, once everything about it was found to fit."""
    architecture = check_architecture(config)
    check_seq_len(architecture, seq_len)
    check_tensor_parallel(architecture, parallelism.tensor_parallel_degree)
    check_pipeline_parallel(architecture, parallelism.pipeline_parallel_degree)
    return architecture


def _place(device: str, parallelism: Parallelism) -> tuple[torch.device, ParallelDims, Stage]:
    """This rank's device, and where it is among the others."""
    # TorchTitan is imported here and nowhere above: only a process that loads a model pays for it.
    use_device(device)
    from forge.models.parallel import parallel_dims

    on = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    dims = parallel_dims(parallelism)
    return on, dims, Stage(dims.get_mesh("pp") if dims.pp_enabled else None)


def _stage_of_decoder(
    architecture: Architecture, stage: Stage, *, seq_len: int, lora: LoRA | None
) -> tuple[nn.Module, dict[str, Weight], dict[str, Weight]]:
    """This stage's part of the decoder, without storage, all weights of the checkpoint, and all LoRA adapters."""
    from forge.models.decoder import decoder_config, keep_stage, weights_of
    from forge.models.lora import add_adapters

    with torch.device("meta"):
        module = decoder_config(architecture, seq_len=seq_len).build()
        module._skip_lm_head = True
        weights = weights_of(module, stages=stage.count)
        keep_stage(module, weights, stage)
        adapters = add_adapters(module, weights, lora) if lora else {}
    return module, weights, adapters


def _spread(
    module: nn.Module,
    dims: ParallelDims,
    *,
    compute_dtype: torch.dtype,
    device: torch.device,
    trained: list[nn.Parameter],
    activation_checkpointing: ActivationCheckpointing,
    compile: bool,
) -> None:
    """Apply everything that changes the module, while its parameters are still without storage."""
    from forge.models import parallel

    kept = {id(parameter) for parameter in trained}
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.float32 if id(parameter) in kept else compute_dtype)
        parameter.requires_grad_(id(parameter) in kept)
    sharded = dims.world_size > 1 or (bool(trained) and compute_dtype != torch.float32)
    if sharded and not dist.is_initialized():
        raise RuntimeError(
            "training in bfloat16 needs a process group, even of one process, for FSDP2 keeps the float32 weights: "
            "call forge.service.distributed.init_process_group first."
        )
    if dims.tp_enabled:
        parallel.apply_tensor_parallel(module, dims)
    if compile:
        # Before checkpointing: compiled around it, the graph break at attention would leave the block uncompiled.
        parallel.apply_compile(module)
    if trained:
        parallel.apply_activation_checkpointing(module, activation_checkpointing)
    if sharded:
        # With tensor parallelism alone too: FSDP2 is what reduces the gradients of the norms over its ranks.
        parallel.apply_fsdp(module, dims, param_dtype=compute_dtype, device=device)


def _materialize(module: nn.Module, weights: Mapping[str, Weight], folder: Path, *, device: torch.device) -> None:
    """Give the parameters storage and fill it, each rank reading only its shards from the files."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    module.to_empty(device=device)
    module.init_states(buffer_device=device)
    tables = [block.attention.rope for block in map(_unwrapped, module.layers.values())]
    for table in tables[1:]:  # the same numbers in every layer: kept once
        table.cache = tables[0].cache
    with WeightFiles(folder) as files, torch.no_grad():
        _check_weights(files.shapes(), {name: weight.shape for name, weight in weights.items()}, folder)
        for name, weight in weights.items():
            if weight.module is None:
                continue
            parameter = getattr(weight.module, weight.attribute)
            if isinstance(parameter, DTensor):
                shape, offsets = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
                if 0 not in shape:
                    parameter.to_local().copy_(files.read(name, offsets=offsets, shape=shape))
            else:
                parameter.copy_(files.read(name, offsets=[0] * parameter.ndim, shape=parameter.shape))


def _unwrapped(block: nn.Module) -> nn.Module:
    """The block inside the wrapper of activation checkpointing, if it has one."""
    return getattr(block, "_checkpoint_wrapped_module", block)


def _check_weights(found: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]], folder: Path) -> None:
    # Old checkpoints carry the rotary frequencies, some with tied weights carry the output projection as well.
    ignored = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    if "lm_head.weight" not in wanted:
        ignored.add("lm_head.weight")
    problems = []
    if missing := [name for name in wanted if name not in found]:
        problems.append(f"{len(missing)} weights are missing, first {missing[0]}")
    if extra := [name for name in found if name not in wanted and name not in ignored]:
        problems.append(f"{len(extra)} weights do not belong to this architecture, first {extra[0]}")
    for name in wanted.keys() & found.keys():
        if wanted[name] != found[name]:
            problems.append(f"{name} has shape {list(found[name])}, config.json says {list(wanted[name])}")
    if problems:
        raise ModelNotFound(f"the weights in {folder} do not fit its config.json: {'; '.join(sorted(problems)[:5])}.")
