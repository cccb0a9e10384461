"""Log-probabilities and entropies of chosen tokens, without ever holding all logits.

N tokens, D hidden size, V vocabulary. Logits [N, V] in float32 would be 10 GB for 16,384 tokens of a vocabulary of
151,936. They are computed in chunks over N, reduced to two numbers a token, and dropped; the backward pass computes
each chunk again. The last chunk is kept instead, as backward starts with it: a batch that fits one chunk costs three
matrix products, a larger one four for all chunks but one. Peak memory, whatever N is: about one chunk of logits with a
weight, three with a function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LmHead: TypeAlias = Tensor | Callable[[Tensor], Tensor]
"""The output layer: its weight [V, D], or a function from hidden states [n, D] to logits [n, V]."""

CHUNK_BYTES = 256 * 2**20
"""float32 logits of one chunk. Measured on a CPU core: matrix products reach full speed from 256 rows on, that is
50 MB for V = 49,152 and 155 MB for V = 151,936."""
PROBE_TOKENS = 64
"""First chunk of an output layer whose vocabulary is not known before it is called."""
BLOCK_BYTES = 2 * 2**20
"""On a CPU, what elementwise work on a chunk is cut into, so that intermediates stay in the cache."""
LOWEST_LOG_PROB = -1e30
"""Stands for log 0 where it is multiplied by a probability of 0: the product must be 0, and −inf · 0 is NaN."""


def score_tokens(
    hidden_ND: Tensor,
    lm_head: LmHead,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    want_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """log p(target) and the entropy of p = softmax(logits / temperature), both float32 [N], in nats.

    Args:
        hidden_ND: hidden states [N, D] of the positions to score, before the output layer.
        lm_head: weight [V, D], used in the dtype of the hidden states (the cheaper way), or a function; the function
            is called once a chunk, and once more in backward, so it must be pure.
        targets_N: int64 [N], the token that followed each position.
        temperature: the logits are divided by it.
        chunk: tokens a chunk; default: as many as fit `CHUNK_BYTES`.
        want_entropy: whether the entropies carry a gradient. Their values are there in any case.

    The softmax is taken in float32 whatever the dtype of the logits. The gradient of a weight is summed over chunks in
    float32.

    Raises:
        ValueError: shapes that do not fit, a temperature or a chunk that is not positive.

    Example: logits (ln 3, 0) and target 0 give log-probability ln 0.75 = −0.288 and entropy 0.562.
    """
    if hidden_ND.dim() != 2 or targets_N.shape != hidden_ND.shape[:1]:
        raise ValueError(
            f"hidden must be [N, D] and targets [N], got {tuple(hidden_ND.shape)} and {tuple(targets_N.shape)}."
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}: the logits are divided by it.")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}.")
    if isinstance(lm_head, Tensor):
        if lm_head.dim() != 2 or lm_head.shape[1] != hidden_ND.shape[1]:
            raise ValueError(
                f"lm_head must be [V, D] with D = {hidden_ND.shape[1]} as in hidden, got {tuple(lm_head.shape)}."
            )
        size = chunk or _chunk_for(lm_head.shape[0])
        with torch.autocast(hidden_ND.device.type, enabled=False):
            return _ScoreWithWeight.apply(
                hidden_ND, lm_head, targets_N, temperature, size, want_entropy, torch.is_grad_enabled()
            )
    return _score_with_function(hidden_ND, lm_head, targets_N, temperature, chunk, want_entropy)


@torch.no_grad()
def judge_tokens(
    hidden_ND: Tensor, lm_head: LmHead, targets_N: Tensor, *, vocabulary: int, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """log p(target), float32 [N], and whether the target is the likeliest of all tokens, bool [N]; without a gradient.

    Args:
        hidden_ND, lm_head, targets_N, chunk: as for `score_tokens`.
        vocabulary: V.

    Example: logits (ln 3, 0) give target 0 the log-probability −0.288 and True, target 1 −1.386 and False.
    """
    logprobs = torch.empty(targets_N.shape, dtype=torch.float32, device=hidden_ND.device)
    right = torch.empty(targets_N.shape, dtype=torch.bool, device=hidden_ND.device)
    for piece in _pieces(targets_N.shape[0], chunk or _chunk_for(vocabulary)):
        hidden_nD = hidden_ND[piece]
        logits = hidden_nD @ lm_head.to(hidden_nD.dtype).t() if isinstance(lm_head, Tensor) else lm_head(hidden_nD)
        log_p = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        logprobs[piece] = log_p.gather(1, targets_N[piece, None]).squeeze(1)
        right[piece] = log_p.argmax(dim=1) == targets_N[piece]
    return logprobs, right


def _chunk_for(vocabulary: int) -> int:
    return max(1, CHUNK_BYTES // (4 * vocabulary))


def _score_with_function(
    hidden_ND: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    targets_N: Tensor,
    temperature: float,
    chunk: int | None,
    want_entropy: bool,
) -> tuple[Tensor, Tensor]:
    total = targets_N.shape[0]
    vocabulary = 0

    def score(hidden_nD: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal vocabulary
        logits = lm_head(hidden_nD)
        vocabulary = logits.shape[-1]
        return _ScoreLogits.apply(logits, targets_n, temperature, want_entropy)

    def score_piece(start: int, stop: int) -> tuple[Tensor, Tensor]:
        inputs = hidden_ND[start:stop], targets_N[start:stop]
        if stop == total or not torch.is_grad_enabled():
            return score(*inputs)
        # Nothing in it is random, and saving the random state costs more than a small chunk.
        return checkpoint(score, *inputs, use_reentrant=False, preserve_rng_state=False)

    probed = total if chunk else min(PROBE_TOKENS, total)
    scores = [score_piece(piece.start, piece.stop) for piece in _pieces(probed, chunk or PROBE_TOKENS)]
    if probed < total:
        rest = _pieces(total - probed, _chunk_for(vocabulary))
        scores += [score_piece(probed + piece.start, probed + piece.stop) for piece in rest]
    logprobs, entropies = zip(*scores, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


class _ScoreLogits(torch.autograd.Function):
    """Logits [n, V] → log-probabilities and entropies [n]; keeps the log-softmax for backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets_n: Tensor, temperature: float, want_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        scaled = logits if temperature == 1.0 else logits.float() / temperature
        log_p = torch.log_softmax(scaled, dim=-1, dtype=torch.float32)
        logprobs, entropies = _reduce(log_p, targets_n)
        ctx.save_for_backward(log_p, targets_n, entropies)  # and not on ctx: checkpoint drops only what is saved so
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)
        if not want_entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        log_p, targets_n, entropies = ctx.saved_tensors
        grad = _grad_logits(log_p, targets_n, entropies, grad_logprobs, grad_entropies)
        if ctx.temperature != 1.0:
            grad /= ctx.temperature
        return grad.to(ctx.dtype), None, None, None


