"""A model on this rank: what the actors compute with, and the weights under their Hugging Face names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from forge.models import memory
from forge.models.architectures import Architecture
from forge.models.hf_folder import write_config, write_weights
from forge.models.pipeline import Stage

if TYPE_CHECKING:
    from torchtitan.distributed import ParallelDims

    from forge.attention import TreeLayout
    from forge.models.lora import LoRA


@dataclass(kw_only=True, slots=True)
class Weight:
    """One weight of the checkpoint."""

    shape: tuple[int, ...]
    stage: int
    """The pipeline stage that holds it."""
    module: nn.Module | None
    """Where it is a parameter; None on the other stages."""
    attribute: str
    """Its name there. Look it up when it is needed: sharding replaces the parameter."""


class LoadedModel:
    """A model on this rank. Every method is called on every rank, in the same order.

    Attributes:
        module: the TorchTitan decoder; its parameters are what an optimizer takes. Under FSDP2 or tensor parallelism
            they are DTensors; gradients are summed over the data-parallel ranks, never averaged. Under pipeline
            parallelism it has this stage's layers only.
        stage: this rank's place in the pipeline.
        config: the content of the checkpoint's `config.json`.
        architecture: the same, as far as this library uses it.
        parallel_dims: TorchTitan's account of the degrees, and its meshes.
        device: where it computes.
        dtype: what it computes in; the parameters that are trained are float32.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        weights: dict[str, Weight],
        adapters: dict[str, Weight],
        lora: LoRA | None,
        stage: Stage,
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
        self.stage = stage
        self.config = config
        self.architecture = architecture
        self.parallel_dims = parallel_dims
        self.device = device
        self.dtype = dtype
        self._weights = weights
        self._adapters = adapters
        self._lora = lora
        self._folder = folder
        self._bytes_per_token = bytes_per_token
        self._seq_len = seq_len

    def hidden_states(
        self, tokens_1T: Tensor, positions_1T: Tensor, layout: TreeLayout, *, received: Tensor | None = None
    ) -> Tensor:
        """Last hidden states after the final norm, [T, D], a plain tensor with gradient; no logits are computed.

        Under pipeline parallelism a stage goes on from what the one before made, and all but the last return what the
        next one goes on from.

        Args:
            tokens_1T: token ids of one packed row.
            positions_1T: each token's position in its own sequence, below the `seq_len` the model was loaded with.
            layout: who attends to whom (`forge.attention.TreeLayout`); covers the T tokens.
            received: `received_shape(T)`, what the stage before returned; None on the first stage.
        """
        length = tokens_1T.shape[1]
        # Tensor parallelism splits the sequence between layers; the padding is attended to by nobody and cut off again.
        missing = -length % self.parallel_dims.tp
        if missing:
            tokens_1T = nn.functional.pad(tokens_1T, (0, missing))
            positions_1T = nn.functional.pad(positions_1T, (0, missing))
        if received is not None and self.parallel_dims.tp_enabled:
            mesh = self.parallel_dims.get_mesh("tp")
            received = DTensor.from_local(received, mesh, [Shard(1)], run_check=False)
        start = tokens_1T if received is None else received
        hidden_1TD = self.module(start, positions=positions_1T, attention_masks=layout)
        if isinstance(hidden_1TD, DTensor):
            hidden_1TD = hidden_1TD.to_local()
        return hidden_1TD[0, :length] if self.stage.is_last else hidden_1TD

    def received_shape(self, length: int) -> tuple[int, ...]:
        """The shape of what a stage gets from the one before, for a row of `length` tokens."""
        tp = self.parallel_dims.tp
        return 1, -(-length // tp), self.architecture.dim

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

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As `named_parameters`, those that are trained: all of them, or with LoRA the adapters, under peft's names."""
        return self._here(self._adapters or self._weights)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Hugging Face names and this rank's parameters (shards), whatever wraps them; tied weights once.

        With LoRA the frozen ones, without the adapters.
        """
        return self._here(self._weights)

    def _here(self, weights: Mapping[str, Weight]) -> Iterator[tuple[str, nn.Parameter]]:
        self._release_gathered()
        for name, weight in weights.items():
            if weight.module is not None:
                yield name, getattr(weight.module, weight.attribute)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all weights, in the order of `hf_tensors` on rank 0."""
        return {name: weight.shape for name, weight in self._weights.items()}

    def hf_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole weights, one at a time, as copies that later steps do not change.

        LoRA adapters are merged into the weights that they belong to.

        Gathering is collective: every rank iterates to the end, whether or not it wants the values. Rank 0 gets all
        weights, another rank those of its own pipeline stage. A tied output projection is not among them, as it is not
        in a Hugging Face folder.
        """
        return self._gathered(self._weights, dtype)

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The same of the LoRA adapters, in float32 under peft's names."""
        return self._gathered(self._adapters, torch.float32)

    def _gathered(self, weights: Mapping[str, Weight], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        here = dict(self._here(weights))
        for name, weight in weights.items():
            if name in here:
                merged = getattr(weight.module, "merged_weight", None) if weight.attribute == "weight" else None
                whole = merged().to(dtype) if merged else _whole(here[name], dtype)
                if weight.stage > 0 and self.stage.holds_rank_0:
                    self.stage.to_first(whole)
                yield name, whole
            elif self.stage.is_first and self.stage.holds_rank_0:
                yield (
                    name,
                    self.stage.from_stage(weight.stage, torch.empty(weight.shape, dtype=dtype, device=self.device)),
                )

    def save_hf(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write a folder that transformers and vllm load: weights, config, tokenizer and generation settings.

        Args:
            folder: made if missing. Rank 0 writes; the others take part in gathering the weights.
            dtype: of the weights; None is what the model computes in, so that a reader's logits are the same.
        """
        dtype = dtype or self.dtype
        tensors = self.hf_tensors(dtype)
        if dist.is_initialized() and dist.get_rank() != 0:
            for _ in tensors:
                pass
            return
        self.write_hf(folder, tensors, dtype=dtype)

    def write_hf(self, folder: str | Path, tensors: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype) -> None:
        """The part of `save_hf` that writes: `tensors` as `hf_tensors(dtype)` gave them on rank 0, now or earlier. It
        does not touch the module, so another thread may run it during a training step."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        sizes = {name: torch.Size(w.shape).numel() * dtype.itemsize for name, w in self._weights.items()}
        write_weights(target, tensors, sizes=sizes)
        write_config(target, self.config, source=self._folder, dtype=str(dtype).removeprefix("torch."))

    def save_adapter(self, folder: str | Path, *, base: str) -> None:
        """Write the LoRA adapter for peft; rank 0 writes.

        Args:
            base: what the adapter's config calls the model that it belongs to.
        """
        from forge.models.lora import write_adapter

        assert self._lora is not None, "the model was loaded without LoRA"
        tensors = {name: tensor.cpu() for name, tensor in self.adapter_tensors()}
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_adapter(Path(folder), tensors, lora=self._lora, base=base)

    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold different data, this one included; None when there is only one."""
        if not self.parallel_dims.dp_enabled:
            return None
        return self.parallel_dims.get_mesh("batch").get_group()

    def tokens_that_fit(self) -> int:
        """The longest packed row to compute at once, in tokens; at least `seq_len`. See `forge.models.memory`."""
        trainable = any(p.requires_grad for p in self.module.parameters())
        trained_whole = trainable and not self._adapters
        bytes_per_parameter = memory.TRAINING_BYTES_PER_PARAMETER if trained_whole else self.dtype.itemsize
        state_bytes = self.architecture.num_parameters * bytes_per_parameter
        adapter_parameters = sum(torch.Size(w.shape).numel() for w in self._adapters.values())
        state_bytes += adapter_parameters * memory.TRAINING_BYTES_PER_PARAMETER
        # A pipeline's stage has a share of the layers, and as many rows in flight as make up for that.
        shards = self.parallel_dims.dp_shard * self.parallel_dims.tp * self.parallel_dims.pp
        if self.device.type == "cuda":
            total, share = torch.cuda.get_device_properties(self.device).total_memory, 0.8
        else:
            # Main memory is shared with the generator and the other ranks.
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            share = 0.25 / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return memory.tokens_that_fit(
            total_bytes=total,
            state_bytes=state_bytes // shards,
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


def _whole(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """The whole weight as a copy, from this rank's shard and, if that is not all, those of the others."""
    whole = parameter.detach().to(dtype)  # before gathering, so that half as much travels in bf16
    own = parameter.detach()
    if isinstance(whole, DTensor):
        whole, own = whole.full_tensor(), own.to_local()
    return whole.clone() if whole.data_ptr() == own.data_ptr() else whole
