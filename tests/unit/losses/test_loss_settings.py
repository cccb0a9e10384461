"""Settings that would empty a loss of its meaning, and tensors that do not fit."""

import pytest
import torch

from forge.losses import (
    LOSSES,
    CISPOLoss,
    DAPOLoss,
    DrGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    ReinforceLoss,
    SAPOLoss,
    SimpleGRPOLoss,
    build_loss,
)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GSPOLoss(clip_high=0.2), "GSPOLoss: clip_high must be below 0.1, got 0.2.*never clip"),
        (lambda: GSPOLoss(clip_low=0.1), "GSPOLoss: clip_low must be below 0.1, got 0.1"),
        (lambda: CISPOLoss(ratio_max=0.2), "CISPOLoss: ratio_max must be at least 1, got 0.2.*REINFORCE times 0.2"),
        (lambda: CISPOLoss(ratio_min=1.5), "ratio_min must lie between 0 and 1, got 1.5"),
        (lambda: GRPOLoss(clip_high=-0.1), "GRPOLoss: clip_high must be 0 or more, got -0.1"),
        (lambda: DAPOLoss(clip_low=-0.1), "DAPOLoss: clip_low must lie between 0 and 1, got -0.1"),
        (lambda: GRPOLoss(beta=0.1, kl_estimator="k1"), "'k1' has zero expected gradient"),
        (lambda: SimpleGRPOLoss(kl_estimator="k4"), "must be 'k3' or 'k2', got 'k4'"),
        (lambda: SimpleGRPOLoss(beta=-1.0), "beta must be 0 or more, got -1.0"),
        (lambda: SimpleGRPOLoss(beta=float("nan")), "beta must be 0 or more, got nan"),
        (lambda: DrGRPOLoss(max_response_len=0), "max_response_len must be above 0, got 0"),
        (lambda: SAPOLoss(tau_neg=0.0), "tau_neg must be above 0, got 0.0"),
        (lambda: ReinforceLoss(clip_ratio=-0.2), "clip_ratio must lie between 0 and 1.*got -0.2"),
    ],
)
def test_a_setting_that_misleads_is_refused_in_one_line(build, message):
    with pytest.raises(ValueError, match=message) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_dapo_without_clip_higher_is_warned_about():
    with pytest.warns(UserWarning, match=r"clip_high=0.2 is not above clip_low=0.2"):
        DAPOLoss(clip_high=0.2)


def test_defaults_are_those_of_the_papers():
    assert (SimpleGRPOLoss().beta, GRPOLoss().beta, DAPOLoss().beta) == (0.1, 0.0, 0.0)
    assert (GRPOLoss().clip_low, GRPOLoss().clip_high) == (0.2, 0.2)
    assert (DAPOLoss().clip_low, DAPOLoss().clip_high) == (0.2, 0.28)
    assert (CISPOLoss().ratio_min, CISPOLoss().ratio_max) == (0.0, 5.0)
    assert (GSPOLoss().clip_low, GSPOLoss().clip_high) == (3e-4, 4e-4)
    assert (SAPOLoss().tau_pos, SAPOLoss().tau_neg) == (1.0, 1.05)
    assert ReinforceLoss().clip_ratio is None


def tensors(**changed):
    shape = (2, 3)
    return {
        "logprobs": torch.zeros(shape),
        "advantages": torch.ones(2, 1),
        "padding_mask": torch.ones(shape),
        "ref_logprobs": torch.zeros(shape),
        **changed,
    }


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_beta_above_zero_without_a_reference_is_refused_and_beta_zero_needs_none(name):
    def make(beta):
        args = {"beta": beta} | ({"max_response_len": 4} if name == "dr_grpo" else {})
        return build_loss({"name": name, "args": args})

    given = tensors()
    del given["ref_logprobs"]
    with pytest.raises(ValueError, match=r"beta=0.1, so it needs ref_logprobs"):
        make(0.1)(**given)
    assert make(0.0)(**given).isfinite()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"advantages": torch.ones(2)}, r"advantages must be \[B, 1\] or \[B, R\].*got \(2,\)"),
        ({"advantages": torch.ones(1, 3)}, "advantages must be"),
        ({"padding_mask": torch.ones(2, 4)}, r"padding_mask must have the shape of logprobs, \(2, 3\), got \(2, 4\)"),
        ({"ref_logprobs": torch.ones(2, 1)}, "ref_logprobs must have the shape"),
        ({"generator_logprobs": torch.ones(3)}, "generator_logprobs must have the shape"),
        ({"logprobs": torch.ones(3)}, r"logprobs must be \[B, R\], got shape \(3,\)"),
    ],
)
def test_a_tensor_that_broadcasting_would_hide_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        GRPOLoss()(**tensors(**changed))


def test_arguments_are_keywords_only():
    with pytest.raises(TypeError):
        GRPOLoss()(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1))


def test_half_precision_is_computed_in_float32():
    logprobs = torch.full((1, 2), -1.0, dtype=torch.bfloat16, requires_grad=True)
    loss = SimpleGRPOLoss()(
        **{
            **tensors(),
            "logprobs": logprobs,
            "padding_mask": torch.ones(1, 2),
            "advantages": torch.ones(1, 1),
            "ref_logprobs": torch.zeros(1, 2),
        }
    )
    assert loss.dtype == torch.float32
    loss.backward()
    assert logprobs.grad.dtype == torch.bfloat16
