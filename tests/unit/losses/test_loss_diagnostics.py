"""What is logged, and the correction for generator and trainer disagreeing."""

import math

import pytest
import torch

from forge.losses import (
    CISPOLoss,
    GRPOLoss,
    GSPOLoss,
    ImportanceCorrection,
    SimpleGRPOLoss,
    diagnostics,
    reduce_diagnostics,
)
from forge.losses.custom_loss import CustomLoss

NAN = float("nan")


def batch():
    """Ratios 2, 0.5, 1 and (masked) 9; then 1.5 and 0.25 and one token whose generator log-probability is lost."""
    ratios = torch.tensor([[2.0, 0.5, 1.0, 9.0], [1.5, 0.25, NAN, NAN]], dtype=torch.float64)
    logprobs = torch.full((2, 4), -1.0, dtype=torch.float64)
    logprobs[0, 3] = NAN
    return {
        "logprobs": logprobs,
        "generator_logprobs": logprobs - ratios.log(),
        "ref_logprobs": logprobs - math.log(2),
        "advantages": torch.tensor([[1.0], [-1.0]], dtype=torch.float64),
        "padding_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]]),
    }


def test_metrics_of_a_batch_worked_by_hand():
    metrics = diagnostics(GRPOLoss(), **batch()).metrics()
    assert metrics["tokens/dropped"] == 1
    assert metrics["ratio/mean"] == pytest.approx((2 + 0.5 + 1 + 1.5 + 0.25) / 5)
    assert metrics["ratio/max"] == pytest.approx(2.0)
    # Ratio 2 with A = 1 is clipped from above, 0.25 with A = −1 from below; 0.5 with A = 1 and 1.5 with −1 are not.
    assert metrics["ratio/clipped_high_frac"] == pytest.approx(0.2)
    assert metrics["ratio/clipped_low_frac"] == pytest.approx(0.2)
    assert metrics["ratio/clipped_frac"] == pytest.approx(0.4)
    assert metrics["kl/ref_k1"] == pytest.approx(math.log(2))
    assert metrics["kl/ref"] == pytest.approx(math.log(2) - 0.5)
    assert metrics["mismatch/logprob_diff"] == pytest.approx((2 * math.log(2) + 0 + math.log(1.5) + math.log(4)) / 5)
    assert metrics["correction/weight_max"] == pytest.approx(2.0)
    assert metrics["correction/capped_frac"] == 0.0


def test_a_loss_counts_as_clipped_what_its_own_formula_clips():
    assert diagnostics(SimpleGRPOLoss(), **batch()).metrics()["ratio/clipped_frac"] == 0.0
    assert diagnostics(CustomLoss(), **batch()).metrics()["ratio/clipped_frac"] == 0.0
    cispo = diagnostics(CISPOLoss(ratio_min=0.3, ratio_max=1.2), **batch()).metrics()
    assert cispo["ratio/clipped_high_frac"] == pytest.approx(2 / 5)  # 2 and 1.5, whatever the advantage
    assert cispo["ratio/clipped_low_frac"] == pytest.approx(1 / 5)
    gspo = diagnostics(GSPOLoss(), **batch()).metrics()
    # The first sequence's ratios cancel, s = 1; the second's is √(1.5 · 0.25) = 0.612, clipped from below as A < 0.
    assert gspo["ratio/clipped_low_frac"] == pytest.approx(2 / 5)
    assert gspo["ratio/mean"] == pytest.approx((3 * 1 + 2 * math.sqrt(0.375)) / 5)


def test_pieces_add_up_to_the_whole():
    whole = diagnostics(GRPOLoss(), **batch())
    rows = [{key: value[i : i + 1] for key, value in batch().items()} for i in range(2)]
    parts = [diagnostics(GRPOLoss(), **row) for row in rows]
    total = parts[0] + parts[1]
    torch.testing.assert_close(total.sums, whole.sums)
    torch.testing.assert_close(total.maxima, whole.maxima)

    class OtherRank:
        def sum(self, values):
            return values + parts[1].sums

        def max(self, value):
            return max(value, 1.5)

    assert reduce_diagnostics(GRPOLoss(), ranks=OtherRank(), **rows[0]) == pytest.approx(whole.metrics())


def test_what_is_not_known_is_not_logged():
    given = batch()
    del given["ref_logprobs"], given["generator_logprobs"]
    metrics = diagnostics(GRPOLoss(), **given).metrics()
    assert "kl/ref" not in metrics
    assert "mismatch/logprob_diff" not in metrics
    assert metrics["ratio/mean"] == 1.0
    nothing = diagnostics(GRPOLoss(), **{**batch(), "padding_mask": torch.zeros(2, 4)}).metrics()
    assert nothing == {"tokens/dropped": 0.0}


def test_dropped_tokens_may_be_counted_by_the_caller():
    assert diagnostics(GRPOLoss(), **batch(), dropped=torch.tensor(7)).metrics()["tokens/dropped"] == 7


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [[2, 0.5, 1, 0], [1.5, 0.25, 0, 0]]),
        ({"cap": 1.2}, [[1.2, 0.5, 1, 0], [1.2, 0.25, 0, 0]]),
        ({"cap": 1.2, "mode": "mask"}, [[0, 0.5, 1, 0], [0, 0.25, 0, 0]]),
        # Products over the sequence: 2 · 0.5 · 1 and 1.5 · 0.25.
        ({"level": "sequence"}, [[1, 1, 1, 0], [0.375, 0.375, 0, 0]]),
    ],
)
def test_correction_weights_by_hand(settings, expected):
    given = {key: batch()[key] for key in ("logprobs", "generator_logprobs", "padding_mask")}
    given["logprobs"].requires_grad_()
    weights = ImportanceCorrection(**settings).weights(**given)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))
    assert not weights.requires_grad


def test_sequence_mask_drops_the_whole_sequence():
    given = {
        "logprobs": torch.tensor([[-1.0, -1.0], [-1.0, -1.0]]),
        "generator_logprobs": torch.tensor([[-2.0, -2.0], [-1.5, -1.0]]),
        "padding_mask": torch.ones(2, 2),
    }
    weights = ImportanceCorrection(level="sequence", mode="mask", cap=2.0).weights(**given)
    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.0], [math.exp(0.5)] * 2]))


def test_corrected_simple_grpo_has_the_gradient_of_the_importance_weighted_policy_gradient():
    given = batch()
    logprobs = given["logprobs"].requires_grad_()
    weights = ImportanceCorrection(cap=10.0).weights(
        logprobs=logprobs, generator_logprobs=given["generator_logprobs"], padding_mask=given["padding_mask"]
    )
    (SimpleGRPOLoss(beta=0.0).token_terms(**given) * weights).sum().backward()
    torch.testing.assert_close(
        logprobs.grad, torch.tensor([[-2.0, -0.5, -1, 0], [1.5, 0.25, 0, 0]], dtype=torch.float64)
    )


def test_a_correction_that_would_count_twice_is_refused():
    ImportanceCorrection().check(SimpleGRPOLoss())
    ImportanceCorrection(mode="mask").check(SimpleGRPOLoss())
    with pytest.raises(ValueError, match="with GRPOLoss would weigh each token twice"):
        ImportanceCorrection().check(GRPOLoss())
    with pytest.raises(ValueError, match="CustomLoss has none"):
        ImportanceCorrection().check(CustomLoss())
    with pytest.raises(ValueError, match=r"cap must be at least 1, got 0.5"):
        ImportanceCorrection(cap=0.5)
    with pytest.raises(ValueError, match="level must be token or sequence, got 'word'"):
        ImportanceCorrection(level="word")