class _ScoreWithWeight(torch.autograd.Function):
    """The whole of it for a plain weight: no graph inside, one logits buffer reused by all chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        temperature: float,
        chunk: int,
        want_entropy: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(targets_N.shape, dtype=torch.float32, device=hidden_ND.device)
        entropies = torch.empty_like(logprobs)
        buffer = _logits_buffer(hidden_ND, weight_VD, chunk)
        log_p = buffer[:0]
        for piece in _pieces(targets_N.shape[0], chunk):
            log_p = _logits(buffer, hidden_ND[piece], weight_VD, temperature)
            torch.log_softmax(log_p, dim=-1, out=log_p)
            logprobs[piece], entropies[piece] = _reduce(log_p, targets_N[piece])
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, entropies)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.last = (buffer, log_p) if keep and any(ctx.needs_input_grad) else None
        ctx.set_materialize_grads(False)
        if not want_entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, targets_N, entropies = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_ND) if needs_hidden else None
        grad_weight = (
            torch.zeros(weight_VD.shape, dtype=torch.float32, device=weight_VD.device) if needs_weight else None
        )
        buffer, kept = ctx.last or (_logits_buffer(hidden_ND, weight_VD, ctx.chunk), None)
        ctx.last = None  # it is overwritten below; a second backward computes it again
        for piece in reversed(list(_pieces(targets_N.shape[0], ctx.chunk))):
            if kept is not None:
                log_p, kept = kept, None
            else:
                log_p = _logits(buffer, hidden_ND[piece], weight_VD, ctx.temperature)
                torch.log_softmax(log_p, dim=-1, out=log_p)
            grad = _grad_logits(
                log_p,
                targets_N[piece],
                entropies[piece],
                None if grad_logprobs is None else grad_logprobs[piece] / ctx.temperature,
                None if grad_entropies is None else grad_entropies[piece] / ctx.temperature,
            ).to(hidden_ND.dtype)
            if grad_hidden is not None:
                grad_hidden[piece] = grad @ weight_VD.to(hidden_ND.dtype)
            if grad_weight is not None:
                _add_product(grad_weight, grad.t(), hidden_ND[piece])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight_VD.dtype), *[None] * 5


def _pieces(total: int, size: int) -> Iterator[slice]:
    """Slices of at most `size`, one even of nothing. The remainder comes first, so that the last, kept one is full."""
    for stop in range(total % size or min(size, total), total + 1, size):
        yield slice(max(0, stop - size), stop)


def _logits_buffer(hidden_ND: Tensor, weight_VD: Tensor, chunk: int) -> Tensor:
    rows = min(chunk, hidden_ND.shape[0])
    return torch.empty(rows, weight_VD.shape[0], dtype=torch.float32, device=hidden_ND.device)


def _logits(buffer: Tensor, hidden_nD: Tensor, weight_VD: Tensor, temperature: float) -> Tensor:
    """logits / temperature in float32, written into the first n rows of `buffer`, which are returned."""
    logits = buffer[: hidden_nD.shape[0]]
    if hidden_nD.dtype == torch.float32:
        torch.mm(hidden_nD, weight_VD.to(torch.float32).t(), out=logits)
    else:
        logits.copy_(hidden_nD @ weight_VD.to(hidden_nD.dtype).t())
    return logits if temperature == 1.0 else logits.div_(temperature)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in float32."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _blocks(rows_nV: Tensor) -> Iterator[slice]:
    """Rows to work on at a time: a cacheful on a CPU, all of them elsewhere, where each kernel launch costs."""
    rows, vocabulary = rows_nV.shape
    return _pieces(rows, max(1, BLOCK_BYTES // (4 * vocabulary)) if rows_nV.device.type == "cpu" else max(1, rows))


def _reduce(log_p_nV: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
    """log p(target) and −Σ p log p, [n]."""
    logprobs = log_p_nV.gather(1, targets_n[:, None]).squeeze(1)
    entropies = torch.empty_like(logprobs)
    for block in _blocks(log_p_nV):
        log_p = log_p_nV[block]
        entropies[block] = log_p.exp().mul_(log_p.clamp(min=LOWEST_LOG_PROB)).sum(dim=1).neg_()
    return logprobs, entropies


def _grad_logits(
    log_p_nV: Tensor,
    targets_n: Tensor,
    entropies_n: Tensor,
    grad_logprobs_n: Tensor | None,
    grad_entropies_n: Tensor | None,
) -> Tensor:
    """The gradient with respect to the logits, written over `log_p_nV`.

    d log p(y) / dz = onehot(y) − p, and dH / dz = −p · (log p + H).
    """
    for block in _blocks(log_p_nV):
        log_p = log_p_nV[block]
        if grad_entropies_n is None:
            assert grad_logprobs_n is not None, "autograd asks for a gradient only if one of the outputs has one"
            log_p.exp_().mul_(-grad_logprobs_n[block][:, None])
            continue
        factor = (
            log_p.clamp(min=LOWEST_LOG_PROB).add_(entropies_n[block][:, None]).mul_(grad_entropies_n[block][:, None])
        )
        if grad_logprobs_n is not None:
            factor.add_(grad_logprobs_n[block][:, None])
        log_p.exp_().mul_(factor).neg_()
    if grad_logprobs_n is not None:
        log_p_nV.scatter_add_(1, targets_n[:, None], grad_logprobs_n[:, None])
    return log_p_nV
