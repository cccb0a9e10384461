"""The two loops of GRPO with stand-ins for the actors: what is trained, replaced, counted, and when it all ends."""

import asyncio
import types
from dataclasses import dataclass

import pytest

from apps.grpo.flat import NothingToLearn
from apps.grpo.main import Grpo
from apps.grpo.parts import Parts
from apps.grpo.state import read_moment
from forge.actors.trainer import NonFiniteStep
from forge.checkpoint import Checkpoints, load_state
from forge.config import GRPOConfig, load_config
from forge.data.datasets import Sample
from forge.observability.metrics import Metrics
from forge.rollout import Score
from forge.types import Completion, Group


class Endpoint:
    """What a handle's method is: reachable by call, route or fanout."""

    def __init__(self, function, *, seconds=0.0):
        async def once(*args, **kwargs):
            return function(*args, **kwargs)

        async def all_of_them(*args, **kwargs):
            await asyncio.sleep(seconds)
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
        return {"given": self.given, "epoch": 0}


@dataclass
class World:
    """Everything that the loops touch, and what they did to it."""

    rewards_of: object
    version: int = 0
    asleep: bool = False
    forgets: bool = False
    """Whether sleep costs the generator its weights, as on a GPU; then only a published version wakes it."""

    def __post_init__(self):
        self.asleep_while_training = []
        self.trained, self.logged, self.notes, self.saved, self.versions, self.holds = [], [], [], [], [], []
        self.written, self.committed = [], []
        self.attempts, self.nan_at = 0, set()
        self.published = set()
        self.asked_while_asleep = 0
        self.samples = Samples()

    def generate(self, prompt_ids, *, n, **_):
        assert not self.asleep
        meta = {"policy_version": self.version, "finish_reason": "stop"}
        return [Completion(text=str(i), token_ids=[i], logprobs=[-0.5], metadata=meta) for i in range(n)]

    def score(self, responses):
        number = int(responses[0][0][1:])
        values = self.rewards_of(number, len(responses))
        if values is None:
            return [Score(rewards={}, error="no reward")] * len(responses)
        return [Score(reward=v, rewards={"R": v}) for v in values]

    def sleep(self):
        self.asleep = True

    def hold(self, key):
        self.asked_while_asleep += self.asleep
        self.holds.append(key)

    def update_weights(self, version, rollback):
        assert version in self.published or not (self.asleep and self.forgets), f"no version {version} to wake with"
        self.asleep = False
        self.version = version
        self.versions.append(version)

    def write(self, step, groups, outcome=None):
        self.written += [(step, g.id, outcome or ("trained" if g.has_signal else "zero_variance")) for g in groups]

    def train_step(self, inputs, targets):
        self.attempts += 1
        if self.attempts - 1 in self.nan_at:
            raise NonFiniteStep("step: loss nan.")
        self.trained.append(len(inputs[0]["tokens"]))
        self.asleep_while_training.append(self.asleep)
        return 0.0

    def parts(self, config):
        def actor(**methods):
            seconds = {"update_weights": 0.002}  # waking takes a while, and others go on meanwhile
            endpoints = {name: Endpoint(f, seconds=seconds.get(name, 0.0)) for name, f in methods.items()}
            return types.SimpleNamespace(health=lambda: {"healthy": 1}, **endpoints)

        stats = {"generated_tokens": 0, "busy_s": 0.0, "idle_s": 0.0}
        return Parts(
            samples=self.samples,
            heldout=[],
            trainer=actor(
                train_step=self.train_step,
                metrics=lambda: {"loss": 0.0},
                collect_weights=lambda: 0.0,
                push_weights=self.published.add,
                checkpoint_bytes=lambda: 0,
                save=self.saved.append,
                save_finished=lambda: None,
            ),
            generator=actor(
                generate=self.generate,
                update_weights=self.update_weights,
                stats=lambda: stats,
                sleep=self.sleep,
                hold=self.hold,
                release=lambda: None,
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
            finish_or_drop=unless_stopped,
            resume_from=None,
            flush_to_disk=lambda: None,
            health=types.SimpleNamespace(state_dict=dict),
            raise_if_stopped=lambda: None,
            log_step=log_step,
            console=types.SimpleNamespace(note=self.notes.append, warn=self.notes.append),
            rollouts=types.SimpleNamespace(write=self.write),
            checkpoints=types.SimpleNamespace(
                check_room=lambda needed: None,
                begin=lambda step, needed: tmp_path,
                commit=lambda step, state, best: self.committed.append(state),
            ),
        )


def train(world: World, tmp_path, *overrides: str) -> Grpo:
    config: GRPOConfig = load_config(
        GRPOConfig,
        "apps/grpo/toy.yaml",
        ["training.steps=4", "training.batch_size=2", "grpo.n_samples=2", "checkpoint.interval=null", *overrides],
    )

    async def go():
        grpo = Grpo(world.run(config, tmp_path), world.parts(config))
        await grpo.resume()
        world.versions.clear(), world.holds.clear()  # those of the start
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


def test_every_group_is_in_the_ledger_once_with_what_became_of_it(tmp_path):
    """Of every five problems one is flat and is replaced, and one has no reward at all."""

    def rewards(number, n):
        return {3: [0.5, 0.5], 4: None}.get(number % 5, [0.0, 1.0])

    world = World(rewards)
    train(world, tmp_path, "grpo.dynamic_sampling=true", "grpo.max_error_fraction=1")
    outcomes = {group: outcome for _, group, outcome in world.written}
    assert len(outcomes) == len(world.written)  # each under one step
    assert [outcomes[i] for i in range(10)] == ["trained", "trained", "trained", "zero_variance", "failed"] * 2
    assert sum(outcome == "trained" for outcome in outcomes.values()) == 8


def test_strictly_on_policy_groups_start_in_waves_that_are_numbered(tmp_path):
    """The generators are held once a step, under the id of its first group; a replaced batch is one more wave."""
    world = World(lambda number, n: [0.0, 0.0] if number < 2 else [0.0, 1.0])
    train(world, tmp_path, "training.max_staleness=0")
    assert world.holds == [0, 2, 4, 6, 8]
    assert world.trained == [4, 4, 4, 4]


def test_a_batch_that_makes_nan_is_replaced_where_the_guard_says_skip(tmp_path):
    world = World(lambda number, n: [0.0, 1.0])
    world.nan_at = {1}
    train(world, tmp_path, "guards.nonfinite=skip")
    assert len(world.trained) == 4
    assert [group for _, group, outcome in world.written if outcome == "nonfinite"] == [2, 3]
    assert [m.get("groups/nonfinite", 0) for m in world.logged] == [0, 2, 0, 0]


@pytest.mark.parametrize("bad", [{0}, {0, 1}, {2}])
def test_a_generator_that_lost_its_weights_in_its_sleep_gets_them_back_when_the_batch_made_nan(tmp_path, bad):
    """In the very first step too, when no step has made a version yet; and before the next groups are begun."""
    world = World(lambda number, n: [0.0, 1.0], forgets=True)
    world.nan_at = bad
    train(world, tmp_path, "guards.nonfinite=skip", "training.max_staleness=0", "generator.colocate=true")
    assert len(world.trained) == 4
    assert world.asked_while_asleep == 0


@pytest.mark.parametrize(("action", "attempts"), [("stop", 1), ("skip", 2)])
def test_nan_in_batch_after_batch_ends_the_run(tmp_path, action, attempts):
    world = World(lambda number, n: [0.0, 1.0])
    world.nan_at = set(range(100))
    with pytest.raises(NonFiniteStep):
        train(world, tmp_path, f"guards.nonfinite={action}", "guards.patience=2")
    assert world.attempts == attempts
    assert world.written  # to be looked at


def test_a_checkpoint_holds_the_moment_between_two_steps(tmp_path):
    """Nothing of the step that follows is in it, although groups of that step are under way while it is written."""
    world = World(lambda number, n: [0.0, 1.0])
    train(world, tmp_path, "training.max_staleness=0", "checkpoint.interval=2")
    first, last = world.committed
    assert (first.step, first.next_group, first.samples["given"]) == (2, 4, 4)
    assert (first.finished, first.in_flight, first.set_aside) == ([], [], [])
    assert last.step == 4


def test_a_moment_survives_the_checkpoint(tmp_path):
    world = World(lambda number, n: [0.0, 1.0])
    train(world, tmp_path, "training.max_staleness=1", "checkpoint.interval=2", "training.sync_interval=2")
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_latest_k=1)
    for moment in world.committed:
        moment.set_aside = [("failed", Group(id=99, sample_id="p", episodes=[]))]
        moment.in_flight = [(98, Sample(id="q", prompt="q", prompt_ids=[1], target="t", question="q", epoch=3))]
        checkpoints.begin(moment.step)
        assert read_moment(load_state(checkpoints.commit(moment.step, state=moment))) == moment
