"""LoRA on real TorchTitan models: against peft, over several processes, and through a checkpoint."""

import asyncio
import random
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forge.actors.trainer import Trainer
from forge.config import LoRAConfig, ParallelismConfig, TrainingConfig
from forge.losses import SFTLoss
from forge.testing.tiny_model import make_tiny_model

BETA1 = 0.9  # AdamW's first moment after one step is (1 - BETA1) times the gradient
LORA = LoRAConfig(rank=4, alpha=12.0)
KINDS = {  # qwen2 has biases, qwen3 norms of queries and keys, llama tied embeddings here
    "qwen2": LoRAConfig(rank=4, alpha=12.0, target_modules=["q_proj", "v_proj", "down_proj"]),
    "qwen3": LORA,
    "llama": LoRAConfig(rank=2, alpha=8.0, target_modules=["k_proj", "o_proj"]),
}
LAYOUTS = {
    "fsdp2": ParallelismConfig(data_parallel_shard_degree=2),
    "tp2": ParallelismConfig(tensor_parallel_degree=2, data_parallel_shard_degree=1),
}


def settings(**changes) -> TrainingConfig:
    return TrainingConfig(**{"steps": 10, "learning_rate": 1e-2, "seq_len": 64, "dtype": "float32", **changes})


def documents(count: int = 6, *, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randrange(8, 40))] for _ in range(count)]


def batch(docs: list[list[int]], *, ranks: int = 1) -> tuple[list[dict], list[dict]]:
    """Every token but a document's first is trained; documents are dealt out in turn."""
    inputs, targets = [], []
    for mine in (docs[rank::ranks] for rank in range(ranks)):
        width = max(map(len, mine))
        tokens = torch.tensor([d + [0] * (width - len(d)) for d in mine])
        real = torch.tensor([[True] * len(d) + [False] * (width - len(d)) for d in mine])
        inputs.append({"tokens": tokens, "attention_mask": real})
        targets.append({"response": tokens[:, 1:], "padding_mask": real[:, 1:], "advantages": torch.ones(len(mine), 1)})
    return inputs, targets


def trainer(model: Path | str, lora: LoRAConfig | None = LORA, **changes) -> Trainer:
    return Trainer(model=str(model), training=settings(**changes), lora=lora, loss=SFTLoss())


def save(one: Trainer, folder: Path) -> None:
    one.save(str(folder))
    asyncio.run(one.save_finished())


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory) -> tuple[LoRAConfig, Path, Path, Trainer]:
    """Settings, model folder, and the checkpoint of a trainer after three steps."""
    family, tied = request.param, {"tie_word_embeddings": True} if request.param == "llama" else {}
    model = make_tiny_model(tmp_path_factory.mktemp("tiny") / family, family=family, **tied)
    trained = trainer(model, KINDS[family])
    for seed in range(3):
        trained.train_step(*batch(documents(seed=seed)))
    folder = tmp_path_factory.mktemp("checkpoint")
    save(trained, folder)
    return KINDS[family], model, folder, trained


def test_the_adapter_folder_loads_with_peft_and_the_merged_model_is_base_and_adapter(kind):
    _, model, folder, _ = kind
    base = AutoModelForCausalLM.from_pretrained(model)
    tokens = torch.tensor([documents(1, seed=9)[0]])
    before = base(tokens).logits
    adapted = PeftModel.from_pretrained(base, folder / "adapter").eval()(tokens).logits
    merged = AutoModelForCausalLM.from_pretrained(folder / "hf")(tokens).logits
    assert (merged - adapted).abs().max() < 1e-4
    assert (merged - before).abs().max() > 0.02


def test_transformers_loads_the_adapter_folder_by_itself(kind):
    _, _, folder, _ = kind
    tokens = torch.tensor([documents(1, seed=9)[0]])
    loaded = AutoModelForCausalLM.from_pretrained(folder / "adapter").eval()(tokens).logits
    merged = AutoModelForCausalLM.from_pretrained(folder / "hf")(tokens).logits
    assert (merged - loaded).abs().max() < 1e-4


def test_only_adapters_have_gradients_and_optimizer_state_and_the_rest_is_as_it_was(kind):
    lora, model, folder, trained = kind
    targets = lora.target_modules or ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    original = tensors(model)
    with_gradient = {n for n, p in trained._model.module.named_parameters() if p.grad is not None}
    assert with_gradient
    assert all(".lora_" in name for name in with_gradient)
    assert len(with_gradient) == 2 * 2 * len(targets)  # A and B in each of two layers
    state = tensors(folder / "trainer")
    assert {name.partition(".")[0] for name in state} == {"model", "exp_avg", "exp_avg_sq"}
    assert all(".lora_" in name for name in state)
    for name, parameter in trained._model.named_parameters():
        assert torch.equal(parameter, original[name]), name
    changed = {name for name, value in tensors(folder / "hf").items() if not torch.equal(value, original[name])}
    assert changed == {n for n in original if n.endswith(".weight") and n.split(".")[-2] in targets}


