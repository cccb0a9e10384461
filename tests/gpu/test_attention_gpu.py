"""Tree attention through compiled FlexAttention, where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from forge.attention import TreeLayout, attend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LAYOUTS = [
    TreeLayout(segments=((0, 3, -1), (3, 5, 0), (5, 7, 0))),
    TreeLayout(segments=((0, 490, -1), (490, 520, 0), (520, 531, 1), (531, 700, 1), (700, 730, 0), (730, 1000, -1))),
    TreeLayout.from_lengths([128, 256, 1]),
    TreeLayout.from_lengths([3000]),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 3e-2)])
def test_gpu_output_and_gradients_equal_the_cpu_in_float64(layout: TreeLayout, dtype, tolerance: float) -> None:
    # The tolerance in float32 is TF32's 10 bits, which the compiled kernel may use for its products.
    torch.manual_seed(0)
    qkv = [torch.randn(1, layout.num_tokens, n, 64, dtype=dtype) for n in (9, 3, 3)]
    grad = torch.randn(1, layout.num_tokens, 9, 64, dtype=dtype)
    results = []
    for device, precision in (("cuda", dtype), ("cpu", torch.float64)):
        leaves = [x.to(device, precision).requires_grad_() for x in qkv]
        out = attend(*leaves, layout)
        results.append([out, *torch.autograd.grad(out, leaves, grad.to(device, precision))])
    for got, want in zip(*results, strict=True):
        error = (got.cpu().double() - want).abs().max() / want.abs().max().clamp(min=1)
        assert float(error) < tolerance


def test_rows_of_many_lengths_do_not_exhaust_the_compiler() -> None:
    for tokens in range(100, 2000, 97):
        q, k, v = (torch.randn(1, tokens, n, 64, device="cuda", dtype=torch.bfloat16) for n in (9, 3, 3))
        assert attend(q, k, v, TreeLayout.from_lengths([tokens - 50, 50])).shape == q.shape
