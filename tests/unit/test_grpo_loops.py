"""The two loops of GRPO with stand-ins for the actors: what is trained, replaced, counted, and when it all ends."""

import asyncio
import types
from dataclasses import dataclass

import pytest

from apps.grpo.main import Grpo, NothingToLearn
from apps.grpo.parts import Parts
from forge.config import GRPOConfig, load_config
from forge.data.datasets import Sample
from forge.observability.metrics import Metrics
from forge.rollout import Score
from forge.types import Completion


class Endpoint:
    """What a handle's method is: reachable by call, route or fanout."""

    def __init__(self, function, *, several=False):
        async def once(*args, **kwargs):
            return function(*args, **kwargs)

        async def all_of_them(*args, **kwargs):
            return [function(*args, **kwargs)]

        self.call = self.route = once
        self.fanout = all_of_them


class Samples:
    def __init__(self):
        self.given = 0
        self.dropped = {}

    def __next__(self):
        self.given += 1
        name = f"p{self.given - 1}"
        return Sample(id=name, prompt=name, prompt_ids=[1, self.given], target="x", question=name)

    def state_dict(self):
        return {"given": self.given}


@dataclass
class World:
    """Everything that the loops touch, and what they did to it."""

    rewards_of: object
    version: int = 0
    asleep: bool = False

    def __post_init__(self):
        self.asleep_while_training = []
        self.trained, self.logged, self.notes, self.saved, self.versions = [], [], [], [], []
        self.samples = Samples()

    def generate(self, prompt_ids, *, n, **_):
        assert not self.asleep
        meta = {"policy_version": self.version, "finish_reason": "stop"}
        return [Completion(text=str(i), token_ids=[i], logprobs=[-0.5], metadata=meta) for i in range(n)]

    def score(self, responses):
        number = int(responses[0][0][1:])
        values = self.rewards_of(number, len(responses))
        return [Score(reward=v, rewards={"R": v}) for v in values]

    def sleep(self):
        self.asleep = True

    def update_weights(self, version):
        self.asleep = False
        self.version = version
        self.versions.append(version)

    def train_step(self, inputs, targets):
        self.trained.append(len(inputs[0]["tokens"]))
        self.asleep_while_training.append(self.asleep)
        return 0.0

    def parts(self, config):
        def actor(**methods):
            endpoints = {name: Endpoint(f) for name, f in methods.items()}
            return types.SimpleNamespace(health=lambda: {"healthy": 1}, **endpoints)

        stats = {"generated_tokens": 0, "busy_s": 0.0, "idle_s": 0.0}
        return Parts(
            samples=self.samples,
            heldout=[],
            trainer=actor(
                train_step=self.train_step,
                metrics=lambda: {"loss": 0.0},
                collect_weights=lambda: 0.0,
                push_weights=lambda version: 0.0,
                save=self.saved.append,
            ),
            generator=actor(
                generate=self.generate, update_weights=self.update_weights, sleep=self.sleep, stats=lambda: stats
            ),
            reward=actor(score=self.score),
            reference=None,
            data_parallel_ranks=1,
            colocated=config.colocated(gpus=0),
        )

    def run(self, config, tmp_path):
        async def unless_stopped(work):
            return await work

        def log_step(step):
            self.logged.append(metrics.flush(step))

        metrics = Metrics()
        return types.SimpleNamespace(
            config=config,
            start_step=0,
            metrics=metrics,
            unless_stopped=unless_stopped,
            raise_if_stopped=lambda: None,
            log_step=log_step,
            console=types.SimpleNamespace(note=self.notes.append),
            rollouts=types.SimpleNamespace(write=lambda *a, **k: None),
            checkpoints=types.SimpleNamespace(begin=lambda step: tmp_path, commit=lambda step, state: None),
        )


