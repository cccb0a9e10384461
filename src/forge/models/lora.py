"""LoRA: a small trainable product of two matrices beside a frozen linear layer (arXiv 2106.09685), as peft does it.

Imports TorchTitan; see `forge.models.decoder`. TorchTitan's own converter has no dropout, cannot tell keys from values,
and would give the output projection an adapter, which is scored apart from the model here.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import spmd_types as spmd
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.sharding import ShardingConfig

from forge.models.decoder import LINEAR_LAYERS
from forge.models.loaded import Weight


class LoRA(Protocol):
    """What adapters are made of (`forge.config.LoRAConfig`)."""

    rank: int
    alpha: float
    dropout: float

    @property
    def target_modules(self) -> Sequence[str] | None: ...


class LoRALinear(Linear):
    """`y = W x + b + alpha / rank · B A dropout(x)` with W and b frozen."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        rank: int
        alpha: float
        dropout: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        down, up = _adapter_shardings(config.sharding_config)
        self.lora_A = _matrix(config.in_features, config.rank, down)
        self.lora_B = _matrix(config.rank, config.out_features, up)
        self.scaling = config.alpha / config.rank
        self.dropout = config.dropout

    def forward(self, input: Tensor) -> Tensor:
        dropped = nn.functional.dropout(input, self.dropout, self.training) if self.dropout else input
        return super().forward(input) + self.scaling * self.lora_B(self.lora_A(dropped))

    def merged_weight(self) -> Tensor:
        """The whole weight with the adapter added, float32; every rank calls it."""
        product = _whole(self.lora_B.weight) @ _whole(self.lora_A.weight)
        return _whole(self.weight) + self.scaling * product


def add_adapters(module: nn.Module, weights: Mapping[str, Weight], lora: LoRA) -> dict[str, Weight]:
    """Puts an adapter beside every targeted linear layer of a model that has no storage yet.

    Args:
        weights: of the base model; where a layer was replaced, they are looked up in the new one from now on.

    Returns:
        peft's name of each matrix → where it is, such as model.layers.0.self_attn.q_proj.lora_A.weight.
    """
    places = {child: (parent, name) for parent in module.modules() for name, child in parent.named_children()}
    made: dict[nn.Module, LoRALinear] = {}
    adapters = {}
    for name, weight in weights.items():
        layer, _, attribute = name.rpartition(".")
        if layer.rpartition(".")[2] not in (lora.target_modules or LINEAR_LAYERS):
            continue
        base = weight.module
        if isinstance(base, Linear):  # None on the other stages of a pipeline
            if base not in made:
                made[base] = _with_adapter(base, lora)
                setattr(*places[base], made[base])
            weight.module = made[base]
        if attribute == "weight":
            out_features, in_features = weight.shape
            shapes = {"lora_A": (lora.rank, in_features), "lora_B": (out_features, lora.rank)}
            for matrix, shape in shapes.items():
                adapters[f"{layer}.{matrix}.weight"] = Weight(
                    shape=shape, stage=weight.stage, module=getattr(weight.module, matrix, None), attribute="weight"
                )
    return adapters


@torch.no_grad()
def initialize(adapters: Mapping[str, Weight], *, seed: int) -> None:
    """A at random and B zero, as in peft, so that the model begins as it was; the same under every layout."""
    for name, weight in adapters.items():
        if weight.module is None:
            continue
        parameter = getattr(weight.module, weight.attribute)
        whole = torch.zeros(weight.shape)
        if ".lora_A." in name:
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
        if isinstance(parameter, DTensor):
            shape, offsets = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            box = tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))
            parameter.to_local().copy_(whole[box])
        else:
            parameter.copy_(whole)


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], *, lora: LoRA, base: str) -> None:
    """Write an adapter folder that peft, transformers and vllm load.

    Args:
        tensors: the matrices under the names of `add_adapters`, whole.
        base: the model that the adapter belongs to, a folder or hub id.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    named = {f"base_model.model.{name}": tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": list(lora.target_modules or LINEAR_LAYERS),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _with_adapter(base: Linear, lora: LoRA) -> LoRALinear:
    made: LoRALinear = LoRALinear.Config(
        in_features=base.in_features,
        out_features=base.out_features,
        bias=base.bias is not None,
        param_init=base._param_init,
        sharding_config=base._sharding_config,
        rank=lora.rank,
        alpha=lora.alpha,
        dropout=lora.dropout,
    ).build()
    return made


def _matrix(in_features: int, out_features: int, sharding: ShardingConfig | None) -> Linear:
    made: Linear = Linear.Config(
        in_features=in_features,
        out_features=out_features,
        sharding_config=sharding,
        param_init={"weight": skip_param_init},
    ).build()
    return made


def _adapter_shardings(base: ShardingConfig | None) -> tuple[ShardingConfig | None, ShardingConfig | None]:
    """Shardings of A and B under tensor parallelism: each follows the base weight in the dimension that they share."""
    if base is None:
        return None, None
    whole, weight = dense_param_placement(tp=spmd.R), base.state_shardings["weight"]
    down, up = (whole, weight) if weight == dense_param_placement(tp=spmd.S(0)) else (weight, whole)
    return ShardingConfig(state_shardings={"weight": down}), ShardingConfig(state_shardings={"weight": up})


def _whole(parameter: nn.Parameter) -> Tensor:
    values = parameter.detach()
    return (values.full_tensor() if isinstance(values, DTensor) else values).float()
