"""The trainer on real TorchTitan models: against transformers, over several processes, and through a checkpoint."""

import asyncio
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from forge.actors.trainer import NonFiniteStep, Trainer
from forge.actors.trainer_state import BackgroundWriter
from forge.attention import TreeLayout
from forge.batching import make_batch
from forge.config import ParallelismConfig
from forge.testing.tiny_model import make_tiny_model
from tests.integration.batches import groups, settings

BETA1 = 0.9  # AdamW's first moment after one step is (1 - BETA1) times the gradient
MAX_NORM = 0.1  # a fiftieth of the norm of the gradient of `groups()`
LAYOUTS = {
    "fsdp2": ParallelismConfig(data_parallel_shard_degree=2),
    "pp2": ParallelismConfig(pipeline_parallel_degree=2, data_parallel_shard_degree=1),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", family="qwen3"))


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory) -> tuple[float, Path]:
    """One step of one process, gradients clipped: its loss and its checkpoint."""
    trainer = Trainer(model=model, training=settings(max_norm=MAX_NORM), loss="dapo")
    loss = trainer.train_step(*make_batch(groups(), ranks=1, pad_id=0))
    folder = tmp_path_factory.mktemp("alone")
    save(trainer, folder)
    return loss, folder


def save(trainer: Trainer, folder: Path) -> None:
    trainer.save(str(folder))
    asyncio.run(trainer.save_finished())


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in (folder / "trainer").glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.fixture(scope="module")
def transformers_step(model) -> tuple[float, dict[str, Tensor]]:
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


