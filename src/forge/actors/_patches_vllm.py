"""What is changed in vLLM 0.32 on the CPU. Applied by the generator, never by an import; see `apply`.

Both are about speed and can be dropped when vLLM (0.33 or later) does without them.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALL_BLOCK = 16


def apply() -> None:
    """Applies all of them to this process. May be called again."""
    skip_token_ranks()
    allow_small_blocks()


def skip_token_ranks() -> None:
    """Reports rank 0 for every sampled token.

    With log-probabilities vLLM counts how many tokens were more likely, which nobody here reads, with a function that
    goes through torch.compile: at the first token that takes 20 s and a C++ compiler.
    """
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = _no_ranks


def allow_small_blocks() -> None:
    """Lets the KV cache have blocks of 16 tokens on the CPU, where vLLM wants multiples of 32.

    Its attention kernel has a variant for 16 ("vec16"), which it takes by itself, as fast on AVX2. Only whole blocks of
    a prompt are shared by its samples, so the rest is computed again for each: 8 samples of 150 tokens at 32 compute
    304 prompt tokens, at 16 they compute 192.
    """
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(
        lambda kv_cache_spec=None: [MultipleOf(SMALL_BLOCK)]
    )


def _no_ranks(logprobs: Tensor, token_logprobs: Tensor) -> Tensor:
    """[N, V], [N, 1] -> [N] zeros."""
    return torch.zeros(logprobs.shape[0], dtype=torch.int64, device=logprobs.device)
