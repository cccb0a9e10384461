"""The loop of fine-tuning with a stand-in for the trainer: when it validates, saves, ends, and how it goes on."""

import asyncio
import itertools
import json
import types
from pathlib import Path

import pytest

from apps.sft.main import SFT
from apps.sft.parts import Parts, Prompt
from forge.actors.trainer import NonFiniteStep
from forge.app import Run, Stopped
from forge.config import SFTConfig, load_config
from forge.data.documents import Document
from forge.saver import Saver
from forge.types import Completion


class Endpoint:
    """What a handle's method is: reachable by call, route or fanout."""

    def __init__(self, function):
        async def once(*args, **kwargs):
            return function(*args, **kwargs)

        self.call = self.route = self.fanout = once


class Stream:
    """Documents 0, 1, 2, ...; document i consists of the token i."""

    epoch, truncated, dropped = 0.0, 0, {"too_long": 2}

    def __init__(self):
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.position += 1
        return document(self.position - 1)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def document(number: int) -> Document:
    return Document(id=str(number), token_ids=[number, number], trained=[False, True])


class World:
    """The trainer and generator: what they were asked, and the held-out losses that they report in turn."""

    def __init__(self, losses=()):
        self.losses = itertools.chain(losses, itertools.count(1.0))
        self.trained, self.evaluated, self.versions, self.loaded = [], 0, [], []

    def evaluate(self, inputs, targets):
        self.evaluated += 1
        tokens = float(targets[0]["padding_mask"].sum())
        return {"tokens": tokens, "nats": tokens * next(self.losses), "right": tokens / 2}

    def update_weights(self, version, rollback):
        self.versions.append(version)

    def train_step(self, inputs, targets):
        self.trained.append(inputs[0]["tokens"][:, 0].tolist())

    def answer(self, prompt_ids, **_):
        return [Completion(text="yes", token_ids=[1], logprobs=[0.0], metadata={"finish_reason": "stop"})]

    def parts(self, *, heldout=3, prompts=()) -> Parts:
        def actor(**methods):
            endpoints = {name: Endpoint(function) for name, function in methods.items()}
            return types.SimpleNamespace(health=lambda: {"healthy": 1}, **endpoints)

        return Parts(
            documents=Stream(),
            heldout=[document(100 + i) for i in range(heldout)],
            prompts=[Prompt(text=text, rendered=f"<{text}>", ids=[7]) for text in prompts],
            trainer=actor(
                train_step=self.train_step,
                metrics=lambda: {"loss": 1.0, "ratio/mean": 1.0},
                evaluate=self.evaluate,
                collect_weights=lambda: 0.0,
                push_weights=lambda version: 0.0,
                save=lambda folder: (Path(folder) / "weights").write_text("w") and None,
                save_finished=lambda: None,
                checkpoint_bytes=lambda: 1,
                load=self.loaded.append,
            ),
            generator=actor(generate=self.answer, update_weights=self.update_weights) if prompts else None,
            data_parallel_ranks=1,
        )


@pytest.fixture(autouse=True)
def saved_at_once(monkeypatch):
    """A checkpoint is there before the next step, so that a test can end the run at a known moment."""
    begin = Saver.save

    async def save(self, *args, **kwargs):
        await begin(self, *args, **kwargs)
        await self.finished()

    monkeypatch.setattr(Saver, "save", save)


@pytest.fixture
def start(tmp_path):
    """(overrides) → a run in the same folder each time."""
    (tmp_path / "c.yaml").write_text(
        "model: toy\ndataset: {path: toy}\nmetrics: {tensorboard: false, console: false}\n"
    )

    def begin(*overrides) -> Run:
        overrides = [f"output_dir={tmp_path / 'run'}", "training.batch_size=2", *overrides]
        return Run(load_config(SFTConfig, tmp_path / "c.yaml", overrides), app="sft", warnings=[])

    return begin


def go(run: Run, world: World, **parts) -> SFT:
    async def whole():
        sft = SFT(run, world.parts(**parts))
        await sft.resume()
        await sft.train()
        return sft

    try:
        return asyncio.run(whole())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        run.close()


def lines(run: Run, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run.folder / name).read_text().splitlines()]


def checkpoints(run: Run) -> list[str]:
    return sorted(path.name for path in (run.folder / "checkpoints").iterdir())


def test_each_step_takes_the_next_documents_and_tells_what_the_data_set_went_through(start):
    world, run = World(), start("training.steps=3", "training.gradient_accumulation_steps=2")
    go(run, world, heldout=0)
    assert world.trained == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    steps = [m for m in lines(run) if "loss" in m]
    assert [m["step"] for m in steps] == [1, 2, 3]
    assert all(m["documents/too_long"] == 2 for m in steps)
    assert not any("ratio/mean" in m for m in steps)
    assert world.evaluated == 0


def test_it_validates_before_training_at_each_interval_and_at_the_end(start):
    world, run = World([2.0, 1.5, 1.2, 1.1]), start("training.steps=5", "eval.interval=2")
    sft = go(run, world)
    evaluations = [m for m in lines(run) if "eval/loss" in m]
    assert [(m["step"], m["eval/loss"]) for m in evaluations] == [(0, 2.0), (2, 1.5), (4, 1.2), (5, 1.1)]
    assert evaluations[0]["eval/perplexity"] == pytest.approx(7.389, abs=1e-3)
    assert evaluations[0]["eval/token_accuracy"] == 0.5
    assert sft.moment.baseline["eval/loss"] == 2.0
    assert sft.moment.latest["eval/loss"] == 1.1