def test_gradients_of_the_adapters_are_those_of_peft(kind, tmp_path):
    """From adapters that are past their zero start, so that A has a gradient too."""
    lora, model, folder, _ = kind
    reference = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64), folder / "adapter", is_trainable=True
    )
    docs = documents(seed=5)
    tokens = sum(len(d) - 1 for d in docs)
    loss = 0.0
    for d in docs:
        logprobs = reference(torch.tensor([d])).logits[0, :-1].log_softmax(-1)[range(len(d) - 1), d[1:]]
        part = -logprobs.sum() / tokens
        part.backward()
        loss += part.item()
    ours = trainer(model, lora, max_norm=None)
    ours.load(str(folder))
    for parameter in ours._parameters:  # so that the first moment is this step's gradient alone
        ours._optimizer.state[parameter]["exp_avg"].zero_()
    assert ours.train_step(*batch(docs)) == pytest.approx(loss, rel=1e-4)
    save(ours, tmp_path)
    moments = tensors(tmp_path / "trainer")
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            key = name.removeprefix("base_model.model.").replace(".default", "")
            gradient = moments[f"exp_avg.{key}"].double() / (1 - BETA1)
            assert (gradient - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), name


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", family="qwen3")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_take_the_same_steps_as_one(model, layout, tmp_path):
    alone = trainer(model)
    expected = [alone.train_step(*batch(documents(seed=s))) for s in range(2)]
    save(alone, tmp_path / "one")
    ranks = 2 if layout == "fsdp2" else 1

    async def steps() -> list[float]:
        actor = await Trainer.options(procs=2).as_actor(
            model=str(model), training=settings(), parallelism=LAYOUTS[layout], lora=LORA, loss=SFTLoss()
        )
        async with actor:
            losses = [await actor.train_step.call(*batch(documents(seed=s), ranks=ranks)) for s in range(2)]
            await actor.save.call(str(tmp_path / "two"))
            await actor.save_finished.call()
        return losses

    assert asyncio.run(steps()) == pytest.approx(expected, rel=1e-4)
    resumed = trainer(model)
    assert resumed.load(str(tmp_path / "two")) == 2  # shards of two ranks, read by one
    save(resumed, tmp_path / "resumed")
    one, two = tensors(tmp_path / "one" / "trainer"), tensors(tmp_path / "resumed" / "trainer")
    assert one.keys() == two.keys()
    for name in one:
        if name.startswith("exp_avg."):
            assert (one[name] - two[name]).norm() <= 1e-3 * one[name].norm(), name


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_resumed_trainer_goes_on_bit_for_bit(model, dropout, tmp_path):
    lora = LoRAConfig(rank=4, alpha=12.0, dropout=dropout, merge=False)
    first = trainer(model, lora)
    losses = []
    for seed in range(4):
        if seed == 2:
            save(first, tmp_path)
            torch.manual_seed(0)  # whatever the process drew before must not matter
        losses.append(first.train_step(*batch(documents(seed=seed))))
    assert not (tmp_path / "hf").exists()
    resumed = trainer(model, lora)
    assert resumed.load(str(tmp_path)) == 2
    assert [resumed.train_step(*batch(documents(seed=s))) for s in (2, 3)] == losses[2:]


def test_dropout_changes_the_training_loss_and_not_the_validation(model):
    losses = {}
    for dropout in (0.0, 0.5):
        one = trainer(model, LoRAConfig(rank=4, alpha=12.0, dropout=dropout))
        for _ in range(2):
            one.train_step(*batch(documents()))
        judged = [one.evaluate(*batch(documents(seed=3))) for _ in range(2)]
        assert judged[0] == judged[1]
        losses[dropout] = one.train_step(*batch(documents()))
    assert abs(losses[0.0] - losses[0.5]) > 1e-4


def test_adapters_begin_as_those_of_peft(model):
    """B is zero; A is as widely spread as peft draws it."""
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(r=4, target_modules="all-linear"))
    theirs = {n.replace(".default", ""): p for n, p in peft.named_parameters() if "lora_" in n}
    ours = {f"base_model.model.{n}": p for n, p in trainer(model)._model.trained_parameters()}
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert parameter.shape == theirs[name].shape
        if ".lora_B." in name:
            assert not parameter.any()
        else:
            assert parameter.std().item() == pytest.approx(theirs[name].std().item(), rel=0.15), name
