"""The loss of supervised fine-tuning, by hand and against torch's cross-entropy."""

import pytest
import torch

from forge.losses import LOSSES, SFTLoss


def test_it_is_the_mean_over_trained_tokens_and_not_over_sequences():
    logprobs = torch.tensor([[-1.0, -3.0, float("nan")], [-5.0, -100.0, -100.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    loss = SFTLoss()(logprobs=logprobs, advantages=torch.ones(2, 1), padding_mask=mask)
    loss.backward()
    assert loss.item() == pytest.approx(3.0)  # (1 + 3 + 5) / 3
    assert logprobs.grad.tolist() == [
        [pytest.approx(-1 / 3), pytest.approx(-1 / 3), 0.0],
        [pytest.approx(-1 / 3), 0, 0],
    ]


def test_it_is_the_cross_entropy_of_torch():
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 5, 11, dtype=torch.float64), torch.randint(0, 11, (2, 5))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    logprobs = logits.log_softmax(-1).gather(2, targets[:, :, None])[:, :, 0]
    ignored = torch.where(mask > 0, targets, -100)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ignored.flatten())
    ours = SFTLoss()(logprobs=logprobs, advantages=torch.ones(2, 1), padding_mask=mask)
    assert ours.item() == pytest.approx(expected.item(), rel=1e-6)


def test_it_is_not_offered_to_grpo():
    assert SFTLoss not in LOSSES.values()
