"""CPU time of tree attention, forward and backward, against the matrix products of the layer around it.

    OMP_NUM_THREADS=1 python -m benchmarks.attention_cpu [--json FILE]

The geometry is SmolLM2-135M's (9 query heads, 3 key-value heads of 64, model width 576, feed-forward 1536), fp32, one
thread. Times are CPU milliseconds per layer, the best of several, alternating; only the ratios mean something on
another machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from benchmarks.report import parser, report
from forge.attention import TreeLayout, attend

HEADS, KV_HEADS, HEAD_DIM, WIDTH, FFN = 9, 3, 64, 576, 1536
REPEATS = 9


def best_milliseconds(*functions: Callable[[], object]) -> list[float]:
    """The least CPU time of each function over REPEATS alternating calls, after one call to warm up."""
    best = [float("inf")] * len(functions)
    for repeat in range(REPEATS + 1):
        for index, function in enumerate(functions):
            start = time.process_time()
            function()
            if repeat:
                best[index] = min(best[index], (time.process_time() - start) * 1e3)
    return best


def group_layout(*, preamble: int, prompt: int, prompts: int, responses: list[int]) -> TreeLayout:
    """One preamble over `prompts` prompts, each over its share of `responses` (lengths in tokens)."""
    segments = [(0, preamble, -1)] if preamble else []
    end, per_prompt = preamble, len(responses) // prompts
    for index in range(prompts):
        parent = len(segments)
        segments.append((end, end + prompt, 0 if preamble else -1))
        end += prompt
        for length in responses[index * per_prompt : (index + 1) * per_prompt]:
            segments.append((end, end + length, parent))
            end += length
    return TreeLayout(segments=tuple(segments))


def heads(tokens: int, number: int) -> torch.Tensor:
    return torch.randn(1, tokens, number, HEAD_DIM, requires_grad=True)


def attention_step(layout: TreeLayout) -> Callable[[], object]:
    """Forward and backward of one layer's attention over the row."""
    q, k, v = heads(layout.num_tokens, HEADS), heads(layout.num_tokens, KV_HEADS), heads(layout.num_tokens, KV_HEADS)
    grad = torch.randn_like(q)
    return lambda: torch.autograd.grad(attend(q, k, v, layout), (q, k, v), grad)


def sdpa_step(lengths: list[int]) -> Callable[[], object]:
    """Forward and backward of PyTorch's causal attention, document by document."""
    documents = [
        tuple(torch.randn(1, n, length, HEAD_DIM, requires_grad=True) for n in (HEADS, KV_HEADS, KV_HEADS))
        for length in lengths
    ]

    def step() -> None:
        for q, k, v in documents:
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            torch.autograd.grad(out, (q, k, v), q)

    return step


def matmul_step(tokens: int) -> Callable[[], object]:
    """Forward and backward of the layer's seven matrix products, nothing else."""
    kv = KV_HEADS * HEAD_DIM
    shapes = [(WIDTH, WIDTH), (kv, WIDTH), (kv, WIDTH), (WIDTH, WIDTH), (FFN, WIDTH), (FFN, WIDTH), (WIDTH, FFN)]
    weights = [torch.randn(shape, requires_grad=True) for shape in shapes]
    inputs = {width: torch.randn(tokens, width, requires_grad=True) for width in (WIDTH, FFN)}
    grads = {out: torch.randn(tokens, out) for out, _ in shapes}

    def step() -> None:
        for weight in weights:
            x = inputs[weight.shape[1]]
            torch.autograd.grad(linear(x, weight), (x, weight), grads[weight.shape[0]])

    return step


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    short = [5 + (7 * index) % 12 for index in range(64)]  # 5 to 16 tokens
    trees = {
        "490 preamble, 8 x 30 prompts, 64 x 5-16": group_layout(preamble=490, prompt=30, prompts=8, responses=short),
        "no preamble, 8 x 60 prompts, 64 x 5-16": group_layout(preamble=0, prompt=60, prompts=8, responses=short),
        "1 x 512 prompt, 8 x 128": group_layout(preamble=0, prompt=512, prompts=1, responses=[128] * 8),
    }
    rows: list[dict[str, object]] = []
    for name, layout in trees.items():
        attention, matmuls = best_milliseconds(attention_step(layout), matmul_step(layout.num_tokens))
        flops = layout.num_pairs * HEADS * HEAD_DIM * 2 * (2 + 5)  # two products forward, five backward
        rows.append(
            {
                "row": name,
                "tokens": layout.num_tokens,
                "attention_ms": attention,
                "matmuls_ms": matmuls,
                "attention_share": attention / (attention + matmuls),
                "attention_gflops": flops / attention / 1e6,
            }
        )
    for lengths in ([4096], [1024], [512] * 4, [100] * 16, short):
        attention, sdpa = best_milliseconds(attention_step(TreeLayout.from_lengths(lengths)), sdpa_step(lengths))
        name = f"plain documents: {len(lengths)} of {min(lengths)} to {max(lengths)}"
        rows.append(
            {
                "row": name,
                "tokens": sum(lengths),
                "attention_ms": attention,
                "sdpa_ms": sdpa,
                "against_sdpa": attention / sdpa,
            }
        )
    report(
        "attention_cpu",
        rows,
        columns={
            "row": "packed row",
            "tokens": "tokens",
            "attention_ms": "attention ms:.1f",
            "matmuls_ms": "the layer's matrix products ms:.1f",
            "attention_share": "attention's share:.0%",
            "attention_gflops": "GFLOP/s:.1f",
            "sdpa_ms": "PyTorch's attention ms:.1f",
            "against_sdpa": "ratio:.2f",
        },
        json_path=options.json,
    )


if __name__ == "__main__":
    main()
