"""Small cases whose numbers were worked by hand."""

import math

import pytest
import torch

from forge.losses import (
    CISPOLoss,
    DAPOLoss,
    DrGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    ReinforceLoss,
    SAPOLoss,
    SimpleGRPOLoss,
)
from forge.losses.custom_loss import CustomLoss


def evaluate(loss_fn, *, lp, adv, gen=None, ref=None, mask=None):
    """(loss, gradient) of rows of numbers, as Python floats."""
    logprobs = torch.tensor(lp, dtype=torch.float64, requires_grad=True)

    def tensor(rows):
        return None if rows is None else torch.tensor(rows, dtype=torch.float64)

    loss = loss_fn(
        logprobs=logprobs,
        advantages=tensor(adv),
        padding_mask=torch.ones_like(logprobs) if mask is None else tensor(mask),
        generator_logprobs=tensor(gen),
        ref_logprobs=tensor(ref),
    )
    loss.backward()
    return loss.item(), logprobs.grad.tolist()


def one_token(loss_fn, *, ratio, adv, lp=-2.0):
    loss, gradient = evaluate(loss_fn, lp=[[lp]], gen=[[lp - math.log(ratio)]], adv=[[adv]])
    return loss, gradient[0][0]


@pytest.mark.parametrize(
    ("ratio", "adv", "loss", "gradient"),
    [
        (1.0, 1.0, -1.0, -1.0),
        (1.1, 1.0, -1.1, -1.1),  # inside the clip range: −r·A, and d(−r·A)/dlp is the same number
        (1.5, 1.0, -1.2, 0.0),  # clipped from above
        (1.5, -1.0, 1.5, 1.5),  # not clipped: a bad token that became likelier
        (0.5, 1.0, -0.5, -0.5),  # not clipped: a good token that became less likely
        (0.5, -1.0, 0.8, 0.0),  # clipped from below
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_grpo_clips_one_token(ratio, adv, loss, gradient):
    assert one_token(GRPOLoss(), ratio=ratio, adv=adv) == pytest.approx((loss, gradient))


def test_dapo_clips_higher_from_above_than_from_below():
    assert one_token(DAPOLoss(), ratio=1.25, adv=1.0) == pytest.approx((-1.25, -1.25))
    assert one_token(GRPOLoss(), ratio=1.25, adv=1.0) == pytest.approx((-1.2, 0.0))
    assert one_token(DAPOLoss(), ratio=1.3, adv=1.0) == pytest.approx((-1.28, 0.0))
    assert one_token(DAPOLoss(), ratio=0.75, adv=-1.0) == pytest.approx((0.8, 0.0))


def test_cispo_caps_the_weight_and_keeps_the_gradient():
    assert one_token(CISPOLoss(), ratio=8.0, adv=1.0) == pytest.approx((10.0, -5.0))
    assert one_token(CISPOLoss(), ratio=0.5, adv=1.0) == pytest.approx((1.0, -0.5))


def test_reinforce_weighs_by_the_ratio_and_clips_it_when_asked():
    assert one_token(ReinforceLoss(), ratio=2.0, adv=1.0) == pytest.approx((4.0, -2.0))
    assert one_token(ReinforceLoss(clip_ratio=0.2), ratio=2.0, adv=1.0) == pytest.approx((2.4, -1.2))
    assert one_token(ReinforceLoss(clip_ratio=0.2), ratio=0.1, adv=-1.0) == pytest.approx((-1.6, 0.8))


def test_sapo_at_ratio_one_has_the_gradient_of_reinforce():
    assert one_token(SAPOLoss(), ratio=1.0, adv=1.0) == pytest.approx((-2.0, -1.0))
    assert one_token(SAPOLoss(), ratio=1.0, adv=-1.0) == pytest.approx((2 / 1.05, 1.0))


def test_sapo_derivative_peaks_at_ratio_one_and_falls_faster_for_negative_advantages():
    def slope(ratio, adv):  # d loss / d ratio, as d ratio / d lp = ratio
        return abs(one_token(SAPOLoss(), ratio=ratio, adv=adv)[1]) / ratio

    for adv in (1.0, -1.0):
        values = [slope(r, adv) for r in (0.2, 0.6, 0.9, 1.0, 1.1, 1.5, 3.0)]
        assert max(values) == values[3] == pytest.approx(1.0)
        assert values[:4] == sorted(values[:4])
        assert values[3:] == sorted(values[3:], reverse=True)
    for ratio in (0.2, 0.6, 1.5, 3.0):
        assert slope(ratio, -1.0) < slope(ratio, 1.0)
    assert slope(3.0, 1.0) == pytest.approx(4 * 0.8807970779778823 * 0.11920292202211755)  # 4·σ(2)·σ(−2)


def test_gspo_with_its_defaults_clips_the_sequence_and_not_the_token():
    # The mean of (0.1, 0.3) is 0.2: s = 1.221 > 1.0004, so nothing is learned from a good sequence ...
    gen = [[-1.1, -1.3]]
    loss, gradient = evaluate(GSPOLoss(), lp=[[-1.0, -1.0]], gen=gen, adv=[[1.0]])
    assert loss == pytest.approx(-1.0004)
    assert gradient == [[0.0, 0.0]]
    # ... and a bad one pushes both its tokens alike, by s/2 each.
    loss, gradient = evaluate(GSPOLoss(), lp=[[-1.0, -1.0]], gen=gen, adv=[[-1.0]])
    assert loss == pytest.approx(math.exp(0.2))
    assert gradient[0] == pytest.approx([math.exp(0.2) / 2] * 2)
    # Ratios that cancel over the sequence are not clipped, however far each token went.
    loss, gradient = evaluate(GSPOLoss(), lp=[[-1.0, -1.0]], gen=[[-1.5, -0.5]], adv=[[1.0]])
    assert (loss, *gradient[0]) == pytest.approx((-1.0, -0.5, -0.5))


def test_gspo_takes_the_mean_of_token_advantages_over_trained_tokens():
    loss, _ = evaluate(GSPOLoss(), lp=[[-1.0] * 3], adv=[[1.0, 2.0, 99.0]], mask=[[1, 1, 0]])
    assert loss == pytest.approx(-1.5)


def test_simple_grpo_has_ratio_one_and_a_penalty_that_pulls_to_the_reference():
    # k3 at Δ = ln 2 is 0.5 − 1 + 0.693, its gradient 1 − 0.5.
    loss, gradient = evaluate(SimpleGRPOLoss(beta=0.1), lp=[[-1.0]], ref=[[-1.0 - math.log(2)]], adv=[[2.0]])
    assert loss == pytest.approx(-2.0 + 0.1 * (math.log(2) - 0.5))
    assert gradient[0][0] == pytest.approx(-2.0 + 0.1 * 0.5)


TWO_SEQUENCES = {"lp": [[-1.0] * 4, [-1.0] * 4], "adv": [[1.0], [4.0]], "mask": [[1, 1, 1, 0], [1, 0, 0, 0]]}


def test_aggregations_of_a_sequence_of_three_and_one_of_one_token():
    # On-policy every token costs −A: −1 three times, −4 once.
    sequence_mean, gradient = evaluate(GRPOLoss(), **TWO_SEQUENCES)
    assert sequence_mean == pytest.approx((-1 - 4) / 2)
    assert gradient[0] == pytest.approx([-1 / 6, -1 / 6, -1 / 6, 0])
    assert gradient[1] == pytest.approx([-2, 0, 0, 0])
    token_mean, gradient = evaluate(DAPOLoss(), **TWO_SEQUENCES)
    assert token_mean == pytest.approx((-3 - 4) / 4)
    assert gradient[0] == pytest.approx([-0.25, -0.25, -0.25, 0])
    constant, gradient = evaluate(DrGRPOLoss(max_response_len=10), **TWO_SEQUENCES)
    assert constant == pytest.approx((-3 - 4) / 20)
    assert gradient[1] == pytest.approx([-0.2, 0, 0, 0])


def test_a_log_ratio_beyond_twenty_is_clamped_and_stays_finite():
    loss, gradient = evaluate(GRPOLoss(), lp=[[0.0]], gen=[[-1000.0]], adv=[[-1.0]])
    assert loss == pytest.approx(math.exp(20))
    assert gradient == [[0.0]]


def test_without_generator_logprobs_the_ratio_is_one_with_a_gradient():
    assert evaluate(GRPOLoss(), lp=[[-3.0]], adv=[[2.0]]) == (-2.0, [[-2.0]])


def test_a_token_without_a_finite_generator_logprob_leaves_mask_and_denominator():
    loss, gradient = evaluate(DAPOLoss(), lp=[[-1.0] * 3], gen=[[-1.0, float("-inf"), float("nan")]], adv=[[3.0]])
    assert loss == pytest.approx(-3.0)
    assert gradient == [[-3.0, 0.0, 0.0]]


def test_the_custom_example_by_hand():
    # Δ = ln 2, so r = 2 is clipped to 1.2, and k3 = ln 2 − 0.5. Clipped, only the KL has a slope: 0.1 · (1 − e^−Δ).
    logprobs = torch.tensor([[-1.0, float("nan")]], dtype=torch.float64, requires_grad=True)
    loss = CustomLoss(clip_range=0.2, beta=0.1)(
        logprobs=logprobs,
        ref_logprobs=torch.tensor([[-1.0 - math.log(2), 0.0]], dtype=torch.float64),
        advantages=torch.tensor([[1.0]]),
        padding_mask=torch.tensor([[1, 0]]),
    )
    assert loss.item() == pytest.approx(-1.2 + 0.1 * (math.log(2) - 0.5))
    loss.backward()
    assert logprobs.grad[0].tolist() == pytest.approx([0.05, 0.0])
