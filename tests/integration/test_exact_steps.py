"""One optimizer step of a real model in float32: however it is cut into rows, the gradient is the same."""

import random

import pytest
import torch
from torch import nn

from forge.actors.trainer import Trainer
from forge.batching import make_batch
from forge.config import GRPOTrainingConfig
from forge.losses import LOSSES
from forge.testing.tiny_model import make_tiny_model
from forge.types import Episode, Group


class OwnMean(nn.Module):
    """A user's loss that divides by a mean over the whole batch."""

    def forward(self, logprobs, advantages, padding_mask):
        mask = padding_mask.float()
        mean = (logprobs.exp() * mask).sum() / mask.sum()
        return -(logprobs * advantages * mask).sum() / mean / mask.sum()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


def sequences() -> list[Group]:
    """32 sequences, each with a prompt of its own, of 2 to 60 tokens."""
    rng = random.Random(3)

    def group(number: int) -> Group:
        length = rng.choice([1, 2, 3, 5, 8, 13, 21, 34])
        return Group(
            id=number,
            sample_id="",
            episodes=[
                Episode(
                    prompt="",
                    response="",
                    target="",
                    prompt_ids=[number, *(rng.randrange(256) for _ in range(rng.randrange(1, 24)))],
                    response_ids=[rng.randrange(256) for _ in range(length)],
                    generator_logprobs=[-rng.uniform(4, 7) for _ in range(length)],
                    response_mask=[True] * length,
                    advantage=rng.gauss(0, 1),
                    ref_logprobs=[-rng.uniform(4, 7) for _ in range(length)],
                )
            ],
        )

    return [group(number) for number in range(32)]


def gradient(model: str, loss, *, max_tokens: int) -> torch.Tensor:
    training = GRPOTrainingConfig(
        seq_len=64, dtype="float32", max_norm=None, max_tokens_per_microbatch=max_tokens, entropy_coef=0.01
    )
    defaults = {"beta": 0.1, "max_response_len": 34}
    trainer = Trainer(model=model, training=training, loss=loss, loss_defaults=defaults)
    trainer.train_step(*make_batch(sequences(), ranks=1, pad_id=0))
    return torch.cat([p.grad.flatten() for _, p in trainer._model.named_parameters()])


@pytest.mark.parametrize("name", [*LOSSES, "own_mean"])
@pytest.mark.filterwarnings("ignore:grpo.beta")
def test_one_row_some_rows_and_a_row_each_give_the_same_gradient(model, name):
    loss = OwnMean() if name == "own_mean" else name
    whole = gradient(model, loss, max_tokens=10_000)
    for max_tokens in (200, 1):
        cut = gradient(model, loss, max_tokens=max_tokens)
        assert float((cut - whole).norm() / whole.norm()) < 1e-5, max_tokens
