"""A Hugging Face checkpoint as a TorchTitan model, ready to train or to score with, on one process or many."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from forge.models import memory
from forge.models._patches_torchtitan import use_device
from forge.models.architectures import Architecture, check_architecture, check_seq_len, check_tensor_parallel
from forge.models.hf_folder import ModelNotFound, WeightFiles, read_config, resolve_folder, write_config, write_weights
from forge.precision import resolve_dtype

if TYPE_CHECKING:
    from torchtitan.distributed import ParallelDims

    from forge.attention import TreeLayout
    from forge.models.parallel import ActivationCheckpointing, Parallelism

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LoadedModel:
    """A model on this rank. Every method is called on every rank, in the same order.

    Attributes:
        module: the TorchTitan decoder; its parameters are what an optimizer takes. Under FSDP2 or tensor parallelism
            they are DTensors; gradients are summed over the data-parallel ranks, never averaged.
        config: the content of the checkpoint's `config.json`.
        architecture: the same, as far as this library uses it.
        parallel_dims: TorchTitan's account of the degrees, and its meshes.
        device: where it computes.
        dtype: what it computes in; the parameters of a trainable model are float32.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        locations: dict[str, tuple[nn.Module, str]],
        config: dict[str, Any],
        architecture: Architecture,
        parallel_dims: ParallelDims,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        bytes_per_token: int,
        seq_len: int,
    ) -> None:
        self.module = module
        self.config = config
        self.architecture = architecture
        self.parallel_dims = parallel_dims
        self.device = device
        self.dtype = dtype
        self._locations = locations
        self._folder = folder
        self._bytes_per_token = bytes_per_token
        self._seq_len = seq_len

    def hidden_states(self, tokens_1T: Tensor, positions_1T: Tensor, layout: TreeLayout) -> Tensor:
        """Last hidden states after the final norm, [T, D], a plain tensor with gradient; no logits are computed.

        Args:
            tokens_1T: token ids of one packed row.
            positions_1T: each token's position in its own sequence, below the `seq_len` the model was loaded with.
            layout: who attends to whom (`forge.attention.TreeLayout`); covers the T tokens.
        """
        length = tokens_1T.shape[1]
        # Tensor parallelism splits the sequence between layers; the padding is attended to by nobody and cut off again.
        missing = -length % self.parallel_dims.tp
        if missing:
            tokens_1T = nn.functional.pad(tokens_1T, (0, missing))
            positions_1T = nn.functional.pad(positions_1T, (0, missing))
        hidden_1TD = self.module(tokens_1T, positions=positions_1T, attention_masks=layout)
        if isinstance(hidden_1TD, DTensor):
            hidden_1TD = hidden_1TD.to_local()
        return hidden_1TD[0, :length]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """[N, V] logits, whole and plain, in the compute dtype, with gradient.

        May be called for many chunks of one row's hidden states, recomputed while their gradient is taken, and each
        chunk's gradient may be taken by itself before that of the hidden states: the projection stays gathered until
        the backward pass through `hidden_states` ends, and only then is its gradient reduced over the ranks.
        """
        self._gather_root()
        logits_1NV = self.module.lm_head(hidden_ND.unsqueeze(0))
        if isinstance(logits_1NV, DTensor):
            # Each rank of tensor parallelism computed a share of the vocabulary for the same tokens.
            logits_1NV = logits_1NV.redistribute(placements=[Replicate()] * logits_1NV.device_mesh.ndim).to_local()
        return logits_1NV[0]

    def output_weight(self) -> Tensor:
        """The output projection [V, D], whole and plain, with gradient, in the compute dtype; see `logits`.

        Under tensor parallelism every rank then computes the whole vocabulary: `logits` is the cheaper way there.
        """
        self._gather_root()
        weight_VD = self.module.lm_head.weight
        if isinstance(weight_VD, DTensor):
            weight_VD = weight_VD.redistribute(placements=[Replicate()] * weight_VD.device_mesh.ndim).to_local()
        return weight_VD

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Hugging Face names and this rank's parameters (shards), whatever wraps them; tied weights once."""
        self._release_gathered()
        for name, (submodule, attribute) in self._locations.items():
            yield name, getattr(submodule, attribute)

    def hf_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole weights, one at a time, as copies that later steps do not change.

        Gathering is collective: every rank iterates to the end, whether or not it wants the values.
        A tied output projection is not among them, as it is not in a Hugging Face folder.
        """
        for name, parameter in self.named_parameters():
            shard = parameter.detach().to(dtype)  # before gathering, so that half as much travels in bf16
            if isinstance(shard, DTensor):
                yield name, shard.full_tensor()
            else:
                yield name, shard.clone() if shard.data_ptr() == parameter.data_ptr() else shard

    def save_hf(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write a folder that transformers and vllm load: weights, config, tokenizer and generation settings.

        Args:
            folder: made if missing. Rank 0 writes; the others take part in gathering the weights.
            dtype: of the weights; None is what the model computes in, so that a reader's logits are the same.
        """
        dtype = dtype or self.dtype
        target = Path(folder)
        sizes = {name: p.numel() * dtype.itemsize for name, p in self.named_parameters()}
        tensors = self.hf_tensors(dtype)
        if dist.is_initialized() and dist.get_rank() != 0:
            for _ in tensors:
                pass
            return
        target.mkdir(parents=True, exist_ok=True)
        write_weights(target, tensors, sizes=sizes)
        write_config(target, self.config, source=self._folder, dtype=str(dtype).removeprefix("torch."))

    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold different data, this one included; None when there is only one."""
        if not self.parallel_dims.dp_enabled:
            return None
        return self.parallel_dims.get_mesh("batch").get_group()

    def tokens_that_fit(self) -> int:
        """The longest packed row to compute at once, in tokens; at least `seq_len`. See `forge.models.memory`."""
        trainable = any(p.requires_grad for p in self.module.parameters())
        bytes_per_parameter = memory.TRAINING_BYTES_PER_PARAMETER if trainable else self.dtype.itemsize
        shards = self.parallel_dims.dp_shard * self.parallel_dims.tp
        if self.device.type == "cuda":
            total, share = torch.cuda.get_device_properties(self.device).total_memory, 0.8
        else:
            # Main memory is shared with the generator and the other ranks.
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            share = 0.25 / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return memory.tokens_that_fit(
            total_bytes=total,
            state_bytes=self.architecture.num_parameters * bytes_per_parameter // shards,
            bytes_per_token=self._bytes_per_token,
            share=share,
            at_least=self._seq_len,
        )

    def _gather_root(self) -> None:
        """Gather final norm and output projection, unless the forward pass left them gathered."""
        if hasattr(self.module, "unshard"):
            self.module.unshard()

    def _release_gathered(self) -> None:
        """Put the shards back: after a forward pass without a backward pass, gathered copies stand in their place."""
        for part in self.module.modules():
            if hasattr(part, "reshard"):
                part.reshard()


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
) -> LoadedModel:
    """Build the TorchTitan model of a Hugging Face checkpoint and load its weights.

    Every rank calls it; the number of ranks is that of the process group, or WORLD_SIZE. A process on its own with
    float32 starts no process group.

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
    architecture = check_architecture(config)
    check_seq_len(architecture, seq_len)
    check_tensor_parallel(architecture, parallelism.tensor_parallel_degree)
    compute_dtype = _DTYPES[resolve_dtype(dtype, with_gpus=device == "cuda")]

    # TorchTitan is imported here and nowhere above: only a process that loads a model pays for it.
    use_device(device)
    from forge.models.decoder import decoder_config, hf_locations
    from forge.models.parallel import parallel_dims

    dims = parallel_dims(parallelism)
    with torch.device("meta"):
        module = decoder_config(architecture, seq_len=seq_len).build()
    module._skip_lm_head = True
    locations = hf_locations(module)
    on = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    _spread(
        module,
        dims,
        compute_dtype=compute_dtype,
        device=on,
        trainable=trainable,
        activation_checkpointing=activation_checkpointing,
        compile=compile,
    )
    _materialize(module, locations, folder, device=on)
    return LoadedModel(
        module=module,
        locations=locations,
        config=config,
        architecture=architecture,
        parallel_dims=dims,
        folder=folder,
        device=on,
        dtype=compute_dtype,
        bytes_per_token=memory.activation_bytes_per_token(
            architecture,
            number_bytes=compute_dtype.itemsize,
            checkpointing=activation_checkpointing,
            trainable=trainable,
        ),
        seq_len=seq_len,
    )


