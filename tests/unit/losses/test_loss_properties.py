"""Laws that hold for every loss and every batch."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.losses import LOSSES, CISPOLoss, build_loss, kl_estimate, trained_mask
from forge.losses.custom_loss import CustomLoss

ALL = sorted(LOSSES)
quick = settings(max_examples=15, deadline=None)
JUNK = [float("nan"), float("inf"), float("-inf"), 1e38]


def make(name, *, beta=0.1):
    args = {"beta": beta} | ({"max_response_len": 16} if name == "dr_grpo" else {})
    return build_loss({"name": name, "args": args})


@st.composite
def batches(draw):
    """float64 tensors of a batch: lengths differ, the mask has holes, some sequences have no trained token."""
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.0, 1e-3, 0.3, 3.0, 30.0]))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logprobs = -normal(rows, columns).abs()
    return {
        "logprobs": logprobs,
        "generator_logprobs": logprobs + spread * normal(rows, columns),
        "ref_logprobs": logprobs + normal(rows, columns),
        "advantages": normal(rows, draw(st.sampled_from([1, columns]))),
        "padding_mask": (
            torch.rand(rows, columns, generator=generator) < draw(st.sampled_from([0.0, 0.6, 1.0]))
        ).double(),
    }


def evaluate(loss_fn, batch):
    logprobs = batch["logprobs"].clone().requires_grad_()
    loss = loss_fn(**{**batch, "logprobs": logprobs})
    loss.backward()
    return loss.detach(), logprobs.grad


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("name", ALL)
@quick
@given(batch=batches(), junk=st.sampled_from(JUNK))
def test_masked_positions_change_nothing_even_when_nan(name, batch, junk):
    loss, gradient = evaluate(make(name), batch)
    out = batch["padding_mask"] == 0
    spoiled = {
        key: value.masked_fill(out, junk)
        for key, value in batch.items()
        if key != "padding_mask" and value.shape == out.shape
    }
    other_loss, other_gradient = evaluate(make(name), {**batch, **spoiled})
    assert loss.isfinite()
    assert torch.equal(loss, other_loss)
    assert torch.equal(gradient, other_gradient)
    assert (other_gradient[out] == 0).all()


@pytest.mark.parametrize("junk", JUNK)
def test_masked_positions_of_the_custom_example_change_nothing(junk):
    lp, ref = torch.tensor([[-1.0, -2.0, -0.5]]), torch.tensor([[-1.2, -1.5, -0.5]])
    mask, adv = torch.tensor([[1, 0, 1]]), torch.tensor([[1.0]])
    results = []
    for value in (0.0, junk):
        logprobs = lp.masked_fill(mask == 0, value).requires_grad_()
        loss = CustomLoss()(logprobs, ref.masked_fill(mask == 0, value), adv, mask)
        loss.backward()
        results.append((loss.item(), logprobs.grad.tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ALL)
@quick
@given(batch=batches(), junk=st.sampled_from(JUNK[:3]), data=st.data())
def test_a_token_whose_generator_logprob_is_not_finite_is_as_good_as_masked(name, batch, junk, data):
    hit = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=batch["logprobs"].numel(), max_size=batch["logprobs"].numel()))
    ).view_as(batch["logprobs"])
    lost = evaluate(make(name), {**batch, "generator_logprobs": batch["generator_logprobs"].masked_fill(hit, junk)})
    masked = evaluate(make(name), {**batch, "padding_mask": batch["padding_mask"].masked_fill(hit, 0)})
    close(lost, masked)


@pytest.mark.parametrize("name", ALL)
@quick
@given(batch=batches(), seed=st.integers(0, 1000))
def test_permuting_sequences_changes_nothing(name, batch, seed):
    order = torch.randperm(len(batch["logprobs"]), generator=torch.Generator().manual_seed(seed))
    loss, gradient = evaluate(make(name), batch)
    other_loss, other_gradient = evaluate(make(name), {key: value[order] for key, value in batch.items()})
    close(loss, other_loss)
    close(gradient[order], other_gradient)


@pytest.mark.parametrize("name", ALL)
@quick
@given(batch=batches(), extra=st.integers(1, 4), junk=st.sampled_from(JUNK))
def test_adding_padding_changes_nothing(name, batch, extra, junk):
    loss, gradient = evaluate(make(name), batch)
    padded = {}
    for key, value in batch.items():
        fill = 0.0 if key == "padding_mask" else junk
        per_sequence = key == "advantages" and value.shape != batch["logprobs"].shape
        padded[key] = value if per_sequence else torch.nn.functional.pad(value, (0, extra), value=fill)
    if batch["advantages"].shape == (len(gradient), 1) and gradient.shape[1] == 1:
        padded["advantages"] = batch["advantages"]
    other_loss, other_gradient = evaluate(make(name), padded)
    close(loss, other_loss)
    close(gradient, other_gradient[:, : gradient.shape[1]])
    assert (other_gradient[:, gradient.shape[1] :] == 0).all()


@pytest.mark.parametrize("name", ALL)
@quick
@given(batch=batches(), factor=st.floats(0.1, 10))
def test_scaling_advantages_scales_the_policy_term(name, batch, factor):
    loss, gradient = evaluate(make(name, beta=0.0), batch)
    scaled = evaluate(make(name, beta=0.0), {**batch, "advantages": factor * batch["advantages"]})
    close((factor * loss, factor * gradient), scaled)
    # With a penalty, only the rest scales.
    penalty = evaluate(make(name), {**batch, "advantages": 0 * batch["advantages"]})[0]
    whole = evaluate(make(name), {**batch, "advantages": factor * batch["advantages"]})[0]
    close(whole, factor * loss + penalty)


@pytest.mark.parametrize("name", ALL)
@quick
@given(batch=batches(), data=st.data())
def test_pieces_with_global_counts_add_up_to_the_whole_batch(name, batch, data):
    loss_fn = make(name)
    batch["generator_logprobs"][0, 0] = float("nan")
    loss, gradient = evaluate(loss_fn, batch)
    rows = len(gradient)
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=3))})
    pieces = [{key: value[a:b] for key, value in batch.items()} for a, b in itertools.pairwise(cuts)]
    masks = [trained_mask(piece["padding_mask"], piece["generator_logprobs"]) for piece in pieces]
    counts = torch.stack([loss_fn.counts(mask) for mask in masks]).sum(0)
    assert torch.equal(counts, loss_fn.counts(torch.cat(masks)))
    logprobs = batch["logprobs"].clone().requires_grad_()
    total = 0.0
    for piece, mask, a, b in zip(pieces, masks, cuts, cuts[1:], strict=False):
        terms = loss_fn.token_terms(**{**piece, "logprobs": logprobs[a:b]})
        part = (terms * loss_fn.weights(mask, counts, dtype=torch.float64)).sum()
        part.backward()
        total = total + part.detach()
    torch.testing.assert_close(logprobs.grad, gradient, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(total, loss, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", ALL)
def test_a_batch_without_a_trained_token_gives_zero_with_zero_gradients(name):
    nan = torch.full((2, 3), float("nan"))
    loss, gradient = evaluate(
        make(name),
        {
            "logprobs": nan,
            "generator_logprobs": nan,
            "ref_logprobs": nan,
            "advantages": nan[:, :1],
            "padding_mask": torch.zeros(2, 3),
        },
    )
    assert loss.item() == 0.0
    assert gradient.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("name", ALL)
def test_a_mask_of_bools_and_one_of_floats_are_the_same(name):
    logprobs = -torch.rand(3, 4)
    tensors = {"logprobs": logprobs, "ref_logprobs": logprobs - 0.1, "advantages": torch.tensor([[1.0], [-1.0], [0.5]])}
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    results = [evaluate(make(name), {**tensors, "padding_mask": kind}) for kind in (mask, mask.bool(), mask.float())]
    close(results[0], results[1])
    close(results[0], results[2])


@quick
@given(delta=st.floats(-200, 200))
def test_k3_is_never_negative_and_its_gradient_points_to_the_reference(delta):
    logprobs = torch.tensor([delta], dtype=torch.float64, requires_grad=True)
    kl = kl_estimate(logprobs, torch.zeros(1, dtype=torch.float64), "k3")
    kl.sum().backward()
    assert kl.item() >= 0
    # Going down the gradient moves towards the reference: the gradient has the sign of Δ.
    assert math.copysign(1, logprobs.grad.item()) == math.copysign(1, delta) or abs(delta) < 1e-15
    assert logprobs.grad.isfinite()


@quick
@given(delta=st.floats(-19.9, 19.9))
def test_k3_equals_its_formula_within_the_limit(delta):
    logprobs = torch.tensor([delta], dtype=torch.float64, requires_grad=True)
    kl = kl_estimate(logprobs, torch.zeros(1, dtype=torch.float64), "k3")
    kl.sum().backward()
    assert kl.item() == pytest.approx(math.exp(-delta) - 1 + delta, rel=1e-9, abs=1e-14)
    assert logprobs.grad.item() == pytest.approx(1 - math.exp(-delta), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_penalty_of_every_loss_falls_when_the_policy_moves_towards_the_reference(name, estimator):
    args = {"beta": 0.5, "kl_estimator": estimator} | ({"max_response_len": 8} if name == "dr_grpo" else {})
    batch = {
        "logprobs": torch.tensor([[-1.0, -3.0]]),
        "ref_logprobs": torch.tensor([[-2.0, -2.0]]),
        "advantages": torch.zeros(1, 1),
        "padding_mask": torch.ones(1, 2),
    }
    _, gradient = evaluate(build_loss({"name": name, "args": args}), batch)
    assert gradient[0, 0] > 0 > gradient[0, 1]


@quick
@given(ratio=st.floats(1e-3, 1e3), adv=st.floats(-5, 5).filter(lambda a: abs(a) > 1e-3))
@pytest.mark.parametrize(("name", "low", "high"), [("grpo", 0.8, 1.2), ("dapo", 0.8, 1.28), ("dr_grpo", 0.8, 1.2)])
def test_clipping_stops_the_gradient_exactly_where_the_formula_says(name, low, high, ratio, adv):
    batch = {
        "logprobs": torch.tensor([[-1.0]], dtype=torch.float64),
        "generator_logprobs": torch.tensor([[-1.0 - math.log(ratio)]], dtype=torch.float64),
        "advantages": torch.tensor([[adv]], dtype=torch.float64),
        "padding_mask": torch.ones(1, 1),
    }
    _, gradient = evaluate(make(name, beta=0.0), batch)
    stopped = (ratio > high + 1e-12 and adv > 0) or (ratio < low - 1e-12 and adv < 0)
    assert (gradient.item() == 0) == stopped


@quick
@given(log_ratio=st.floats(-1000, 1000), adv=st.floats(-5, 5).filter(lambda a: abs(a) > 1e-3))
def test_cispo_never_zeroes_the_gradient_of_a_token_with_an_advantage(log_ratio, adv):
    batch = {
        "logprobs": torch.tensor([[-1.0]]),
        "generator_logprobs": torch.tensor([[-1.0 - log_ratio]]),
        "advantages": torch.tensor([[adv]]),
        "padding_mask": torch.ones(1, 1),
    }
    _, gradient = evaluate(CISPOLoss(), batch)
    assert gradient.item() * adv < 0
    assert abs(gradient.item()) == pytest.approx(
        min(5.0, math.exp(min(max(log_ratio, -20.0), 20.0))) * abs(adv), rel=1e-3
    )
