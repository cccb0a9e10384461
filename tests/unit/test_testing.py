from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from forge.testing import toy_reward
from forge.testing.tiny_model import (
    EOS,
    IM_END,
    IM_START,
    PAD,
    VOCAB_SIZE,
    Family,
    make_byte_tokenizer,
    make_tiny_model,
)
from forge.testing.toy_task import LENGTH, problem

FAMILIES = get_args(Family)
TOKENIZER = make_byte_tokenizer()


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / request.param, family=request.param, seed=1)


def test_the_folder_is_a_small_model_that_transformers_loads(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert 200_000 < parameters < 500_000
    assert model(torch.tensor([[IM_START, 104, 105]])).logits.shape == (1, 3, VOCAB_SIZE)
    assert model.generation_config.eos_token_id == [IM_END, EOS]
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_the_shape_suits_vllm_and_two_tensor_parallel_processes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    assert head_dim % 32 == 0
    for key in ("num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size"):
        assert config[key] % 2 == 0
    assert config["num_key_value_heads"] >= 2


def test_the_first_predictions_are_close_to_uniform(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    probabilities = model(torch.tensor([list(b"letters 7")])).logits[0, -1].softmax(-1)
    assert probabilities.max() < 5 / VOCAB_SIZE


def test_every_weight_is_random_so_that_none_can_be_mixed_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    assert all(weight.std() > 0.01 for weight in weights.values())
    one_dimensional = [name for name, weight in weights.items() if weight.dim() == 1]
    assert one_dimensional
    assert len({tuple(weights[name].tolist()) for name in one_dimensional}) == len(one_dimensional)


def test_the_families_differ_where_they_should(tmp_path: Path) -> None:
    names = {
        family: set(load_file(make_tiny_model(tmp_path / family, family=family) / "model.safetensors"))
        for family in FAMILIES
    }
    assert not [name for name in names["llama"] if "bias" in name or "q_norm" in name]
    assert [name for name in names["qwen2"] if "q_proj.bias" in name]
    assert [name for name in names["qwen3"] if "q_norm" in name]


def test_a_seed_gives_the_same_weights_and_leaves_the_callers_random_state_alone(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    one, same, other = (
        load_file(make_tiny_model(tmp_path / name, seed=seed) / "model.safetensors")["lm_head.weight"]
        for name, seed in (("one", 3), ("same", 3), ("other", 4))
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(state, torch.random.get_rng_state())


def test_entries_of_the_config_can_be_changed(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, tie_word_embeddings=True, num_hidden_layers=1)
    weights = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in weights
    assert not [name for name in weights if "layers.1." in name]


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="family must be one of llama, qwen2, qwen3, got 'gpt2'"):
        make_tiny_model(tmp_path, family="gpt2")  # type: ignore[arg-type]


@given(st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: "<|" not in text))
def test_text_is_its_bytes_and_back(text: str) -> None:
    assert TOKENIZER.encode(text) == list(text.encode())
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_special_tokens_are_one_id_each_and_the_chat_template_uses_them(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(text) == [IM_START, *b"user\nhi", IM_END, *b"\n", IM_START, *b"assistant\n"]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (PAD, IM_END, None)
    assert tokenizer.decode([97, IM_END, PAD], skip_special_tokens=True) == "a"


@pytest.mark.parametrize(
    ("response", "target", "expected"),
    [
        ("abcd", "lower", 1.0),
        ("ABCD", "upper", 1.0),
        ("ABCD", "lower", 0.0),
        ("abCD", "lower", 0.5),
        ("a", "lower", 0.25),
        ("abcdefgh", "lower", 1.0),
        ("abcd1234", "lower", 0.5),
        ("", "lower", 0.0),
        ("éé\ufffd9", "lower", 0.0),
    ],
)
def test_the_toy_reward_is_the_part_of_letters_in_the_right_case(response: str, target: str, expected: float) -> None:
    assert toy_reward("", response, target) == expected


def test_a_random_byte_is_right_one_time_in_ten() -> None:
    expected = sum(toy_reward("", chr(byte) * LENGTH, "lower") for byte in range(256)) / VOCAB_SIZE
    assert expected == pytest.approx(0.1)


def test_toy_problems_are_distinct_and_half_of_each_kind() -> None:
    problems = [problem(index) for index in range(100)]
    assert len({question for question, _ in problems}) == 100
    assert [target for _, target in problems].count("lower") == 50