def _spread(
    module: nn.Module,
    dims: ParallelDims,
    *,
    compute_dtype: torch.dtype,
    device: torch.device,
    trainable: bool,
    activation_checkpointing: ActivationCheckpointing,
    compile: bool,
) -> None:
    """Apply everything that changes the module, while its parameters are still without storage."""
    from forge.models import parallel

    stored_dtype = torch.float32 if trainable else compute_dtype
    for parameter in module.parameters():
        parameter.data = parameter.data.to(stored_dtype)
        parameter.requires_grad_(trainable)
    sharded = dims.world_size > 1 or stored_dtype != compute_dtype
    if sharded:
        parallel.start_process_group(device)
    if dims.tp_enabled:
        parallel.apply_tensor_parallel(module, dims)
    if compile:
        # Before checkpointing: compiled around it, the graph break at attention would leave the block uncompiled.
        parallel.apply_compile(module)
    if trainable:
        parallel.apply_activation_checkpointing(module, activation_checkpointing)
    if sharded:
        # With tensor parallelism alone too: FSDP2 is what reduces the gradients of the norms over its ranks.
        parallel.apply_fsdp(module, dims, param_dtype=compute_dtype, device=device)


def _materialize(
    module: nn.Module, locations: dict[str, tuple[nn.Module, str]], folder: Path, *, device: torch.device
) -> None:
    """Give the parameters storage and fill it, each rank reading only its shards from the files."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    module.to_empty(device=device)
    module.init_states(buffer_device=device)
    tables = [block.attention.rope for block in map(_unwrapped, module.layers.values())]
    for table in tables[1:]:  # the same numbers in every layer: kept once
        table.cache = tables[0].cache
    parameters = {name: getattr(submodule, attribute) for name, (submodule, attribute) in locations.items()}
    with WeightFiles(folder) as files, torch.no_grad():
        _check_weights(files.shapes(), {name: tuple(p.shape) for name, p in parameters.items()}, folder)
        for name, parameter in parameters.items():
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
