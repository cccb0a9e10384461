"""An `Architecture` as a TorchTitan decoder, and where each Hugging Face weight lives in it.

Imports TorchTitan (4 s of CPU time), which must have been told its device before: `load_model` does both, in the
processes that train, and only there.

TorchTitan's Qwen3 decoder is its Llama decoder with two options, norms of queries and keys and a head size of its own,
so the three families are one model here. Rotary embeddings turn the two halves of a head, as in transformers, and not
neighbouring pairs as in TorchTitan's Llama: every weight is then the checkpoint's own, without permutation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.common.attention import GQAttention, QKVLinear
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.protocols.module import Module

from forge.attention import TreeLayout, attend
from forge.models.architectures import Architecture, RopeParameters
from forge.models.loaded import Weight
from forge.models.pipeline import Stage, stage_of_layer
from forge.models.rope import inverse_frequencies

# Weights always come from a checkpoint, so nothing is drawn at random first.
_LOADED: dict[str, Any] = {"weight": skip_param_init, "bias": skip_param_init}

_LAYER_MODULES = {
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The last parts of the Hugging Face names of a block's matrices."""


class TreeAttention(Module):
    """The attention of `forge.attention` in the place where TorchTitan calls its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    @torch.compiler.disable  # the layout is new in every row: traced, it would compile anew each time
    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: TreeLayout,
        scale: float | None = None,
        **_: object,  # TorchTitan says enable_gqa; the shapes say it too
    ) -> Tensor:
        """[1, L, heads, H] each → [1, L, query heads, H]; what lies past the layout's tokens is padding, and gets 0."""
        real, padded = attention_masks.num_tokens, q_BLNH.shape[1]
        out = attend(q_BLNH[:, :real], k_BLNH[:, :real], v_BLNH[:, :real], attention_masks, scale=scale)
        return nn.functional.pad(out, (0, 0, 0, 0, 0, padded - real)) if padded > real else out


class ScaledRoPE(CosSinRoPE):
    """TorchTitan's cos/sin rotary embedding with the context scalings of transformers."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        parameters: RopeParameters
        """How fast each pair of dimensions turns; stands in for the scaling fields of TorchTitan's config."""

    def _precompute_cache(self) -> Tensor:
        """[max_seq_len, 2 * head_dim] float32: cos of all dimensions, then sin."""
        inv_freq, attention_factor = inverse_frequencies(self.config.dim, self.config.parameters)
        angles = torch.outer(torch.arange(self.config.max_seq_len, dtype=torch.float32), inv_freq)
        angles = torch.cat([angles, angles], dim=-1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * attention_factor


def decoder_config(architecture: Architecture, *, seq_len: int) -> Qwen3Model.Config:
    """The TorchTitan config of a checkpoint's architecture, with the shardings of tensor parallelism filled in.

    Args:
        seq_len: how many positions the rotary embeddings are computed for.
    """
    config = Qwen3Model.Config(
        dim=architecture.dim,
        vocab_size=architecture.vocab_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=architecture.vocab_size, embedding_dim=architecture.dim, param_init=_LOADED
        ),
        # One config for each layer: TorchTitan writes shardings into them.
        layers=[_layer_config(architecture, seq_len=seq_len) for _ in range(architecture.n_layers)],
        norm=_norm(architecture.dim, architecture),
        lm_head=_linear(architecture.dim, architecture.vocab_size),
        enable_weight_tying=architecture.tied,
    )
    set_qwen3_sharding_config(config, enable_sp=True, enable_ep=False)
    return config


def _layer_config(architecture: Architecture, *, seq_len: int) -> Qwen3TransformerBlock.Config:
    arch, head_dim = architecture, architecture.head_dim
    attention = GQAttention.Config(
        n_heads=arch.n_heads,
        n_kv_heads=arch.n_kv_heads,
        head_dim=head_dim,
        dim=arch.dim,
        qkv_linear=QKVLinear.Config(
            head_dim=head_dim,
            wq=_linear(arch.dim, arch.n_heads * head_dim, bias=arch.qkv_bias),
            wkv=_linear(arch.dim, arch.n_kv_heads * head_dim, bias=arch.qkv_bias),
        ),
        wo=_linear(arch.n_heads * head_dim, arch.dim, bias=arch.out_bias),
        qk_norm=_norm(head_dim, arch) if arch.qk_norm else None,
        inner_attention=TreeAttention.Config(),
        rope=ScaledRoPE.Config(dim=head_dim, max_seq_len=seq_len, parameters=arch.rope),
    )
    return Qwen3TransformerBlock.Config(
        attention=attention,
        feed_forward=FeedForward.Config(
            w1=_linear(arch.dim, arch.hidden_dim),
            w2=_linear(arch.hidden_dim, arch.dim),
            w3=_linear(arch.dim, arch.hidden_dim),
        ),
        attention_norm=_norm(arch.dim, arch),
        ffn_norm=_norm(arch.dim, arch),
    )


def _linear(in_features: int, out_features: int, *, bias: bool = False) -> Linear.Config:
    return Linear.Config(in_features=in_features, out_features=out_features, bias=bias, param_init=_LOADED)


def _norm(width: int, architecture: Architecture) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=width, eps=architecture.norm_eps, param_init=_LOADED)


def weights_of(module: Qwen3Model, *, stages: int) -> dict[str, Weight]:
    """Hugging Face name → where that weight is, in the order of the layers; tied weights stand once.

    Args:
        module: the whole decoder, before anything was done to it.
        stages: how many pipeline stages it is to be cut into.
    """
    n_layers = len(module.layers)
    modules = {"model.embed_tokens": ("tok_embeddings", 0)}
    for layer in range(n_layers):
        stage = stage_of_layer(layer, n_layers=n_layers, stages=stages)
        for hf, own in _LAYER_MODULES.items():
            modules[f"model.layers.{layer}.{hf}"] = (f"layers.{layer}.{own}", stage)
    modules["model.norm"] = ("norm", stages - 1)
    if not module.enable_weight_tying:
        modules["lm_head"] = ("lm_head", stages - 1)
    weights = {}
    for hf_name, (own_name, stage) in modules.items():
        submodule = module
        for part in own_name.split("."):
            submodule = getattr(submodule, part)
        if submodule is None:  # the norms of queries and keys, in families without them
            continue
        for name, parameter in submodule.named_parameters(recurse=False):
            weights[f"{hf_name}.{name}"] = Weight(
                shape=tuple(parameter.shape), stage=stage, module=submodule, attribute=name
            )
    return weights


def keep_stage(module: Qwen3Model, weights: dict[str, Weight], stage: Stage) -> None:
    """Drops what other stages hold; TorchTitan's decoder passes over what it does not have."""
    if stage.count == 1:
        return
    n_layers = len(module.layers)
    for layer in range(n_layers):
        if stage_of_layer(layer, n_layers=n_layers, stages=stage.count) != stage.index:
            del module.layers[str(layer)]
    if not stage.is_first:
        module.tok_embeddings = None
    if not stage.is_last:
        module.norm = module.lm_head = None
    for weight in weights.values():
        if weight.stage != stage.index:
            weight.module = None
