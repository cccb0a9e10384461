"""The arithmetic of a step against PyTorch's own counter, and by hand where it counts what need not be computed."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from forge.models.architectures import check_architecture
from forge.models.flops import peak_flops, training_flops
from forge.packing import pack_documents

CONFIG = Qwen3Config(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    attn_implementation="eager",
)
ARCHITECTURE = check_architecture({**CONFIG.to_dict(), "architectures": ["Qwen3ForCausalLM"]})
PAIR = 3 * 4 * 4 * 16 * 3  # forward and twice that backward; 4 operations for each of 4 heads of 16, in 3 layers
SCORED = 3 * 2 * 32 * 96


def flops(documents: list[list[int]], **options: bool) -> float:
    scored = [list(range(1, len(d))) for d in documents]
    return training_flops(ARCHITECTURE, pack_documents(documents, scored, max_tokens=1000), **options)


def test_a_document_counts_what_pytorch_counts_but_for_masked_pairs_and_the_last_token() -> None:
    length = 10
    with FlopCounterMode(display=False) as counter:
        out = Qwen3ForCausalLM(CONFIG)(torch.arange(length)[None], use_cache=False)
        out.logits.sum().backward()
    whole_square = counter.get_total_flops()
    masked = PAIR * (length * length - length * (length + 1) // 2)
    assert whole_square - masked - SCORED == pytest.approx(flops([list(range(length))]), rel=1e-12)


def test_a_shared_prompt_counts_once() -> None:
    prompt = list(range(20))
    once, twice = flops([[*prompt, 1]]), flops([[*prompt, 1], [*prompt, 1]])
    assert once == twice
    branch = flops([[*prompt, 1], [*prompt, 2]]) - once
    alone = flops([[*prompt, 2]])
    assert 0 < branch < alone / 10


def test_frozen_matrices_take_no_gradient() -> None:
    document = [list(range(8))]
    pairs = PAIR * 8 * 9 // 2
    assert (flops(document, weights_train=False) - pairs) / (flops(document) - pairs) == pytest.approx(2 / 3)


def test_the_ceiling_is_that_of_all_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = peak_flops(torch.device("cpu"), torch.float32)
        torch.set_num_threads(4)
        four = peak_flops(torch.device("cpu"), torch.float32)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert one > 1e9
    assert 2 < four / one < 8  # both are measured, on a machine that does other things as well
