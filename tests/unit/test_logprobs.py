import math

import pytest
import torch
from torch import nn

from forge import logprobs as module
from forge.logprobs import judge_tokens, score_tokens

N, D, V = 13, 6, 11


def inputs(dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    hidden = (scale * torch.randn(N, D, generator=generator)).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(V, (N,), generator=generator)


def naive(hidden, weight, targets, temperature):
    log_p = torch.log_softmax((hidden.double() @ weight.double().t()) / temperature, dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)


def heads(weight):
    return {"weight": weight, "function": lambda hidden: nn.functional.linear(hidden, weight)}


def test_two_logits_by_hand():
    # Probabilities 3/4 and 1/4.
    hidden, weight = torch.tensor([[1.0], [1.0]]), torch.tensor([[math.log(3)], [0.0]])
    logprobs, entropies = score_tokens(hidden, weight, torch.tensor([0, 1]))
    assert logprobs.tolist() == pytest.approx([math.log(0.75), math.log(0.25)])
    assert entropies.tolist() == pytest.approx([0.75 * math.log(4 / 3) + 0.25 * math.log(4)] * 2)
    # At temperature 0.5 the odds are squared: 9 to 1.
    logprobs, _ = score_tokens(hidden, weight, torch.tensor([0, 1]), temperature=0.5)
    assert logprobs.tolist() == pytest.approx([math.log(0.9), math.log(0.1)])


@pytest.mark.parametrize("kind", ["weight", "function"])
@pytest.mark.parametrize("chunk", [1, 4, N, 100, None])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("want_entropy", [False, True])
def test_values_and_gradients_equal_the_naive_ones_whatever_the_chunk(
    kind, chunk, temperature, want_entropy, monkeypatch
):
    monkeypatch.setattr(module, "PROBE_TOKENS", 3)
    hidden, weight, targets = inputs()
    upstream = torch.linspace(-1, 2, N)
    expected = naive(hidden, weight, targets, temperature)
    wanted = (upstream * expected[0]).sum() + (0.3 * upstream.flip(0) * expected[1]).sum() * want_entropy
    expected_gradients = torch.autograd.grad(wanted, (hidden, weight))
    logprobs, entropies = score_tokens(
        hidden, heads(weight)[kind], targets, temperature=temperature, chunk=chunk, want_entropy=want_entropy
    )
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert entropies.requires_grad == want_entropy
    torch.testing.assert_close(logprobs.double(), expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropies.double(), expected[1], atol=1e-5, rtol=1e-5)
    loss = (upstream * logprobs).sum()
    if want_entropy:
        loss = loss + (0.3 * upstream.flip(0) * entropies).sum()
    for got, want in zip(torch.autograd.grad(loss, (hidden, weight)), expected_gradients, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["weight", "function"])
def test_the_entropy_alone_has_a_gradient(kind):
    hidden, weight, targets = inputs()
    wanted = torch.autograd.grad(naive(hidden, weight, targets, 1.0)[1].sum(), (hidden, weight))
    _, entropies = score_tokens(hidden, heads(weight)[kind], targets, chunk=4, want_entropy=True)
    for got, want in zip(torch.autograd.grad(entropies.sum(), (hidden, weight)), wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["weight", "function"])
def test_bfloat16_hidden_states_get_a_float32_softmax(kind):
    hidden, weight, targets = inputs(torch.bfloat16)
    logprobs, entropies = score_tokens(hidden, heads(weight)[kind], targets, chunk=4)
    assert logprobs.dtype == entropies.dtype == torch.float32
    # What is lost is the rounding of the logits to bfloat16, no more: the softmax sums to 1 in float32.
    rounded = torch.log_softmax((hidden @ weight.t()).float(), dim=-1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs, rounded, atol=1e-6, rtol=1e-6)
    gradients = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    wanted = torch.autograd.grad(naive(hidden, weight, targets, 1.0)[0].sum(), (hidden, weight))
    for got, want in zip(gradients, wanted, strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, want, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("kind", ["weight", "function"])
def test_extreme_logits_stay_finite(kind):
    hidden, weight, targets = inputs(scale=1e4)
    logprobs, entropies = score_tokens(hidden, heads(weight)[kind], targets, chunk=5, want_entropy=True)
    gradients = torch.autograd.grad(logprobs.sum() + entropies.sum(), (hidden, weight))
    assert all(tensor.isfinite().all() for tensor in (logprobs, entropies, *gradients))
    assert (entropies >= 0).all()


def test_a_function_may_rule_tokens_out_with_minus_infinity():
    hidden, weight, targets = inputs()
    ruled_out = torch.zeros(V).index_fill(0, torch.tensor([2, 5]), float("-inf"))
    targets = torch.where((targets == 2) | (targets == 5), 0, targets)
    logprobs, entropies = score_tokens(hidden, lambda h: h @ weight.t() + ruled_out, targets, want_entropy=True)
    gradients = torch.autograd.grad(logprobs.sum() + entropies.sum(), (hidden, weight))
    assert all(tensor.isfinite().all() for tensor in (logprobs, entropies, *gradients))
    assert gradients[1][2].tolist() == [0.0] * D


@pytest.mark.parametrize("kind", ["weight", "function"])
def test_without_gradient_nothing_is_kept(kind):
    hidden, weight, targets = inputs()
    with torch.no_grad():
        logprobs, entropies = score_tokens(hidden, heads(weight)[kind], targets, chunk=4)
    assert not logprobs.requires_grad
    torch.testing.assert_close(logprobs.double(), naive(hidden, weight, targets, 1.0)[0].detach(), atol=1e-5, rtol=1e-5)
    assert entropies.shape == (N,)


@pytest.mark.parametrize("kind", ["weight", "function"])
def test_no_tokens_give_no_scores_and_zero_gradients(kind):
    hidden, weight, targets = inputs()
    logprobs, entropies = score_tokens(hidden[:0], heads(weight)[kind], targets[:0])
    assert logprobs.shape == entropies.shape == (0,)
    gradient = torch.autograd.grad(logprobs.sum(), weight)[0]
    assert torch.equal(gradient, torch.zeros_like(weight))


def test_only_the_wanted_gradients_are_computed():
    hidden, weight, targets = inputs()
    logprobs, _ = score_tokens(hidden, weight.detach(), targets, chunk=4)
    logprobs.sum().backward()
    assert hidden.grad is not None
    logprobs, _ = score_tokens(hidden.detach(), weight, targets, chunk=4)
    logprobs.sum().backward()
    assert weight.grad is not None


def test_a_second_backward_gives_the_same_gradient():
    hidden, weight, targets = inputs()
    logprobs, _ = score_tokens(hidden, weight, targets, chunk=4)
    first = torch.autograd.grad(logprobs.sum(), (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", ["weight", "function"])
def test_no_tensor_of_all_logits_is_ever_made(kind, monkeypatch):
    """Counts the bytes of every tensor made: none is larger than one chunk of logits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else [result]:
                if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and V in tensor.shape:
                    largest = max(largest, tensor.numel() // V)
            return result

    hidden, weight, targets = inputs()
    with Watch():
        logprobs, entropies = score_tokens(hidden, heads(weight)[kind], targets, chunk=7, want_entropy=True)
        (logprobs.sum() + entropies.sum()).backward()
    assert largest == 7  # and D = 6, of the weight


def test_a_batch_of_one_chunk_costs_no_second_product_of_logits():
    hidden, weight, targets = inputs()
    calls = []

    def head(h):
        calls.append(len(h))
        return h @ weight.t()

    score_tokens(hidden, head, targets, chunk=N)[0].sum().backward()
    assert calls == [13]
    calls.clear()
    score_tokens(hidden, head, targets, chunk=5)[0].sum().backward()
    assert sorted(calls) == [3, 3, 5, 5, 5]  # the last chunk, a full one, once; the others twice


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"temperature": float("nan")}, "temperature must be above 0"),
        ({"chunk": 0}, "chunk must be at least 1 token, got 0"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(changed, message):
    hidden, weight, targets = inputs()
    with pytest.raises(ValueError, match=message):
        score_tokens(hidden, weight, targets, **changed)


def test_shapes_that_do_not_fit_are_refused():
    hidden, weight, targets = inputs()
    with pytest.raises(ValueError, match=r"hidden must be \[N, D\] and targets \[N\]"):
        score_tokens(hidden, weight, targets[:-1])
    with pytest.raises(ValueError, match=r"lm_head must be \[V, D\] with D = 6"):
        score_tokens(hidden, weight.t(), targets)


@pytest.mark.parametrize("kind", ["weight", "function"])
@pytest.mark.parametrize("chunk", [1, 4, None])
def test_judging_says_how_likely_the_targets_are_and_which_are_the_likeliest(kind, chunk):
    hidden, weight, targets = inputs()
    targets[::2] = (hidden @ weight.t()).argmax(1)[::2]
    logprobs, right = judge_tokens(hidden, heads(weight)[kind], targets, vocabulary=V, chunk=chunk)
    torch.testing.assert_close(logprobs.double(), naive(hidden, weight, targets, 1.0)[0].detach(), atol=1e-5, rtol=1e-5)
    assert right.tolist() == ((hidden @ weight.t()).argmax(1) == targets).tolist()
    assert right[::2].all()
    assert not right.all()
    assert not logprobs.requires_grad
