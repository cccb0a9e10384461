"""make_tiny_model: a Hugging Face folder with a random model of 0.3 million parameters and a byte tokenizer.

Small enough to be made on the spot, and shaped so that everything takes it: transformers, TorchTitan, vLLM on the CPU
(whose attention has no head size under 32), and tensor parallelism over two processes (even numbers of everything).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerFast

Family = Literal["llama", "qwen2", "qwen3"]

# Ids 0 to 255 are the bytes.
PAD, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIAL_TOKENS = {"<|pad|>": PAD, "<|eos|>": EOS, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
VOCAB_SIZE = 260
MAX_LENGTH = 2048  # tokens

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tiny_model(folder: str | Path, *, family: Family = "llama", seed: int = 0, **config: Any) -> Path:
    """Write the folder (config, float32 weights in safetensors, tokenizer with chat template) and return its path.

    Every weight is random, biases and norms too, so that one that is left out or mixed up shows in the logits. The
    first predictions are close to uniform over the 260 tokens.

    Args:
        folder: made if it is missing; files of an earlier model in it are replaced.
        family: whose architecture. qwen2 has biases in its attention, qwen3 norms on queries and keys.
        seed: the same seed gives the same weights.
        config: entries of config.json to change, such as `tie_word_embeddings=True` or `num_hidden_layers=4`.

    Example:
        >>> make_tiny_model("/tmp/tiny", family="qwen3", seed=1).name
        'tiny'
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(_config(family, config), dtype=torch.float32)
        _randomize(model)
    model.generation_config = GenerationConfig(eos_token_id=[IM_END, EOS], pad_token_id=PAD)
    bars_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # for one small file
    model.save_pretrained(path)
    if bars_shown:
        logging.enable_progress_bar()
    make_byte_tokenizer().save_pretrained(path)
    for file in path.iterdir():
        os.chmod(file, 0o644)  # safetensors makes files that only their owner may read
    return path


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte of the UTF-8 text, id = value of the byte, and the four special tokens behind them."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(BPE(vocab={_byte_name(byte): byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|eos|>", "<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def _byte_name(byte: int) -> str:
    """The printable character that byte-level tokenizers write for a byte (GPT-2's table)."""
    if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
        return chr(byte)
    unprintable = [*range(33), *range(127, 161), 173]
    return chr(256 + unprintable.index(byte))


def _config(family: Family, changes: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    classes = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    if family not in classes:
        raise ValueError(f"family must be one of {', '.join(classes)}, got {family!r}.")
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": MAX_LENGTH,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": IM_END,
        "pad_token_id": PAD,
    }
    if family == "qwen2":
        del shape["head_dim"]  # it is always hidden_size / num_attention_heads there
    return classes[family](**(shape | changes))


def _randomize(model: nn.Module) -> None:
    """Give biases and norms, which start as zeros and ones, values of their own."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(std=0.1)
            elif parameter.dim() == 1:
                parameter.normal_(mean=1.0, std=0.1)
