"""What a config.json says, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from forge.models.architectures import (
    Architecture,
    RopeParameters,
    UnsupportedArchitecture,
    check_architecture,
    check_tensor_parallel,
)

# As published, without the entries that only a tokenizer or a generator reads.
SMOLLM2_135M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN2_5_1_5B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_1_7B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_smollm2_is_a_tied_llama_with_plain_rotary_embeddings() -> None:
    assert check_architecture(SMOLLM2_135M) == Architecture(
        name="LlamaForCausalLM",
        dim=576,
        n_layers=30,
        n_heads=9,
        n_kv_heads=3,
        head_dim=64,
        hidden_dim=1536,
        vocab_size=49152,
        norm_eps=1e-5,
        rope=RopeParameters(theta=100_000.0),
        qkv_bias=False,
        out_bias=False,
        qk_norm=False,
        tied=True,
        max_position_embeddings=8192,
    )


def test_llama_3_1_has_stretched_rotary_embeddings_and_an_output_projection_of_its_own() -> None:
    architecture = check_architecture(LLAMA_3_1_8B)
    assert architecture.rope == RopeParameters(
        theta=500_000.0,
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    assert not architecture.tied


def test_qwen2_5_adds_a_bias_to_queries_keys_and_values_only() -> None:
    architecture = check_architecture(QWEN2_5_1_5B)
    assert (architecture.qkv_bias, architecture.out_bias, architecture.qk_norm) == (True, False, False)


def test_qwen3_normalizes_queries_and_keys() -> None:
    architecture = check_architecture(QWEN3_1_7B)
    assert (architecture.qkv_bias, architecture.out_bias, architecture.qk_norm) == (False, False, True)


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (SMOLLM2_135M, 134_515_008),
        (LLAMA_3_1_8B, 8_030_261_248),
        (QWEN2_5_1_5B, 1_543_714_304),
        (QWEN3_1_7B, 1_720_574_976),
    ],
    ids=["SmolLM2-135M", "Llama-3.1-8B", "Qwen2.5-1.5B", "Qwen3-1.7B"],
)
def test_parameters_add_up_to_the_published_count(config: dict[str, Any], published: int) -> None:
    assert check_architecture(config).num_parameters == published


def test_a_head_size_of_its_own_is_taken_over_the_quotient() -> None:
    assert check_architecture({**QWEN3_1_7B, "head_dim": 64}).head_dim == 64
    assert check_architecture({**SMOLLM2_135M, "head_dim": None}).head_dim == 576 // 9


def test_qwen3_without_a_head_size_has_the_128_of_its_class() -> None:
    config = {key: value for key, value in QWEN3_1_7B.items() if key != "head_dim"} | {"num_attention_heads": 32}
    assert check_architecture(config).head_dim == 128


def test_rope_parameters_of_transformers_5_are_read() -> None:
    new = {key: value for key, value in LLAMA_3_1_8B.items() if key not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = {**LLAMA_3_1_8B["rope_scaling"], "rope_theta": 500_000.0}
    assert check_architecture(new) == check_architecture(LLAMA_3_1_8B)


def test_yarn_under_its_old_key_takes_the_context_length_where_none_is_given() -> None:
    rope = check_architecture({**QWEN2_5_1_5B, "rope_scaling": {"type": "yarn", "factor": 4.0}}).rope
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 32768)


def test_the_model_type_decides_where_no_class_is_named() -> None:
    config = {key: value for key, value in QWEN2_5_1_5B.items() if key != "architectures"}
    assert check_architecture(config).name == "Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": "gemma3"}, "gemma3"),
        ({}, "names none"),
    ],
)
def test_another_architecture_is_refused_by_name_and_the_supported_are_listed(config: dict, named: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=named) as refusal:
        check_architecture(config)
    for supported in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM2", "Qwen2.5"):
        assert supported in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias must be false"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "got 'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "got 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor in the model's rope parameters of type linear"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "mscale"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
        ({"num_key_value_heads": 4}, "got 9 and 4"),
        ({"hidden_size": "576"}, "hidden_size in the model's config.json must be a number above 0, got '576'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_a_setting_that_would_be_computed_wrongly_is_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=message):
        check_architecture({**SMOLLM2_135M, **change})


def test_a_sliding_window_in_use_is_refused_and_one_that_is_switched_off_is_not() -> None:
    with pytest.raises(UnsupportedArchitecture, match="7 layers from layer 21 on use a sliding window"):
        check_architecture({**QWEN2_5_1_5B, "use_sliding_window": True})
    with pytest.raises(UnsupportedArchitecture, match="1 layers from layer 1 on"):
        check_architecture({**QWEN3_1_7B, "layer_types": ["full_attention", "sliding_attention"]})
    check_architecture({**QWEN2_5_1_5B, "use_sliding_window": True, "max_window_layers": 28})
    check_architecture({**QWEN2_5_1_5B, "use_sliding_window": True, "sliding_window": None})


def test_attention_dropout_is_no_reason_to_refuse() -> None:
    check_architecture({**SMOLLM2_135M, "attention_dropout": 0.1})


def test_tensor_parallelism_that_splits_no_count_evenly_is_refused_with_the_arithmetic() -> None:
    smollm2 = check_architecture(SMOLLM2_135M)
    with pytest.raises(ValueError, match=r"num_attention_heads 9 = 4 x 2 \+ 1") as refusal:
        check_tensor_parallel(smollm2, 2)
    assert "num_key_value_heads 3 = 1 x 2 + 1" in str(refusal.value)
    assert "Degrees that fit this model: 1, 3." in str(refusal.value)
    check_tensor_parallel(smollm2, 3)


def test_tensor_parallelism_refuses_a_vocabulary_that_does_not_divide() -> None:
    odd = check_architecture({**QWEN3_1_7B, "vocab_size": 151_937})
    with pytest.raises(ValueError, match=r"vocab_size 151937 = 75968 x 2 \+ 1"):
        check_tensor_parallel(odd, 2)


def test_tensor_parallelism_refuses_a_bias_that_every_rank_would_add() -> None:
    biased = check_architecture({**LLAMA_3_1_8B, "attention_bias": True})
    check_tensor_parallel(biased, 1)
    with pytest.raises(ValueError, match="attention_bias true"):
        check_tensor_parallel(biased, 2)
