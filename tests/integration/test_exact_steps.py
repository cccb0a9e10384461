"""One optimizer step of a real model in float32: however it is cut into rows and ranks, the gradient is the same."""

import asyncio
import random
import sys

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from forge.actors.trainer import Trainer
from forge.batching import make_batch
from forge.config import GRPOTrainingConfig
from forge.losses import LOSSES
from forge.service import ForgeActor
from forge.testing.tiny_model import make_tiny_model
from forge.types import Episode, Group

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import this module

NAMES = (*LOSSES, "own_mean")


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


def gradient(model: str, name: str, *, max_tokens: int, ranks: int = 1) -> Tensor:
    """The whole model's gradient of one step on the 32 sequences, flat; the same on every rank."""
    training = GRPOTrainingConfig(
        seq_len=64, dtype="float32", max_norm=None, max_tokens_per_microbatch=max_tokens, entropy_coef=0.01
    )
    loss, defaults = OwnMean() if name == "own_mean" else name, {"beta": 0.1, "max_response_len": 34}
    trainer = Trainer(model=model, training=training, loss=loss, loss_defaults=defaults)
    trainer.train_step(*make_batch(sequences(), ranks=ranks, pad_id=0))
    grads = [p.grad for _, p in trainer._model.named_parameters()]
    return torch.cat([(g.full_tensor() if hasattr(g, "full_tensor") else g).flatten() for g in grads])


class Rank(ForgeActor):
    """One of two ranks that share the batch and the model."""

    def gradients(self, model: str) -> dict[str, Tensor]:
        return {name: gradient(model, name, max_tokens=200, ranks=2) for name in NAMES}


@pytest.fixture(scope="module")
def whole(model) -> dict[str, Tensor]:
    """Every loss's gradient from one row that holds the whole batch."""
    return {name: gradient(model, name, max_tokens=10_000) for name in NAMES}


@pytest.fixture(scope="module")
def of_two_ranks(model) -> list[dict[str, Tensor]]:
    async def step():
        async with await Rank.options(procs=2).as_actor() as ranks:
            return await ranks.gradients.call_all(model)

    return asyncio.run(step())


def assert_same(cut: Tensor, whole: Tensor) -> None:
    assert float((cut - whole).norm() / whole.norm()) < 1e-5


@pytest.mark.parametrize("max_tokens", [200, 1], ids=["some rows", "a row each"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:grpo.beta")
def test_however_many_rows_the_gradient_is_the_same(model, whole, name, max_tokens):
    assert_same(gradient(model, name, max_tokens=max_tokens), whole[name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:grpo.beta")
def test_two_ranks_find_the_gradient_of_one(whole, of_two_ranks, name):
    for rank in of_two_ranks:
        assert_same(rank[name], whole[name])
