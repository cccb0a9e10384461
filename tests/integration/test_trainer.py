"""The trainer on real TorchTitan models: against transformers, over several processes, and through a checkpoint."""

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forge.actors.trainer import NonFiniteStep, Trainer
from forge.batching import make_batch
from forge.config import ParallelismConfig
from forge.testing.tiny_model import make_tiny_model
from tests.integration.batches import groups, settings

BETA1 = 0.9  # AdamW's first moment after one step is (1 - BETA1) times the gradient
LAYOUTS = {
    "fsdp2": ParallelismConfig(data_parallel_shard_degree=2),
    "pp2": ParallelismConfig(pipeline_parallel_degree=2, data_parallel_shard_degree=1),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", family="qwen3"))


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory) -> tuple[float, Path]:
    """One step of one process: its loss and its checkpoint."""
    trainer = Trainer(model=model, training=settings(), loss="dapo")
    loss = trainer.train_step(*make_batch(groups(), ranks=1, pad_id=0))
    folder = tmp_path_factory.mktemp("alone")
    trainer.save(str(folder))
    return loss, folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in (folder / "trainer").glob("*.safetensors") for k, v in load_file(file).items()}


def transformers_step(model: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The same loss and gradients from transformers: every episode in a forward of its own, DAPO's formula by hand."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    episodes = [e for g in groups() for e in g.episodes]
    tokens = sum(len(e.response_ids) for e in episodes)
    total = 0.0
    for e in episodes:
        logits = reference(torch.tensor([e.prompt_ids + e.response_ids])).logits[0, len(e.prompt_ids) - 1 : -1]
        logprobs = (logits / 0.7).log_softmax(-1)[range(len(e.response_ids)), e.response_ids]
        ratio = (logprobs - torch.tensor(e.generator_logprobs)).exp()
        clipped = ratio.clamp(0.8, 1.28)
        part = -torch.minimum(ratio * e.advantage, clipped * e.advantage).sum() / tokens
        part.backward()
        total += part.item()
    return total, {name: p.grad for name, p in reference.named_parameters()}


def test_loss_and_gradients_are_those_of_transformers(model, tmp_path):
    """Packing, shared prompts, shifts, temperature and the loss at once, against code that shares none of it."""
    expected, gradients = transformers_step(model)
    trainer = Trainer(model=model, training=settings(), loss="dapo", temperature=0.7)
    assert trainer.train_step(*make_batch(groups(), ranks=1, pad_id=0)) == pytest.approx(expected, rel=1e-4)
    trainer.save(str(tmp_path))
    moments = tensors(tmp_path)
    for name, gradient in gradients.items():
        ours = moments[f"exp_avg.{name}"].double() / (1 - BETA1)
        assert (ours - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_take_the_same_step_as_one(model, alone, layout, tmp_path):
    """FSDP and pipeline parallelism: same loss, gradients and weights; the checkpoint loads on one process."""
    expected, folder = alone
    parallelism = LAYOUTS[layout]
    ranks = 2 if layout == "fsdp2" else 1

    async def step() -> float:
        trainer = await Trainer.options(procs=2).as_actor(
            model=model, training=settings(), parallelism=parallelism, loss="dapo"
        )
        async with trainer:
            assert await trainer.data_parallel_ranks.call_all() == [ranks, ranks]
            losses = await trainer.train_step.call_all(*make_batch(groups(), ranks=ranks, pad_id=0))
            assert losses[0] == losses[1]
            await trainer.save.call(str(tmp_path))
        return losses[0]

    assert asyncio.run(step()) == pytest.approx(expected, rel=1e-4)
    single = Trainer(model=model, training=settings(), loss="dapo")
    assert single.load(str(tmp_path)) == 1  # shards of two ranks, read by one
    single.save(str(tmp_path / "one"))
    ours, theirs = tensors(tmp_path / "one"), tensors(folder)
    assert ours.keys() == theirs.keys()
    for name in ours:
        if name.startswith("exp_avg."):
            assert (ours[name] - theirs[name]).norm() <= 1e-4 * theirs[name].norm() + 1e-9, name
    one, two = load_file(folder / "hf" / "model.safetensors"), load_file(tmp_path / "hf" / "model.safetensors")
    for name in one:
        # Adam's first step is the gradient's sign: where a gradient is rounding noise it may differ by two steps.
        assert (one[name] - two[name]).abs().max() < 2.1e-3, name
        assert ((one[name] - two[name]).abs() > 1e-4).float().mean() < 0.01, name


def test_a_resumed_trainer_goes_on_bit_for_bit(model, tmp_path):
    batches = [make_batch(groups(seed=s), ranks=1, pad_id=0) for s in range(4)]
    trainer = Trainer(model=model, training=settings(warmup_steps=3, lr_schedule="cosine"), loss="grpo")
    losses = []
    for i, batch in enumerate(batches):
        if i == 2:
            trainer.save(str(tmp_path))
        losses.append(trainer.train_step(*batch))
    resumed = Trainer(model=model, training=settings(warmup_steps=3, lr_schedule="cosine"), loss="grpo")
    assert resumed.load(str(tmp_path)) == 2
    assert [resumed.train_step(*b) for b in batches[2:]] == losses[2:]
    assert resumed.metrics()["lr"] == trainer.metrics()["lr"]


def test_a_step_with_nan_is_not_applied(model):
    trainer = Trainer(model=model, training=settings(), loss="reinforce")
    batch = groups()
    batch[0].episodes[0].advantage = float("nan")
    before = {name: p.detach().clone() for name, p in trainer._model.named_parameters()}
    with pytest.raises(NonFiniteStep, match=r"step 1: loss nan.*learning_rate"):
        trainer.train_step(*make_batch(batch, ranks=1, pad_id=0))
    assert all(torch.equal(p, before[name]) for name, p in trainer._model.named_parameters())
    assert trainer.step == 0


def test_the_entropy_bonus_raises_the_entropy(model):
    """On advantages of zero the bonus is all there is: entropy must go up, and down with the opposite sign."""
    batch = groups()
    for g in batch:
        for e in g.episodes:
            e.advantage = 0.0
    entropies = []
    for coefficient in (0.0, 1.0):
        trainer = Trainer(model=model, training=settings(entropy_coef=coefficient), loss="reinforce")
        for _ in range(3):
            trainer.train_step(*make_batch(batch, ranks=1, pad_id=0))
        entropies.append(trainer.metrics()["entropy"])
    assert entropies[1] > entropies[0] + 1e-4


def test_batches_for_another_number_of_ranks_are_refused(model):
    trainer = Trainer(model=model, training=settings())
    with pytest.raises(ValueError, match="one dict for each of the 1 data-parallel ranks, got 2"):
        trainer.train_step(*make_batch(groups(), ranks=2, pad_id=0))
