"""Fine-tuning on real TorchTitan models: against transformers with labels masked by hand, packed and not."""

import asyncio
import math
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forge.actors.trainer import Trainer
from forge.batching import make_document_batch
from forge.config import ParallelismConfig, TrainingConfig
from forge.data.documents import Document
from forge.losses import SFTLoss
from forge.testing.tiny_model import make_tiny_model

BETA1 = 0.9  # AdamW's first moment after one step is (1 - BETA1) times the gradient
SEQ_LEN = 64


def settings(**changes) -> TrainingConfig:
    return TrainingConfig(
        **{"steps": 10, "learning_rate": 1e-3, "seq_len": SEQ_LEN, "dtype": "float32", "max_norm": None, **changes}
    )


def documents(count: int = 9, *, seed: int = 0) -> list[Document]:
    """Conversations of two turns, all with the same beginning; the answers are trained, one of them has none."""
    rng = random.Random(seed)
    preamble = [rng.randrange(256) for _ in range(6)]

    def turn(longest: int) -> list[int]:
        return [rng.randrange(256) for _ in range(rng.randrange(1, longest))]

    made = []
    for number in range(count):
        parts = [(preamble, False), (turn(12), False), (turn(9), True), (turn(8), False), (turn(12), number != 3)]
        if number == 3:
            parts[2] = (parts[2][0], False)
        ids = [i for tokens, _ in parts for i in tokens]
        trained = [mark for tokens, mark in parts for _ in tokens]
        made.append(Document(id=f"{number}", token_ids=ids, trained=trained))
    return made


def trainer(model: str, **changes) -> Trainer:
    return Trainer(model=model, training=settings(**changes), loss=SFTLoss())


def save(one: Trainer, folder: Path) -> None:
    one.save(str(folder))
    asyncio.run(one.save_finished())


def moments(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for f in (folder / "trainer").glob("*.safetensors") for k, v in load_file(f).items()}


def transformers_losses(model: torch.nn.Module, docs: list[Document]) -> list[tuple[torch.Tensor, int]]:
    """Each document alone: the sum of -log p over its trained tokens, by transformers' labels, and their number."""
    losses = []
    for document in docs:
        ids = torch.tensor([document.token_ids])
        labels = torch.where(torch.tensor([document.trained]), ids, -100)
        tokens = int((labels[:, 1:] != -100).sum())
        mean = model(ids, labels=labels).loss if tokens else torch.zeros(())
        losses.append((mean * tokens, tokens))
    return losses


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", family="qwen3"))


@pytest.fixture(scope="module")
def expected(model) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of transformers: the mean over all trained tokens of the batch."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    losses = transformers_losses(reference, documents())
    loss = sum(total for total, _ in losses) / sum(tokens for _, tokens in losses)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in reference.named_parameters()}