def train(world: World, tmp_path, *overrides: str) -> Grpo:
    config: GRPOConfig = load_config(
        GRPOConfig,
        "apps/grpo/toy.yaml",
        ["training.steps=4", "training.batch_size=2", "grpo.n_samples=2", "checkpoint.interval=null", *overrides],
    )

    async def go():
        grpo = Grpo(world.run(config, tmp_path), world.parts(config))
        await grpo.train()
        return grpo

    async def bounded():
        return await asyncio.wait_for(go(), timeout=20)

    try:
        return asyncio.run(bounded())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


def test_groups_without_a_difference_are_counted_and_not_trained(tmp_path):
    """Every other problem is answered alike: each step takes two groups and trains the two episodes of one."""
    world = World(lambda number, n: [0.0, 1.0] if number % 2 else [0.5, 0.5])
    train(world, tmp_path)
    assert world.trained == [2, 2, 2, 2]
    assert [m["groups/zero_variance"] for m in world.logged] == [1, 1, 1, 1]
    assert [m["groups/trained"] for m in world.logged] == [1, 1, 1, 1]


def test_a_batch_with_nothing_to_learn_from_is_replaced_by_another(tmp_path):
    world = World(lambda number, n: [0.0, 0.0] if number < 2 else [0.0, 1.0])
    train(world, tmp_path)
    assert world.trained == [4, 4, 4, 4]
    assert world.samples.given == 10  # eight for four steps, two that were replaced
    assert [m.get("groups/zero_variance") for m in world.logged] == [2, 0, 0, 0]


def test_dynamic_sampling_fills_every_step_with_groups_that_differ(tmp_path):
    world = World(lambda number, n: [0.0, 1.0] if number % 2 else [0.5, 0.5])
    train(world, tmp_path, "grpo.dynamic_sampling=true")
    assert world.trained == [4, 4, 4, 4]


@pytest.mark.parametrize("dynamic", ["false", "true"])
def test_nothing_to_learn_ends_the_run_with_the_reason(tmp_path, dynamic):
    world = World(lambda number, n: [0.25] * n)
    with pytest.raises(NothingToLearn, match=r"(?s)6 groups in a row.*grpo.max_empty_batches = 3.*got 0\.25"):
        train(world, tmp_path, "grpo.max_empty_batches=3", f"grpo.dynamic_sampling={dynamic}")
    assert world.trained == []


@pytest.mark.parametrize("dynamic", ["false", "true"])
def test_a_task_that_is_solved_ends_the_run_well(tmp_path, dynamic):
    world = World(lambda number, n: [0.0, 1.0] if number < 2 else [1.0] * n)
    grpo = train(world, tmp_path, "grpo.max_empty_batches=3", f"grpo.dynamic_sampling={dynamic}")
    assert grpo.steps_done == 1 == len(world.trained)
    assert world.notes == ["ending after step 1 of 4: the last 6 groups all got the best reward of the run"]
    assert world.version == 1
    assert world.saved


def test_weights_are_synced_every_interval_and_at_the_end(tmp_path):
    world = World(lambda number, n: [0.0, 1.0])
    train(world, tmp_path, "training.steps=5", "training.sync_interval=2")
    assert world.versions == [2, 4, 5]


@pytest.mark.parametrize("colocate", ["true", "false"])
def test_taking_turns_changes_who_is_awake_and_nothing_of_what_is_trained(tmp_path, colocate):
    world = World(lambda number, n: [0.0, 1.0] if number % 3 else [0.0, 0.0])
    train(world, tmp_path, "training.max_staleness=0", f"generator.colocate={colocate}")
    assert world.trained == [2, 2, 4, 2]  # of the eight groups, 0, 3 and 6 have no difference
    assert world.versions == [1, 2, 3, 4]
    assert world.asleep_while_training == [colocate == "true"] * 4
    assert not world.asleep


def test_accumulation_multiplies_the_groups_of_a_step(tmp_path):
    world = World(lambda number, n: [0.0, 1.0])
    train(world, tmp_path, "training.gradient_accumulation_steps=3")
    assert world.trained == [12, 12, 12, 12]  # 2 × 3 groups of 2