def test_the_best_checkpoint_stays_beside_the_latest(start):
    losses = [2.0, 1.5, 1.1, 1.3, 1.4, 1.2]
    run = start("training.steps=10", "eval.interval=2", "checkpoint.interval=3", "checkpoint.keep_latest_k=1")
    go(run, World(losses))
    assert checkpoints(run) == ["best", "step-10", "step-4"]
    assert (run.folder / "checkpoints" / "best" / "weights").read_text() == "w"
    assert (run.folder / "checkpoints" / "best").resolve().name == "step-4"


def test_without_keep_best_the_latest_alone_stay(start):
    run = start("training.steps=6", "eval.interval=2", "checkpoint.keep_best=false", "checkpoint.keep_latest_k=1")
    go(run, World([2.0, 1.0, 3.0, 4.0]))
    assert checkpoints(run) == ["step-6"]


def test_it_ends_when_the_held_out_loss_has_not_fallen_for_so_many_evaluations(start):
    world = World([2.0, 1.5, 1.6, 1.5, 1.0])
    run = start("training.steps=100", "eval.interval=1", "eval.patience=2")
    sft = go(run, world)
    assert sft.moment.step == 3  # 1.5 after step 1, nothing lower after 2 and 3
    assert "step-3" in checkpoints(run)
    assert "step-1" in checkpoints(run)


def test_a_continued_run_takes_the_documents_that_follow_and_knows_its_best(start):
    settings = ("training.steps=6", "eval.interval=2", "checkpoint.interval=3", "checkpoint.keep_latest_k=1")
    whole = World([2.0, 1.5, 1.1, 1.3])

    class Killed(BaseException):
        pass

    run = start(*settings)
    kept = run.log_step

    def killed_after_step_5(step: int) -> None:
        if step == 5:
            raise Killed
        kept(step)

    run.log_step = killed_after_step_5
    with pytest.raises(Killed):
        go(run, whole)
    assert checkpoints(run) == ["best", "step-4"]
    again = World([1.3])
    resumed = start(*settings)
    assert resumed.start_step == 4
    sft = go(resumed, again)
    assert again.loaded == [str(resumed.folder / "checkpoints" / "step-4")]
    assert again.trained == [[8, 9], [10, 11]]
    assert sft.moment.baseline["eval/loss"] == 2.0
    assert (sft.moment.best_step, sft.moment.best_loss) == (4, 1.1)
    assert [m["step"] for m in lines(resumed) if "loss" in m] == [1, 2, 3, 4, 5, 6]
    assert [m["step"] for m in lines(resumed) if "eval/loss" in m] == [0, 2, 4, 6]
    assert checkpoints(resumed) == ["best", "step-4", "step-6"]


def test_a_run_stopped_while_it_validates_saves_and_validates_after_it_goes_on(start):
    world, run = World([2.0]), start("training.steps=4", "eval.interval=2")
    kept = run.unless_stopped

    async def stopped_in_the_second_evaluation(work):
        if world.evaluated == 1 and len(world.trained) == 2 and work.__name__ == "validate":
            work.close()
            raise Stopped(2)
        return await kept(work)

    run.unless_stopped = stopped_in_the_second_evaluation
    with pytest.raises(Stopped):
        go(run, world)
    assert checkpoints(run) == ["step-2"]
    again = World([1.5, 1.2])
    resumed = start("training.steps=4", "eval.interval=2")
    go(resumed, again)
    assert [(m["step"], m["eval/loss"]) for m in lines(resumed) if "eval/loss" in m] == [(0, 2.0), (2, 1.5), (4, 1.2)]


def test_prompts_are_answered_with_the_weights_of_the_step_and_written_down(start):
    world = World()
    run = start("training.steps=4", "eval.interval=2", "eval.prompts=[a, b]", "generator.procs=1", "eval.samples=0")
    go(run, world, heldout=0, prompts=("a", "b"))
    assert world.versions == [2, 4]  # before the first step the generator has the model's own
    rollouts = lines(run, "rollouts.jsonl")
    assert [(r["step"], r["kind"], r["sample"]) for r in rollouts[:2]] == [
        (0, "eval", "eval.prompts.0"),
        (0, "eval", "eval.prompts.1"),
    ]
    assert len(rollouts) == 6
    assert rollouts[1]["prompt"] == "<b>"
    assert rollouts[1]["response"] == "yes"


def test_a_batch_that_makes_the_loss_nan_is_left_out_if_the_guard_says_so(start):
    class Nan(World):
        def train_step(self, inputs, targets):
            super().train_step(inputs, targets)
            if len(self.trained) == 2:
                raise NonFiniteStep("step 2: loss nan.")

    world = Nan()
    go(start("training.steps=3", "guards.nonfinite=skip", "eval.samples=0"), world, heldout=0)
    assert world.trained == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_batch_that_makes_the_loss_nan_ends_the_run_by_default(start):
    class Nan(World):
        def train_step(self, inputs, targets):
            raise NonFiniteStep("step 1: loss nan.")

    with pytest.raises(NonFiniteStep):
        go(start("training.steps=3", "eval.samples=0"), Nan(), heldout=0)