@pytest.mark.parametrize("packing", [True, False])
def test_gradients_of_one_step_are_those_of_transformers_with_masked_labels(model, expected, packing, tmp_path):
    loss, gradients = expected
    # Rows of 64 tokens: the batch takes several, so accumulation over micro-batches is part of it.
    one = trainer(model, packing=packing, max_tokens_per_microbatch=SEQ_LEN)
    assert one.train_step(*make_document_batch(documents(), ranks=1, pad_id=0)) == pytest.approx(loss, rel=1e-4)
    assert one.metrics()["tokens/trained"] == sum(sum(d.trained) for d in documents())
    save(one, tmp_path)
    ours = moments(tmp_path)
    for name, gradient in gradients.items():
        mine = ours[f"exp_avg.{name}"].double() / (1 - BETA1)
        assert (mine - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name


def test_two_processes_take_the_step_of_transformers_packed_and_not_and_validate_alike(model, expected, tmp_path):
    """FSDP over two ranks that hold different numbers of documents: the mean is over the tokens of both."""
    loss, gradients = expected
    batch = make_document_batch(documents(), ranks=2, pad_id=0)

    async def step(packing: bool) -> tuple[float, dict[str, float]]:
        actor = await Trainer.options(procs=2).as_actor(
            model=model,
            training=settings(packing=packing, max_tokens_per_microbatch=SEQ_LEN),
            parallelism=ParallelismConfig(data_parallel_shard_degree=2),
            loss=SFTLoss(),
        )
        async with actor:
            judged = await actor.evaluate.call(*batch)
            value = await actor.train_step.call(*batch)
            await actor.save.call(str(tmp_path / str(packing)))
            await actor.save_finished.call()
        return value, judged

    async def both() -> list[tuple[float, dict[str, float]]]:
        return await asyncio.gather(step(True), step(False))

    for packing, (value, judged) in zip((True, False), asyncio.run(both()), strict=True):
        assert value == pytest.approx(loss, rel=1e-4)
        assert judged["nats"] / judged["tokens"] == pytest.approx(loss, rel=1e-4)
        one = trainer(model)  # reads the shards of both ranks
        one.load(str(tmp_path / str(packing)))
        save(one, tmp_path / f"{packing}-whole")
        ours = moments(tmp_path / f"{packing}-whole")
        for name, gradient in gradients.items():
            mine = ours[f"exp_avg.{name}"].double() / (1 - BETA1)
            assert (mine - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name


def test_packed_and_unpacked_documents_have_the_same_losses(model):
    """200 samples: the loss of each, packed into full rows with others, alone in a row, and by transformers."""
    docs = [d for d in documents(200, seed=1) if any(d.trained)]
    theirs = transformers_losses(AutoModelForCausalLM.from_pretrained(model), docs)
    losses = {}
    for packing in (True, False):
        one = trainer(model, packing=packing, max_tokens_per_microbatch=512)
        inputs, targets = make_document_batch(docs, ranks=1, pad_id=0)
        rows = one._pack(inputs[0], targets[0])
        assert (len(rows) == len(docs)) != packing
        sums = torch.zeros(len(docs), dtype=torch.float64)
        for row, (logprobs, _) in zip(rows, one._scorer.judge(rows), strict=True):
            sums.index_add_(0, row.score_row_N, -logprobs[row.score_pair_N].double())
        losses[packing] = sums / torch.tensor([tokens for _, tokens in theirs])
    assert (losses[True] - losses[False]).abs().max() < 1e-4
    expected = torch.tensor([float(total.detach()) / tokens for total, tokens in theirs], dtype=torch.float64)
    assert (losses[True] - expected).abs().max() < 1e-4


def test_validation_counts_tokens_nats_and_right_ones_and_learns_nothing(model):
    reference = AutoModelForCausalLM.from_pretrained(model)
    docs = documents()
    right = sum(
        int(((reference(torch.tensor([d.token_ids])).logits[0, :-1].argmax(-1)) == torch.tensor(d.token_ids[1:]))[
            torch.tensor(d.trained[1:])
        ].sum())
        for d in docs
    )  # fmt: skip
    losses = transformers_losses(reference, docs)
    one = trainer(model)
    before = {name: p.detach().clone() for name, p in one._model.named_parameters()}
    judged = one.evaluate(*make_document_batch(docs, ranks=1, pad_id=0))
    assert judged["tokens"] == sum(tokens for _, tokens in losses)
    assert judged["nats"] == pytest.approx(sum(float(total.detach()) for total, _ in losses), rel=1e-5)
    assert judged["right"] == right
    assert all(torch.equal(p, before[name]) for name, p in one._model.named_parameters())


def test_a_small_fixed_set_is_learned_by_heart(model):
    one = trainer(model, learning_rate=3e-3, max_norm=1.0)
    batch = make_document_batch(documents(), ranks=1, pad_id=0)
    losses = [one.train_step(*batch) for _ in range(120)]
    assert losses[0] > math.log(256) - 1
    assert losses[-1] < 0.02
    judged = one.evaluate(*batch)
    assert judged["right"] == judged["tokens"]
