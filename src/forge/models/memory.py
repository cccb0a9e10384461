"""How many tokens fit into memory at once: arithmetic on an `Architecture`, the same on every rank and in every run."""

from __future__ import annotations

from forge.models.architectures import Architecture

# float32 weight and gradient, and Adam's two moments.
TRAINING_BYTES_PER_PARAMETER = 16
# What CUDA and NCCL take of a GPU for a process beside its tensors.
CUDA_CONTEXT_BYTES = 2 * 2**30
# Past this, a longer row makes nothing faster, on the largest GPUs too.
MOST_TOKENS = 65_536


def activation_bytes_per_token(
    architecture: Architecture, *, number_bytes: int, checkpointing: str, trainable: bool
) -> int:
    """What one token keeps in memory between forward and backward pass, without logits.

    Counts what autograd saves in a block: both norms' inputs and outputs, queries, keys and values before and after
    rotation, the attention output, and four times the feed-forward width; with "selective" half of that, with "full"
    the block's input only and one block at a time as it is recomputed; without training one block at a time.

    Example:
        dim 576, 9 heads of 64 (3 kv), hidden 1536, 30 layers, float32, none → 1.5 MB a token (SmolLM2-135M)
    """
    arch = architecture
    q_dim, kv_dim = arch.n_heads * arch.head_dim, arch.n_kv_heads * arch.head_dim
    block = 6 * arch.dim + 3 * q_dim + 4 * kv_dim + 4 * arch.hidden_dim
    if not trainable:
        return number_bytes * block
    if checkpointing == "full":
        return number_bytes * (arch.n_layers * arch.dim + block)
    if checkpointing == "selective":
        return number_bytes * arch.n_layers * block // 2
    return number_bytes * arch.n_layers * block


def tokens_that_fit(*, total_bytes: int, state_bytes: int, bytes_per_token: int, share: float, at_least: int) -> int:
    """The longest row of tokens to compute at once.

    Args:
        total_bytes: the device's whole memory: what happens to be free would differ between ranks, and between a run
            and its continuation, which would then not be the same bit for bit.
        state_bytes: weights, gradients and optimizer state on this device.
        share: how much of the memory is the model's, the rest being the engine's, the system's and fragmentation.
        at_least: the longest single sequence, which must be computed whatever it takes.

    Example:
        >>> tokens_that_fit(total_bytes=1000, state_bytes=100, bytes_per_token=2, share=0.5, at_least=8)
        200
    """
    room = int(total_bytes * share) - state_bytes
    return max(at_least, min(room // bytes_per_token, MOST_TOKENS))
