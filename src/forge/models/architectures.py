"""Which Hugging Face checkpoints can be trained, and what their `config.json` says about their shape.

Needs neither torch nor transformers, so that a wrong model is refused before anything is started. A setting that this
library would compute differently from `transformers` is refused by name: a model that trains, but is not quite the
model that the generator samples from, is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from forge.types import UserError

FAMILIES = {
    "LlamaForCausalLM": "Llama 3 and SmolLM2",
    "Qwen2ForCausalLM": "Qwen2.5",
    "Qwen3ForCausalLM": "Qwen3 (dense)",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ARCHITECTURE_OF_MODEL_TYPE = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


class UnsupportedArchitecture(UserError):
    """The checkpoint is of a kind, or has a setting, that would be computed wrongly or not at all."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RopeParameters:
    """Rotary position embedding: how fast each pair of head dimensions turns per position."""

    theta: float
    """Base of the wavelengths."""
    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    """Name of the scaling, as `transformers` spells it."""
    factor: float = 1.0
    """By how much the context was stretched (linear, llama3, yarn)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original length / this are stretched whole."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original length / this stay as they are."""
    original_max_position_embeddings: int = 8192
    """Context length before stretching, in tokens (llama3, yarn)."""
    beta_fast: float = 32.0
    """yarn: dimensions with more rotations than this over the original length stay as they are."""
    beta_slow: float = 1.0
    """yarn: dimensions with fewer rotations than this are stretched whole."""
    attention_factor: float | None = None
    """yarn: what cos and sin are multiplied with; None means 0.1 ln(factor) + 1 (https://arxiv.org/abs/2309.00071)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Architecture:
    """The shape of a decoder, as read from a Hugging Face `config.json`."""

    name: str
    """Hugging Face class, such as Qwen3ForCausalLM."""
    dim: int
    """Width of the residual stream."""
    n_layers: int
    n_heads: int
    """Query heads."""
    n_kv_heads: int
    """Key and value heads; divides n_heads."""
    head_dim: int
    hidden_dim: int
    """Width of the feed-forward layer."""
    vocab_size: int
    norm_eps: float
    rope: RopeParameters
    qkv_bias: bool
    """Whether the query, key and value projections add a bias (Qwen2.5)."""
    out_bias: bool
    """Whether the attention output projection adds a bias."""
    qk_norm: bool
    """Whether queries and keys are normalized per head (Qwen3)."""
    tied: bool
    """Whether the output projection is the embedding matrix."""
    max_position_embeddings: int
    """The longest sequence that the model was made for, in tokens."""

    @property
    def num_parameters(self) -> int:
        """How many numbers are trained; tied weights count once."""
        q_dim, kv_dim = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        attention = self.dim * (2 * q_dim + 2 * kv_dim)
        attention += (q_dim + 2 * kv_dim) * self.qkv_bias + self.dim * self.out_bias + 2 * self.head_dim * self.qk_norm
        layer = attention + 3 * self.dim * self.hidden_dim + 2 * self.dim
        embeddings = self.vocab_size * self.dim * (1 if self.tied else 2)
        return self.n_layers * layer + embeddings + self.dim


def check_architecture(hf_config: Mapping[str, Any]) -> Architecture:
    """Read a Hugging Face config, refusing whatever would not be computed exactly.

    Args:
        hf_config: the content of `config.json`, in the spelling of any transformers version.

    Raises:
        UnsupportedArchitecture: another family, or a setting that is not supported; the message names it.

    Example:
        >>> check_architecture({"architectures": ["MixtralForCausalLM"]})
        UnsupportedArchitecture: model architecture MixtralForCausalLM is not supported. Supported: ...
    """
    name = _architecture_name(hf_config)
    _refuse_unsupported_settings(hf_config, name)
    dim, n_heads = _number(hf_config, "hidden_size"), _number(hf_config, "num_attention_heads")
    n_kv_heads = hf_config.get("num_key_value_heads") or n_heads
    if n_heads % n_kv_heads:
        raise UnsupportedArchitecture(
            f"num_attention_heads must be a multiple of num_key_value_heads, got {n_heads} and {n_kv_heads}: "
            f"{n_heads} / {n_kv_heads} = {n_heads / n_kv_heads:.3g}. The model's config.json is inconsistent."
        )
    # transformers leaves head_dim out of a Qwen3 config.json only when it is that class's default of 128.
    head_dim = hf_config.get("head_dim") or (128 if name == "Qwen3ForCausalLM" else dim // n_heads)
    attention_bias = bool(hf_config.get("attention_bias", False))
    return Architecture(
        name=name,
        dim=dim,
        n_layers=_number(hf_config, "num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        hidden_dim=_number(hf_config, "intermediate_size"),
        vocab_size=_number(hf_config, "vocab_size"),
        norm_eps=float(hf_config.get("rms_norm_eps", 1e-6)),
        rope=_rope_parameters(hf_config),
        qkv_bias=attention_bias or name == "Qwen2ForCausalLM",
        out_bias=attention_bias and name != "Qwen2ForCausalLM",
        qk_norm=name == "Qwen3ForCausalLM",
        tied=bool(hf_config.get("tie_word_embeddings", False)),
        max_position_embeddings=_number(hf_config, "max_position_embeddings"),
    )


def check_tensor_parallel(architecture: Architecture, degree: int) -> None:
    """Refuse a tensor-parallel degree that does not split the model evenly.

    Raises:
        UserError: naming every count that does not divide, with the arithmetic and the degrees that would do.
    """
    counts = {
        "num_attention_heads": architecture.n_heads,
        "num_key_value_heads": architecture.n_kv_heads,
        "intermediate_size": architecture.hidden_dim,
        "vocab_size": architecture.vocab_size,
    }
    uneven = [
        f"{key} {count} = {count // degree} x {degree} + {count % degree}"
        for key, count in counts.items()
        if count % degree
    ]
    if uneven:
        fitting = [d for d in range(1, architecture.n_kv_heads + 1) if not any(count % d for count in counts.values())]
        raise UserError(
            f"parallelism.tensor_parallel_degree {degree} must divide the model's head, feed-forward and vocabulary "
            f"counts, but {'; '.join(uneven)}. Degrees that fit this model: {', '.join(map(str, fitting))}."
        )
    if architecture.out_bias and degree > 1:
        raise UserError(
            f"parallelism.tensor_parallel_degree must be 1 for a model with attention_bias true ({architecture.name}), "
            f"got {degree}: the bias of the attention output would be added once per rank."
        )


def check_pipeline_parallel(architecture: Architecture, degree: int) -> None:
    """Refuse a pipeline-parallel degree that the model cannot be cut into.

    Raises:
        UserError: tied embeddings, or fewer layers than stages; with the way out.
    """
    key = "parallelism.pipeline_parallel_degree"
    if degree > 1 and architecture.tied:
        raise UserError(
            f"{key} must be 1 for a model with tied embeddings (tie_word_embeddings: true in config.json), got "
            f"{degree}: one matrix is the input of the first stage and the output of the last. Use "
            "parallelism.data_parallel_shard_degree or parallelism.tensor_parallel_degree instead."
        )
    if degree > architecture.n_layers:
        raise UserError(f"{key} must be at most {architecture.n_layers}, the model's number of layers, got {degree}.")


def check_seq_len(architecture: Architecture, seq_len: int) -> None:
    """Refuse sequences longer than the model was made for.

    Raises:
        UserError: with both lengths.
    """
    if not 0 < seq_len <= architecture.max_position_embeddings:
        raise UserError(
            f"training.seq_len must be between 1 and the model's max_position_embeddings "
            f"({architecture.max_position_embeddings}), got {seq_len}: it was made for no longer sequences."
        )


def _architecture_name(hf_config: Mapping[str, Any]) -> str:
    names = hf_config.get("architectures") or []
    name = names[0] if names else _ARCHITECTURE_OF_MODEL_TYPE.get(hf_config.get("model_type", ""), "")
    if name not in FAMILIES:
        what = name or hf_config.get("model_type") or "(config.json names none)"
        supported = ", ".join(f"{key} ({models})" for key, models in FAMILIES.items())
        raise UnsupportedArchitecture(f"model architecture {what} is not supported. Supported: {supported}.")
    return name


def _refuse_unsupported_settings(hf_config: Mapping[str, Any], name: str) -> None:
    reasons = []
    activation = hf_config.get("hidden_act", "silu")
    if activation != "silu":
        reasons.append(f"hidden_act must be 'silu', got {activation!r}")
    if hf_config.get("mlp_bias", False):
        reasons.append("mlp_bias must be false, got true: the feed-forward layer here has no bias")
    sliding = _sliding_layers(hf_config)
    if sliding:
        reasons.append(
            f"every layer must attend to the whole sequence, but {len(sliding)} layers from layer {sliding[0]} on use "
            f"a sliding window (use_sliding_window, layer_types)"
        )
    if hf_config.get("quantization_config"):
        method = hf_config["quantization_config"].get("quant_method", "unknown method")
        reasons.append(f"weights must not be quantized, got quantization_config ({method}): train the original model")
    if reasons:
        raise UnsupportedArchitecture(f"this {name} checkpoint is not supported: {'; '.join(reasons)}.")


def _sliding_layers(hf_config: Mapping[str, Any]) -> list[int]:
    """Layers with windowed attention, by the rule of transformers' Qwen2Config and Qwen3Config."""
    layer_types = hf_config.get("layer_types")
    n_layers = _number(hf_config, "num_hidden_layers")
    if layer_types is not None:
        return [index for index, kind in enumerate(layer_types) if kind != "full_attention"]
    # Llama configs have no use_sliding_window; a sliding_window there is ignored by transformers as well.
    if hf_config.get("use_sliding_window", False) and hf_config.get("sliding_window", 4096) is not None:
        return list(range(hf_config.get("max_window_layers", 28), n_layers))
    return []


