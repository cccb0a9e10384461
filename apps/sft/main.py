"""Supervised fine-tuning: documents in, weights out, validated on the way.

    python -m apps.sft.main --config apps/sft/toy.yaml [--key.path value ...]

The map of the program. `train` starts the parts; `SFT` is the loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.app import Dropped, Run, Stopped, launch
from forge.config import SFTConfig

if TYPE_CHECKING:  # --help and --print_config answer without torch
    from apps.sft.parts import Delivery, Parts


async def train(run: Run[SFTConfig]) -> None:
    """One run: start or resume, validate, train, validate again; if the trainer dies, back to the last checkpoint."""
    from apps.sft.parts import start_parts
    from forge.saver import with_trainer_restarts

    async with start_parts(run) as parts:
        untouched = parts.documents.state_dict()

        async def attempt() -> None:
            parts.documents.load_state_dict(untouched)
            sft = SFT(run, parts)
            await run.unless_stopped(sft.resume())
            await sft.train()
            if sft.moment.baseline:
                run.console.summary(sft.moment.baseline, sft.moment.latest, notes=sft.notes())

        await with_trainer_restarts(run, parts.trainer, attempt)


def check(config: SFTConfig) -> list[str]:
    """Reads and checks everything that a run would read, and starts nothing."""
    from apps.sft.dry_run import describe

    with tempfile.TemporaryDirectory() as scratch:
        return describe(config, Path(scratch))


@dataclasses.dataclass(kw_only=True, slots=True)
class Moment:
    """What of the loop has to survive, between two optimizer steps."""

    step: int = 0
    """Optimizer steps done."""
    documents: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The data position."""
    baseline: dict[str, float] = dataclasses.field(default_factory=dict)
    """The held-out measures before training."""
    latest: dict[str, float] = dataclasses.field(default_factory=dict)
    """Those of the last evaluation."""
    evaluated: int = -1
    """After how many steps the last evaluation was."""
    best_step: int = -1
    best_loss: float = math.inf
    """The lowest held-out loss, and after how many steps it was reached."""
    without_progress: int = 0
    """Evaluations since then."""
    health: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the guards have seen."""


class SFT:
    """The training loop and its state."""

    def __init__(self, run: Run[SFTConfig], parts: Parts) -> None:
        from apps.sft.parts import Batches, heldout_batches
        from forge.saver import Saver

        self.run = run
        self.config = run.config
        self.parts = parts
        ranks = parts.data_parallel_ranks
        self.batches = Batches(parts.documents, documents=run.config.documents_per_step, ranks=ranks)
        self.heldout = heldout_batches(parts.heldout, ranks=ranks)
        self.moment = Moment(documents=parts.documents.state_dict())
        self.saver = Saver(run, parts.trainer)
        self.generator_version = -1 if run.went_back else 0  # 0 is the model's own
        self.step_ended = time.perf_counter()

    async def train(self) -> None:
        """Consumes batches; produces weights, metrics and checkpoints; waits for the disk when it reads slower than the
        trainer trains; ends after the last step, when the loss stops falling, or when the run is stopped."""
        async with asyncio.TaskGroup() as tasks:  # in which checkpoints are written, beside the steps
            try:
                await self.steps(tasks)
            finally:
                await self.batches.close()

    async def steps(self, tasks: asyncio.TaskGroup) -> None:
        """The steps, and a checkpoint behind the last one, whatever made it the last."""
        last = self.config.training.steps
        try:
            await self.evaluate_if_due()  # before training; or what a stopped run had no time for
            self.step_ended = time.perf_counter()
            while self.moment.step < last and not self.stalled():
                await self.one_step()
                self.run.log_step(self.moment.step)
                self.run.raise_if_stopped()
                await self.evaluate_if_due()
                if self.save_is_due():
                    await self.save(tasks)
            if self.stalled():
                self.run.console.note(
                    f"ending after step {self.moment.step} of {last}: no lower held-out loss in "
                    f"{self.moment.without_progress} evaluations"
                )
        except Dropped:
            self.run.console.warn("the step that was under way did not end in time, so there is no new checkpoint")
            raise
        except Stopped:
            if self.moment.step > self.run.start_step:
                await self.run.last_checkpoint(self.save_last(tasks))
            raise
        await self.save_last(tasks)

    async def one_step(self) -> None:
        """Takes the next batch, trains on it, and measures both."""
        metrics, trainer = self.run.metrics, self.parts.trainer
        delivery = await self.train_on_next()
        self.moment.step += 1
        self.moment.documents = delivery.position
        measured = await trainer.metrics.call()
        metrics.update({name: value for name, value in measured.items() if not name.startswith("ratio/")})
        now = time.perf_counter()
        seconds, self.step_ended = now - self.step_ended, now
        metrics.update(
            {
                "time/step": seconds,
                "throughput/documents_per_s": self.config.documents_per_step / seconds,
                **data_metrics(delivery),
                **self.parts.health(),
            }
        )

    async def train_on_next(self) -> Delivery:
        """One optimizer step; a batch that makes the loss NaN is left out where `guards.nonfinite` says so."""
        from forge.actors.trainer import NonFiniteStep

        guards = self.config.guards
        for attempt in range(guards.patience):
            with self.run.metrics.timer("time/wait_data"):
                delivery = await self.run.unless_stopped(self.batches.take())
            try:
                await self.run.finish_or_drop(self.parts.trainer.train_step.call(*delivery.batch))
                return delivery
            except NonFiniteStep as error:
                if guards.nonfinite == "stop" or attempt == guards.patience - 1:
                    raise
                self.run.console.warn(f"guards.nonfinite: {error} The next samples are taken instead.")
        raise AssertionError("the loop returns or raises")

    async def evaluate_if_due(self) -> None:
        """Held-out loss and answers to the prompts: before training, every `eval.interval` steps, at the end."""
        step, interval, last = self.moment.step, self.config.eval.interval, self.config.training.steps
        due = step in (0, last) or (interval is not None and step % interval == 0)
        if not due or self.moment.evaluated == step or not (self.heldout or self.parts.prompts):
            return
        started = time.perf_counter()
        if self.heldout:
            self.run.console.phase(f"validating on {len(self.parts.heldout)} held-out samples")
            self.judge(await self.run.unless_stopped(self.validate()))
            self.run.log_evaluation(step, {**self.moment.latest, "eval/seconds": time.perf_counter() - started})
        if self.parts.prompts:
            await self.run.unless_stopped(self.answer_prompts())
        self.moment.evaluated = step
        self.step_ended += time.perf_counter() - started  # it is no part of a step

    async def validate(self) -> dict[str, float]:
        """Loss, perplexity and accuracy of the next token, over all trained tokens of the held-out documents."""
        totals: dict[str, float] = {}
        for batch in self.heldout:
            for name, value in (await self.parts.trainer.evaluate.call(*batch)).items():
                totals[name] = totals.get(name, 0.0) + value
        loss = totals["nats"] / totals["tokens"]
        return {
            "eval/loss": loss,
            "eval/perplexity": math.exp(min(loss, 700.0)),
            "eval/token_accuracy": totals["right"] / totals["tokens"],
            "eval/tokens": totals["tokens"],
            "eval/samples": float(len(self.parts.heldout)),
        }

    def judge(self, values: dict[str, float]) -> None:
        """Remembers the lowest loss, and how long ago it was reached."""
        moment = self.moment
        moment.latest = values
        if moment.step == 0:
            moment.baseline = values
        if values["eval/loss"] < moment.best_loss:
            moment.best_step, moment.best_loss, moment.without_progress = moment.step, values["eval/loss"], 0
        else:
            moment.without_progress += 1

    def stalled(self) -> bool:
        """Whether the held-out loss has not fallen for `eval.patience` evaluations."""
        return self.config.eval.patience is not None and self.moment.without_progress >= self.config.eval.patience

    async def answer_prompts(self) -> None:
        """Puts `eval.prompts` to the model as it is now; the answers go to the console and into rollouts.jsonl."""
        from forge.types import Episode, Group

        assert self.parts.generator is not None, "rules.py asks for one where there are prompts"
        step = self.moment.step
        await self.sync_generator(step)
        self.run.console.phase(f"answering {len(self.parts.prompts)} prompts")
        generate = self.parts.generator.generate.route
        limit = self.config.eval.max_new_tokens
        answers = await asyncio.gather(
            *(generate(p.ids, temperature=0.0, max_new_tokens=limit) for p in self.parts.prompts)
        )
        groups = []
        for number, (prompt, (answer,)) in enumerate(zip(self.parts.prompts, answers, strict=True)):
            self.run.console.note(f"  {prompt.text!r} -> {answer.text!r}")
            episode = Episode(
                prompt=prompt.rendered,
                response=answer.text,
                target="",
                prompt_ids=prompt.ids,
                response_ids=answer.token_ids,
                generator_logprobs=answer.logprobs,
                response_mask=[False] * len(answer.token_ids),
                policy_version=step,
                policy_version_max=step,
                finish_reason=answer.metadata["finish_reason"],
            )
            groups.append(Group(id=number, sample_id=f"eval.prompts.{number}", episodes=[episode]))
        self.run.rollouts.write(step, groups, kind="eval")

    async def sync_generator(self, step: int) -> None:
        """Gives the generators the weights after step `step`."""
        if self.parts.generator is None or self.generator_version == step:
            return
        with self.run.metrics.timer("time/push_weights"):
            await self.parts.trainer.collect_weights.call()
            await self.parts.trainer.push_weights.call(step)
        with self.run.metrics.timer("time/pull_weights"):
            await self.parts.generator.update_weights.fanout(step, rollback=True)
        self.generator_version = step

    def save_is_due(self) -> bool:
        """At every `checkpoint.interval`, and where the held-out loss is lower than ever."""
        step, checkpoint = self.moment.step, self.config.checkpoint
        best = checkpoint.keep_best and self.moment.best_step == step
        return best or (checkpoint.interval is not None and step % checkpoint.interval == 0)

    async def save(self, tasks: asyncio.TaskGroup) -> None:
        """Begins a checkpoint from which the run goes on as if nothing had happened."""
        if self.saver.saved_step == self.moment.step:
            return
        best = self.moment.best_step if self.config.checkpoint.keep_best else None
        self.moment.health = self.run.health.state_dict()
        await self.saver.save(self.moment.step, dataclasses.asdict(self.moment), tasks, best=best)

    async def save_last(self, tasks: asyncio.TaskGroup) -> None:
        """Leaves a checkpoint of the last step behind; returns when it is written."""
        await self.save(tasks)
        await self.saver.finished()

    async def resume(self) -> None:
        """Goes on from the checkpoint, if there is one."""
        from forge.checkpoint import load_state

        await self.saver.check_room()
        path = self.run.resume_from
        if path is None:
            return
        self.moment = Moment(**load_state(path))
        await self.parts.trainer.load.call(str(path))
        self.parts.documents.load_state_dict(self.moment.documents)
        self.run.health.load_state_dict(self.moment.health)

    def notes(self) -> dict[str, str]:
        """What the last lines of the run say beside the held-out measures."""
        notes = {"run folder": str(self.run.folder)}
        if self.config.checkpoint.keep_best and self.moment.best_step > 0:
            where = self.run.folder / "checkpoints" / f"step-{self.moment.best_step}"
            notes["lowest held-out loss"] = f"{self.moment.best_loss:.3f} in {where}"
        return notes


def data_metrics(delivery: Delivery) -> dict[str, float]:
    """What the data set went through so far."""
    return {
        "data/epoch": delivery.epoch,
        "documents/truncated": delivery.truncated,
        **{f"documents/{reason}": count for reason, count in delivery.dropped.items()},
    }


def main() -> int:
    """The program; returns its exit status."""
    return launch("sft", SFTConfig, train, check)


if __name__ == "__main__":
    sys.exit(main())
