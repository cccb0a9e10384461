"""Arithmetic on memory, worked by hand."""

from __future__ import annotations

from forge.models.architectures import check_architecture
from forge.models.memory import MOST_TOKENS, activation_bytes_per_token, tokens_that_fit

# 8 wide, 2 query heads and 1 key-value head of 4, feed-forward 16:
# a block keeps 6 * 8 + 3 * 8 + 4 * 4 + 4 * 16 = 152 numbers a token.
SMALL = check_architecture(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 16,
        "max_position_embeddings": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 10,
        "vocab_size": 32,
    }
)


def per_token(checkpointing: str, *, number_bytes: int = 4, trainable: bool = True) -> int:
    return activation_bytes_per_token(
        SMALL, number_bytes=number_bytes, checkpointing=checkpointing, trainable=trainable
    )


def test_a_token_keeps_every_block_without_checkpointing_and_inputs_with() -> None:
    assert per_token("none") == 4 * 10 * 152
    assert per_token("selective") == 4 * 10 * 152 // 2
    assert per_token("full") == 4 * (10 * 8 + 152)


def test_a_frozen_model_keeps_one_block_at_a_time() -> None:
    assert per_token("none", trainable=False) == 4 * 152


def test_bf16_halves_what_a_token_keeps() -> None:
    assert per_token("none", number_bytes=2) == per_token("none") // 2


def test_a_row_fills_its_share_of_the_memory_less_the_state() -> None:
    assert tokens_that_fit(total_bytes=1000, state_bytes=100, bytes_per_token=2, share=0.5, at_least=8) == 200


def test_a_row_holds_the_longest_sequence_even_where_memory_is_short() -> None:
    assert tokens_that_fit(total_bytes=1000, state_bytes=900, bytes_per_token=2, share=0.5, at_least=8) == 8


def test_a_row_does_not_grow_without_bound() -> None:
    assert tokens_that_fit(total_bytes=10**15, state_bytes=0, bytes_per_token=2, share=0.5, at_least=8) == MOST_TOKENS