def _rope_parameters(hf_config: Mapping[str, Any]) -> RopeParameters:
    # transformers 5 writes rope_parameters; before, rope_theta stood alone and rope_scaling was null or a dict.
    raw: Mapping[str, Any] = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    rope_type = raw.get("rope_type", raw.get("type", "default"))
    theta = raw.get("rope_theta", hf_config.get("rope_theta", 10_000.0))
    if rope_type not in ROPE_TYPES:
        raise UnsupportedArchitecture(
            f"rope_type must be one of {', '.join(ROPE_TYPES)}, got {rope_type!r}: its positions would be wrong."
        )
    partial = raw.get("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedArchitecture(
            f"partial_rotary_factor must be 1, got {partial}: every dimension is rotated here."
        )
    if raw.get("mscale") or raw.get("mscale_all_dim") or raw.get("truncate", True) is not True:
        raise UnsupportedArchitecture("yarn with mscale, mscale_all_dim or truncate false is not supported.")
    if rope_type == "default":
        return RopeParameters(theta=float(theta))
    original = hf_config.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings")
    attention_factor = raw.get("attention_factor")
    return RopeParameters(
        theta=float(theta),
        rope_type=rope_type,
        factor=float(_number(raw, "factor", where=f"rope parameters of type {rope_type}")),
        low_freq_factor=float(raw.get("low_freq_factor") or 1.0),
        high_freq_factor=float(raw.get("high_freq_factor") or 4.0),
        original_max_position_embeddings=int(original or _number(hf_config, "max_position_embeddings")),
        beta_fast=float(raw.get("beta_fast") or 32.0),
        beta_slow=float(raw.get("beta_slow") or 1.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
    )


def _number(values: Mapping[str, Any], key: str, *, where: str = "config.json") -> Any:
    value = values.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise UnsupportedArchitecture(f"{key} in the model's {where} must be a number above 0, got {value!r}.")
    return value