def assert_gradients(trainer: Trainer, expected: dict[str, Tensor], folder: Path) -> None:
    """The gradients that the first step of `trainer` applied, seen in the optimizer's first moments."""
    save(trainer, folder)
    moments = tensors(folder)
    for name, gradient in expected.items():
        ours = moments[f"exp_avg.{name}"].double() / (1 - BETA1)
        assert (ours - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name


def test_loss_and_gradients_are_those_of_transformers(model, transformers_step, tmp_path):
    """Packing, shared prompts, shifts, temperature and the loss at once, against code that shares none of it."""
    expected, gradients = transformers_step
    trainer = Trainer(model=model, training=settings(), loss="dapo", temperature=0.7)
    assert trainer.train_step(*make_batch(groups(), ranks=1, pad_id=0)) == pytest.approx(expected, rel=1e-4)
    assert_gradients(trainer, gradients, tmp_path)


def test_gradients_are_clipped_to_max_norm_as_torch_does_it(model, transformers_step, tmp_path):
    parameters = {name: nn.Parameter(torch.zeros_like(g)) for name, g in transformers_step[1].items()}
    for name, parameter in parameters.items():
        parameter.grad = transformers_step[1][name].clone()
    norm = nn.utils.clip_grad_norm_(parameters.values(), MAX_NORM)
    assert norm > 3 * MAX_NORM
    trainer = Trainer(model=model, training=settings(max_norm=MAX_NORM), loss="dapo", temperature=0.7)
    trainer.train_step(*make_batch(groups(), ranks=1, pad_id=0))
    assert trainer.metrics()["grad_norm"] == pytest.approx(float(norm), rel=1e-4)  # the norm before clipping
    assert_gradients(trainer, {name: p.grad for name, p in parameters.items()}, tmp_path)


def test_four_keys_suffice_for_a_step(model, tmp_path):
    """The contract's call by hand: no attention mask, no generator's log-probabilities, rows of unlike length."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(256, (4, 3 + 6), generator=generator)
    reference_BR = -7 * torch.rand(4, 6, generator=generator)
    advantages_BR = torch.randn(4, 6, generator=generator)
    lengths = (6, 4, 1, 3)
    mask = torch.tensor([[1.0] * n + [0.0] * (6 - n) for n in lengths])
    targets = {"response": tokens[:, 3:], "ref_logprobs": reference_BR, "advantages": advantages_BR}
    trainer = Trainer(model=model, training=settings(), loss={"name": "simple_grpo", "args": {"beta": 0.1}})
    loss = trainer.train_step([{"tokens": tokens}], [{**targets, "padding_mask": mask}])

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    logp = theirs(tokens).logits[:, 2:-1].log_softmax(-1).gather(-1, tokens[:, 3:, None])[..., 0]
    expected = torch.zeros((), dtype=torch.float64)
    for i, length in enumerate(lengths):
        for t in range(length):
            lp, delta = logp[i, t], logp[i, t] - reference_BR[i, t].double()
            policy = -(lp - lp.detach()).exp() * advantages_BR[i, t]
            expected = expected + (policy + 0.1 * ((-delta).exp() - 1 + delta)) / length / 4
    assert isinstance(loss, float)
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    expected.backward()
    assert_gradients(trainer, {name: p.grad for name, p in theirs.named_parameters()}, tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_take_the_same_step_as_one(model, alone, layout, tmp_path):
    """FSDP and pipeline parallelism: same loss, gradients and weights; the checkpoint loads on one process."""
    expected, folder = alone
    parallelism = LAYOUTS[layout]
    ranks = 2 if layout == "fsdp2" else 1

    async def step() -> float:
        trainer = await Trainer.options(procs=2).as_actor(
            model=model, training=settings(max_norm=MAX_NORM), parallelism=parallelism, loss="dapo"
        )
        async with trainer:
            assert await trainer.data_parallel_ranks.call_all() == [ranks, ranks]
            losses = await trainer.train_step.call_all(*make_batch(groups(), ranks=ranks, pad_id=0))
            assert losses[0] == losses[1]
            await trainer.save.call(str(tmp_path))
            await trainer.save_finished.call()
        return losses[0]

    assert asyncio.run(step()) == pytest.approx(expected, rel=1e-4)
    single = Trainer(model=model, training=settings(max_norm=MAX_NORM), loss="dapo")
    assert single.load(str(tmp_path)) == 1  # shards of two ranks, read by one
    save(single, tmp_path / "one")
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
            trainer.save(str(tmp_path))  # written while the next step changes the weights
        losses.append(trainer.train_step(*batch))
    asyncio.run(trainer.save_finished())
    resumed = Trainer(model=model, training=settings(warmup_steps=3, lr_schedule="cosine"), loss="grpo")
    assert resumed.load(str(tmp_path)) == 2
    assert [resumed.train_step(*b) for b in batches[2:]] == losses[2:]
    assert resumed.metrics()["lr"] == trainer.metrics()["lr"]


def test_a_checkpoint_is_of_the_moment_it_was_asked_for(tmp_path):
    """What changes while it is written does not reach it: 64 MB take longer to write than to overwrite."""
    writer = BackgroundWriter()
    tensors = {"a": torch.ones(2**23), "b": torch.full((2**23,), 2.0)}
    writer.start(tensors, tmp_path)
    for tensor in tensors.values():
        tensor.zero_()
    with pytest.raises(RuntimeError, match="still being written"):
        writer.start(tensors, tmp_path)
    asyncio.run(writer.finished())
    read = {k: v for file in tmp_path.glob("*.safetensors") for k, v in load_file(file).items()}
    assert {k: (v.min().item(), v.max().item()) for k, v in read.items()} == {"a": (1, 1), "b": (2, 2)}


def test_what_fails_while_writing_is_raised_to_whoever_waits(tmp_path):
    writer = BackgroundWriter()
    (tmp_path / "file").touch()

    def fail() -> None:
        (tmp_path / "file" / "below").touch()

    writer.start({"a": torch.ones(1)}, tmp_path / "ok", also=fail)
    with pytest.raises(NotADirectoryError):
        asyncio.run(writer.finished())


def test_random_numbers_go_on_where_they_were(model, tmp_path):
    trainer = Trainer(model=model, training=settings())
    save(trainer, tmp_path)
    expected = torch.rand(3).tolist(), random.random()
    torch.manual_seed(0)
    random.seed(0)
    assert Trainer(model=model, training=settings()).load(str(tmp_path)) == 0
    assert (torch.rand(3).tolist(), random.random()) == expected


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


class Published:
    """A weight store that keeps everything, and notes what was not sent again."""

    def __init__(self) -> None:
        self.versions: dict[int, dict[str, torch.Tensor]] = {}
        self.unchanged: dict[int, set[str]] = {}

    async def publish(self, version: int, named, *, unchanged) -> None:
        self.versions[version] = {name: tensor.clone() for name, tensor in named}
        self.unchanged[version] = set(unchanged)


def test_weights_go_out_under_hugging_face_names_in_the_generators_dtype(model, tmp_path):
    store = Published()
    trainer = Trainer(model=model, training=settings(), weights=store, weights_dtype="bfloat16")
    trainer.train_step(*make_batch(groups(), ranks=1, pad_id=0))
    save(trainer, tmp_path)
    trainer.collect_weights()
    trainer.train_step(*make_batch(groups(seed=1), ranks=1, pad_id=0))  # must not change what was collected
    asyncio.run(trainer.push_weights(1))
    trainer.collect_weights()
    asyncio.run(trainer.push_weights(2))
    of_step_1 = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16).state_dict()
    sent = store.versions[1]
    assert sent.keys() == of_step_1.keys()
    assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}
    assert all(torch.equal(sent[name], tensor) for name, tensor in of_step_1.items())
    assert not all(torch.equal(store.versions[2][name], tensor) for name, tensor in sent.items())


def test_what_did_not_change_since_the_last_push_is_named(model):
    store = Published()
    trainer = Trainer(model=model, training=settings(), weights=store)
    frozen = trainer._model.module.tok_embeddings.weight.requires_grad_(False)
    trainer._optimizer.param_groups[0]["params"] = [p for p in trainer._parameters if p is not frozen]

    def train_and_push(version: int, *, steps: int) -> set[str]:
        for _ in range(steps):
            trainer.train_step(*make_batch(groups(), ranks=1, pad_id=0))
            trainer.collect_weights()
        trainer.collect_weights()
        asyncio.run(trainer.push_weights(version))
        return store.unchanged[version]

    assert train_and_push(1, steps=0) == set()  # nothing was sent before
    assert train_and_push(2, steps=2) == {"model.embed_tokens.weight"}
    assert train_and_push(3, steps=0) == store.versions[3].keys()
    for name in store.unchanged[2]:
        assert torch.equal(store.versions[2][name], store.versions[1][name])


def test_what_is_saved_loads_in_transformers_with_the_trainers_logits(model, tmp_path):
    trainer = Trainer(model=model, training=settings(), loss="dapo")
    trainer.train_step(*make_batch(groups(), ranks=1, pad_id=0))
    save(trainer, tmp_path)
    tokens = torch.tensor([[(7 * i) % 256 for i in range(40)]])
    with torch.no_grad():
        hidden = trainer._model.hidden_states(tokens, torch.arange(40)[None], TreeLayout.from_lengths([40]))
        ours = trainer._model.logits(hidden)
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
        theirs = saved(tokens).logits[0]
        before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(tokens).logits[0]
    assert (ours - theirs).abs().max() < 1e-5
    assert (before - theirs).abs().max() > 1e-3  # the step's weights, not those that the trainer began with
    for name, parameter in trainer._model.named_parameters():
        assert torch.equal(saved.state_dict()[name], parameter), name
