"""The `config.json` of well-known models, for estimates where neither the model nor the hub is in reach.

Copied from what their owners published. Nothing is ever trained from these: a run reads the model's own file.
"""

from __future__ import annotations

from typing import Any

_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}
_QWEN3 |= {"max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
_QWEN25 = {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768, "rope_theta": 1e6}
_LLAMA3 = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "num_key_value_heads": 8, "rope_theta": 5e5}
_LLAMA3 |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_SMOLLM2 = {"architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "tie_word_embeddings": True}
_SMOLLM2 |= {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5}


def _shape(family: dict[str, Any], dim: int, hidden: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    shape = {"hidden_size": dim, "intermediate_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**family, **shape, **more}


def _llama3(factor: float) -> dict[str, Any]:
    return {**_LLAMA3, "rope_scaling": {**_LLAMA3_ROPE, "factor": factor}}


_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _shape(_QWEN3, 1024, 3072, 28, 16, tie_word_embeddings=True),
    "qwen3-1.7b": _shape(_QWEN3, 2048, 6144, 28, 16, tie_word_embeddings=True),
    "qwen3-4b": _shape(_QWEN3, 2560, 9728, 36, 32, tie_word_embeddings=True),
    "qwen3-8b": _shape(_QWEN3, 4096, 12288, 36, 32),
    "qwen3-14b": _shape(_QWEN3, 5120, 17408, 40, 40),
    "qwen3-32b": _shape(_QWEN3, 5120, 25600, 64, 64),
    "qwen2.5-0.5b": _shape(
        _QWEN25, 896, 4864, 24, 14, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True
    ),
    "qwen2.5-1.5b": _shape(
        _QWEN25, 1536, 8960, 28, 12, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True
    ),
    "qwen2.5-3b": _shape(
        _QWEN25, 2048, 11008, 36, 16, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True
    ),
    "qwen2.5-7b": _shape(_QWEN25, 3584, 18944, 28, 28, num_key_value_heads=4, vocab_size=152064),
    "qwen2.5-14b": _shape(_QWEN25, 5120, 13824, 48, 40, num_key_value_heads=8, vocab_size=152064),
    "qwen2.5-32b": _shape(_QWEN25, 5120, 27648, 64, 40, num_key_value_heads=8, vocab_size=152064),
    "qwen2.5-72b": _shape(_QWEN25, 8192, 29568, 80, 64, num_key_value_heads=8, vocab_size=152064),
    "llama-3.1-8b": _shape(_llama3(8.0), 4096, 14336, 32, 32),
    "llama-3.1-70b": _shape(_llama3(8.0), 8192, 28672, 80, 64),
    "llama-3.2-1b": _shape(_llama3(32.0), 2048, 8192, 16, 32, head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": _shape(_llama3(32.0), 3072, 8192, 28, 24, head_dim=128, tie_word_embeddings=True),
    "smollm2-135m": _shape(_SMOLLM2, 576, 1536, 30, 9, num_key_value_heads=3, rope_theta=1e5),
    "smollm2-360m": _shape(_SMOLLM2, 960, 2560, 32, 15, num_key_value_heads=5, rope_theta=1e5),
    "smollm2-1.7b": _shape(_SMOLLM2, 2048, 8192, 24, 32, num_key_value_heads=32, rope_theta=1.3e5),
}


def published_config(model: str) -> dict[str, Any] | None:
    """The config of a hub id, with or without its owner and `-Instruct` or `-Base`; None for one that is not known.

    Example:
        >>> published_config("meta-llama/Meta-Llama-3.1-8B-Instruct")["hidden_size"]
        4096
    """
    name = model.removeprefix("hf://").rpartition("/")[2].lower().removeprefix("meta-")
    return _CONFIGS.get(name.removesuffix("-instruct").removesuffix("-base"))
