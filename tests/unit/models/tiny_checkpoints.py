"""Tiny random checkpoints of every supported family, made with transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

_SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Wide enough that a wrong rotation, a lost bias or a lost norm moves the logits far more than 1e-4.
    "initializer_range": 0.3,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Of the four frequencies of an 8-wide head, one is kept, one blended and two stretched.
    "original_max_position_embeddings": 256,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("Llama", {"rope_parameters": _LLAMA3_ROPE, "rms_norm_eps": 1e-5}),
    "llama_linear_bias": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
            "attention_bias": True,
            "head_dim": 16,
        },
    ),
    "smollm2": (
        "Llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}, "tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}),
    "qwen2_yarn_tied": ("Qwen2", {"rope_parameters": _YARN_ROPE, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}),
    "qwen3_tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}

ALONE = SimpleNamespace(
    data_parallel_replicate_degree=1,
    data_parallel_shard_degree=-1,
    tensor_parallel_degree=1,
    pipeline_parallel_degree=1,
    context_parallel_degree=1,
    expert_parallel_degree=1,
)


def make_checkpoint(name: str, folder: Path) -> Any:
    """Writes the checkpoint and returns the transformers model: every weight random, norms and biases included."""
    import transformers

    family, settings = CHECKPOINTS[name]
    config = getattr(transformers, f"{family}Config")(**_SMALL, **settings)
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms start at 1 and biases at 0, where forgetting one would not be seen
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 256}\n')
    return model
