"""GRPO: rollouts and training side by side.

    python -m apps.grpo.main --config apps/grpo/toy.yaml [--key.path value ...]

The map of the program. `train` starts the parts; `Grpo` runs two loops that meet in the replay buffer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from forge.app import Dropped, Run, Stopped, launch
from forge.config import GRPOConfig

if TYPE_CHECKING:  # --help and --print_config answer without torch
    from apps.grpo.parts import GeneratorWork, Parts
    from forge.data.datasets import Sample
    from forge.observability.rollout_log import Outcome
    from forge.types import Group


async def train(run: Run[GRPOConfig]) -> None:
    """One run: start or resume, evaluate, train, evaluate again; if the trainer dies, back to the last checkpoint."""
    from apps.grpo.parts import start_parts
    from forge.saver import with_trainer_restarts

    async with start_parts(run) as parts:
        untouched = parts.samples.state_dict()

        async def attempt() -> None:
            parts.samples.load_state_dict(untouched)
            grpo = Grpo(run, parts)
            await run.unless_stopped(grpo.resume())
            await run.unless_stopped(grpo.evaluate_baseline())
            await grpo.train()
            if grpo.baseline:
                after = await run.unless_stopped(grpo.evaluate(grpo.steps_done))
                run.console.summary(grpo.baseline, after, notes={"run folder": str(run.folder)})

        await with_trainer_restarts(run, parts.trainer, attempt)


def check(config: GRPOConfig) -> list[str]:
    """Reads and checks everything that a run would read, and starts nothing."""
    from apps.grpo.dry_run import describe

    with tempfile.TemporaryDirectory() as scratch:
        return describe(config, Path(scratch))


class Grpo:
    """The rollout loop, the training loop, and what they share."""

    def __init__(self, run: Run[GRPOConfig], parts: Parts) -> None:
        from apps.grpo.flat import FlatGroups
        from apps.grpo.parts import GeneratorMeter
        from apps.grpo.state import moment_of
        from forge.replay_buffer import ReplayBuffer
        from forge.rollout import FailureBudget, RolloutSettings
        from forge.saver import Saver

        config = run.config
        self.run = run
        self.config = config
        self.parts = parts
        self.settings = RolloutSettings(
            n_samples=config.grpo.n_samples,
            seq_len=config.training.seq_len,
            max_new_tokens=config.grpo.max_new_tokens,
            temperature=config.grpo.temperature,
            top_p=config.grpo.top_p,
            advantage=config.grpo.advantage,
            error_reward=config.grpo.error_reward,
            overlong_buffer=config.grpo.overlong_buffer,
        )
        self.buffer = ReplayBuffer(
            groups_per_step=config.groups_per_step,
            max_staleness=config.training.staleness_bound,
            steps=config.training.steps,
            first_step=run.start_step,
        )
        self.budget = FailureBudget(max_fraction=config.grpo.max_error_fraction)
        self.failed_before = 0
        empty = config.grpo.max_empty_batches
        self.flat = FlatGroups(limit=empty * config.groups_per_step, batches=empty)
        self.saver = Saver(run, parts.trainer)
        self.in_flight: dict[int, Sample] = {}
        self.set_aside: list[tuple[Outcome, Group]] = []  # not trained, and not written down yet
        self.baseline: dict[str, float] = {}
        self.evaluated = -1  # the last step after which held-out problems were answered
        self.steps_done = self.generator_version = run.start_step
        self.moment = moment_of(self)
        self.may_start = asyncio.Event()  # cleared while the generators belong to an evaluation
        self.may_start.set()
        self.step_ended = time.perf_counter()
        self.work = GeneratorMeter(parts.generator)
        self.syncing: asyncio.Task[None] | None = None

    async def train(self) -> None:
        """Both loops, until the last step is done or the run is stopped; a checkpoint is written in either case."""
        async with asyncio.TaskGroup() as tasks:
            on_policy = self.config.training.staleness_bound == 0
            rollouts = tasks.create_task(self.waves() if on_policy else self.rollouts())
            try:
                await self.training(tasks)
            finally:
                rollouts.cancel()

    async def rollouts(self) -> None:
        """Consumes problems; produces groups in the buffer; waits for free places; ends when it is cancelled."""
        async with asyncio.TaskGroup() as groups:
            for group_id in list(self.in_flight):  # begun before a resume, and not finished
                self.begin(group_id, groups)
            while True:
                await self.may_start.wait()
                self.begin(await self.buffer.admit(), groups)

    async def waves(self) -> None:
        """The same, strictly on-policy: all groups that may start begin together, and the next ones when all of them
        are finished. What is sampled is then a function of weights, seed and problems, to the last bit on a CPU,
        because it does not depend on which requests happened to be computed side by side (`Generator.hold`)."""
        while True:
            wave = list(self.in_flight) or await self.buffer.admit_wave()
            await self.may_start.wait()
            await self.parts.generator.hold.fanout(wave[0])
            async with asyncio.TaskGroup() as groups:
                for group_id in wave:
                    self.begin(group_id, groups)
                await asyncio.sleep(0)  # each has sent its request now; messages arrive in the order they were sent
                await self.parts.generator.release.fanout()

    def begin(self, group_id: int, groups: asyncio.TaskGroup) -> None:
        """Starts a group with the next problem, or with the one that it had before a resume."""
        if group_id not in self.in_flight:
            sample = self.in_flight[group_id] = next(self.parts.samples)
            sample.epoch = self.parts.samples.state_dict()["epoch"]
        groups.create_task(self.one_group(group_id, self.in_flight[group_id]))

    async def one_group(self, group_id: int, sample: Sample) -> None:
        """Consumes one problem; produces one group, or gives it up and counts why."""
        from apps.grpo.flat import NothingLeftToLearn, NothingToLearn
        from forge.rollout import rollout

        group = await rollout(
            sample,
            group_id=group_id,
            settings=self.settings,
            generate=self.parts.generator.generate.route,
            score=self.parts.reward.score.route,
            reference=self.parts.reference.score.route if self.parts.reference else None,
            budget=self.budget,
        )
        del self.in_flight[group_id]
        self.flat.see([e.reward for e in group.episodes])
        if len(group.episodes) < 2:
            await self.give_up("failed", group)
        elif self.config.grpo.dynamic_sampling and not group.has_signal:
            await self.give_up("zero_variance", group)
            try:
                self.flat.add([group])
            except (NothingToLearn, NothingLeftToLearn) as end:  # told where the trainer is between two steps
                await self.buffer.end(end)
        else:
            if self.config.grpo.dynamic_sampling:
                self.flat.had_signal()
            await self.buffer.add(group)

    async def give_up(self, outcome: Outcome, *groups: Group) -> None:
        """Groups that will not be trained: counted, written down with the next step, and replaced by others."""
        self.run.metrics.add(f"groups/{outcome}", len(groups))
        self.set_aside += [(outcome, group) for group in groups]
        await self.buffer.discard(*[g.id for g in groups])

    async def training(self, tasks: asyncio.TaskGroup) -> None:
        """Consumes groups; produces weights, metrics and checkpoints; waits for groups, and for the last weight sync
        before the next; ends after the last step, or when the run is stopped."""
        from apps.grpo.flat import NothingLeftToLearn
        from apps.grpo.state import moment_of

        config, last = self.config, self.config.training.steps
        try:
            while self.steps_done < last:
                await self.one_step(self.steps_done)
                done = self.steps_done = self.steps_done + 1
                self.moment = moment_of(self)
                if evaluate := self.evaluation_due():
                    self.may_start.clear()
                if done % config.training.sync_interval == 0 or done == last:
                    await self.start_sync(done, tasks)
                self.run.log_step(done)
                self.moment.health = self.run.health.state_dict()  # which has seen the step only now
                self.run.raise_if_stopped()
                if evaluate:
                    await self.sync_now(tasks)
                    await self.run.unless_stopped(self.evaluate(done))
                    self.may_start.set()
                if _due(done, config.checkpoint.interval) and done < last:
                    await self.saver.save(done, self.moment, tasks)
        except NothingLeftToLearn as reason:
            self.run.console.note(f"ending after step {self.steps_done} of {last}: {reason}")
        except Dropped:
            self.run.console.warn("the step that was under way did not end in time, so there is no new checkpoint")
            raise
        except Stopped:
            if self.moment.step > self.run.start_step:
                await self.run.last_checkpoint(self.save_last(tasks))
            raise
        await self.save_last(tasks)
        await self.sync_now(tasks)

    async def one_step(self, step: int) -> None:
        """Takes the groups of optimizer step `step` (from 0), trains on them, and measures both."""
        metrics, parts = self.run.metrics, self.parts
        metrics.update({"buffer/waiting": len(self.buffer), "buffer/running": self.buffer.running})
        groups, waited, before, during = await self.train_on_next(step)
        metrics.add("episodes/failed", self.budget.failed - self.failed_before)
        self.failed_before = self.budget.failed
        metrics.update({f"prompts/{why}": count for why, count in parts.samples.dropped.items()})
        metrics.update(parts.health())
        metrics.update(await parts.trainer.metrics.call())
        now = time.perf_counter()
        seconds, self.step_ended = now - self.step_ended, now
        metrics.update(
            {
                "time/step": seconds,
                "time/wait_rollouts": waited,
                "time/trainer_idle": waited / seconds,
                "time/generator_idle": (before.idle_s + during.idle_s) / seconds,
                "time/generate": before.busy_s + during.busy_s,
                "time/generate_while_training": during.busy_s,
                "policy/version": self.generator_version,
                "throughput/episodes_per_s": sum(len(g.episodes) for g in groups) / seconds,
                "throughput/generate_tokens_per_s": (before.tokens + during.tokens) / seconds,
            }
        )

    async def train_on_next(self, step: int) -> tuple[list[Group], float, GeneratorWork, GeneratorWork]:
        """One optimizer step: its groups, the seconds it waited for them, the generators' work before and during it.

        A batch that makes the loss NaN is replaced by the next one where `guards.nonfinite` says so.
        """
        from forge.actors.trainer import NonFiniteStep
        from forge.batching import make_batch

        guards = self.config.guards
        for attempt in range(guards.patience):
            began = time.perf_counter()
            groups = await self.run.unless_stopped(self.next_groups(step))
            waited = time.perf_counter() - began
            trained = [g for g in groups if g.has_signal]
            inputs, targets = make_batch(trained, ranks=self.parts.data_parallel_ranks, pad_id=0)
            before = await self.work.since_last()
            if self.parts.colocated:  # it wakes with the weights that come of this step
                await self.parts.generator.sleep.fanout()
            try:
                await self.run.finish_or_drop(self.parts.trainer.train_step.call(inputs, targets))
            except NonFiniteStep as error:
                if guards.nonfinite == "stop" or attempt == guards.patience - 1:
                    self.write_down(step, groups)  # whoever looks for the reason needs to see them
                    raise
                self.run.console.warn(f"guards.nonfinite: {error} Its groups are replaced.")
                if self.parts.colocated:  # before other groups may start: a wave begins with all its requests at once
                    await self.parts.generator.update_weights.fanout(self.generator_version, rollback=True)
                await self.give_up("nonfinite", *groups)
                continue
            self.write_down(step, groups)
            return groups, waited, before, await self.work.since_last()
        raise AssertionError("the loop returns or raises")

    def write_down(self, step: int, groups: list[Group]) -> None:
        """What became of every group since the last step, into rollouts.jsonl and the metrics of this one."""
        from forge.observability.group_metrics import group_metrics

        set_aside, self.set_aside = self.aside(), []
        for outcome, group in set_aside:
            self.run.rollouts.write(step + 1, [group], outcome=outcome)
        self.run.rollouts.write(step + 1, groups)
        replaced = [g for outcome, g in set_aside if outcome == "zero_variance"]
        self.run.metrics.add("groups/trained", sum(g.has_signal for g in groups))
        self.run.metrics.update(group_metrics([*replaced, *groups], step=step))

    def aside(self) -> list[tuple[Outcome, Group]]:
        """Groups that are not trained and not written down yet, those that the buffer dropped among them."""
        stale, self.buffer.stale = self.buffer.stale, []
        self.run.metrics.add("groups/too_old", len(stale))
        self.set_aside += [("too_old", group) for group in stale]
        return list(self.set_aside)

    async def next_groups(self, step: int) -> list[Group]:
        """The groups of one step, at least one of them with something to learn from."""
        while True:
            groups = await self.buffer.take(step)
            flat = [g for g in groups if not g.has_signal]
            if len(flat) < len(groups):
                self.flat.had_signal()
                self.run.metrics.add("groups/zero_variance", len(flat))
                return groups
            await self.give_up("zero_variance", *groups)
            self.flat.add(flat)

    async def start_sync(self, version: int, tasks: asyncio.TaskGroup) -> None:
        """Copies the new weights out of the trainer, and sends them to the generators while training goes on."""
        await self.sync_finished()
        with self.run.metrics.timer("time/collect_weights"):
            await self.parts.trainer.collect_weights.call()
        self.syncing = tasks.create_task(self.sync(version))

    async def sync(self, version: int) -> None:
        """Publishes the collected weights; every generator takes them over; more groups may start."""
        with self.run.metrics.timer("time/push_weights"):
            await self.parts.trainer.push_weights.call(version)
        with self.run.metrics.timer("time/pull_weights"):
            await self.parts.generator.update_weights.fanout(version, rollback=True)
        self.generator_version = version
        await self.buffer.advance(version)

    async def sync_finished(self) -> None:
        if self.syncing is not None:
            await self.syncing

    async def sync_now(self, tasks: asyncio.TaskGroup) -> None:
        """Returns when the generators have the newest weights, also between two regular syncs."""
        await self.sync_finished()
        if self.generator_version < self.steps_done:
            await self.start_sync(self.steps_done, tasks)
            await self.sync_finished()

    async def evaluate_baseline(self) -> None:
        """The held-out measures before training. A resumed run has them from its checkpoint, or never took them, and
        makes up for those that were due when it was stopped."""
        if self.parts.heldout and not self.steps_done:
            self.baseline = await self.evaluate(0)
        elif self.evaluation_due():
            await self.evaluate(self.steps_done)
        self.step_ended = time.perf_counter()
        await self.work.since_last()  # what was done so far belongs to no step

    def evaluation_due(self) -> bool:
        """Whether held-out problems are to be answered between this step and the next."""
        done, config = self.steps_done, self.config
        due = bool(self.baseline) and _due(done, config.eval.interval) and done < config.training.steps
        return due and self.evaluated != done

    async def evaluate(self, step: int) -> dict[str, float]:
        """Held-out problems, greedily, under the weights after step `step`."""
        from forge.evaluation import evaluate

        await self.sync_finished()
        self.run.console.phase(f"evaluating {len(self.parts.heldout)} held-out problems")
        settings = dataclasses.replace(
            self.settings, max_new_tokens=self.config.eval.max_new_tokens or self.settings.max_new_tokens
        )
        values, groups = await evaluate(
            self.parts.heldout,
            settings=settings,
            generate=self.parts.generator.generate.route,
            score=self.parts.reward.score.route,
        )
        self.run.log_evaluation(step, values)
        self.run.rollouts.write(step, groups, kind="eval")
        self.evaluated = self.moment.evaluated = step
        return values

    async def save_last(self, tasks: asyncio.TaskGroup) -> None:
        """Leaves a checkpoint of the last step behind; returns when it is written."""
        if self.saver.saved_step != self.moment.step:
            await self.saver.save(self.moment.step, self.moment, tasks)
        await self.saver.finished()

    async def resume(self) -> None:
        """Goes on from the checkpoint, if there is one, else from the start. The weights are published in either case:
        a generator that lost its own in its sleep must find them there, even if no step makes others."""
        from apps.grpo.state import go_on_from
        from forge.checkpoint import load_state

        if (path := self.run.resume_from) is not None:
            await self.parts.trainer.load.call(str(path))
            self.moment = go_on_from(load_state(path), self)
        await self.saver.check_room()
        await self.parts.generator.hold.fanout(self.steps_done)  # drops what was asked of it before the trainer died
        await self.parts.generator.release.fanout()
        await self.parts.trainer.collect_weights.call()
        await self.sync(self.steps_done)


def _due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0


def main() -> int:
    """The program; returns its exit status."""
    return launch("grpo", GRPOConfig, train, check)


if __name__ == "__main__":
    sys.exit(main())
