"""GRPO: rollouts and training side by side.

    python -m apps.grpo.main --config apps/grpo/toy.yaml [--key.path value ...]

The map of the program. `train` starts the parts; `Grpo` runs two loops that meet in the replay buffer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from forge.app import Run, Stopped, launch
from forge.config import GRPOConfig

if TYPE_CHECKING:  # --help and --print_config answer without torch
    from apps.grpo.parts import Parts
    from forge.data.datasets import Sample
    from forge.types import Group


class NothingToLearn(RuntimeError):
    """In batch after batch every group's answers got the same reward."""


class NothingLeftToLearn(Exception):
    """The same, because every answer is as good as the best one so far: the run ends early, and well."""


@dataclasses.dataclass(kw_only=True, slots=True)
class GeneratorWork:
    """Tokens that all generators sampled, and seconds that one was busy, or without work, on average."""

    tokens: float
    busy_s: float
    idle_s: float


async def train(run: Run[GRPOConfig]) -> None:
    """One run: start or resume, evaluate, train, evaluate again."""
    from apps.grpo.parts import start_parts

    async with start_parts(run) as parts:
        grpo = Grpo(run, parts)
        await run.unless_stopped(grpo.resume())
        await run.unless_stopped(grpo.evaluate_baseline())
        await grpo.train()
        if grpo.baseline:
            after = await run.unless_stopped(grpo.evaluate(grpo.steps_done))
            run.console.summary(grpo.baseline, after, notes={"run folder": str(run.folder)})


def check(config: GRPOConfig) -> list[str]:
    """Reads and checks everything that a run would read, and starts nothing."""
    from apps.grpo.parts import describe, read_inputs

    with tempfile.TemporaryDirectory() as scratch:
        return describe(config, read_inputs(config, Path(scratch)))


class Grpo:
    """The rollout loop, the training loop, and what they share."""

    def __init__(self, run: Run[GRPOConfig], parts: Parts) -> None:
        from forge.replay_buffer import ReplayBuffer
        from forge.rollout import FailureBudget, RolloutSettings

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
        self.in_flight: dict[int, Sample] = {}
        self.baseline: dict[str, float] = {}
        self.flat_rewards: list[float] = []  # of groups without a difference, since the last one with
        self.best_reward, self.worst_reward = -math.inf, math.inf
        self.replaced: list[Group] = []  # since the last step: judged, and not trained for want of a difference
        self.steps_done = self.generator_version = run.start_step
        self.step_ended = time.perf_counter()
        self.work_so_far = GeneratorWork(tokens=0, busy_s=0.0, idle_s=0.0)
        self.syncing: asyncio.Task[None] | None = None

    async def train(self) -> None:
        """Both loops, until the last step is done or the run is stopped; a checkpoint is written in either case."""
        async with asyncio.TaskGroup() as tasks:
            rollouts = tasks.create_task(self.rollouts())
            try:
                await self.training(tasks)
            finally:
                rollouts.cancel()

    async def rollouts(self) -> None:
        """Consumes problems; produces groups in the buffer; waits for free places; ends when it is cancelled."""
        async with asyncio.TaskGroup() as groups:
            for group_id, sample in list(self.in_flight.items()):  # begun before a resume, and not finished
                groups.create_task(self.one_group(group_id, sample))
            while True:
                group_id = await self.buffer.admit()
                self.in_flight[group_id] = next(self.parts.samples)
                groups.create_task(self.one_group(group_id, self.in_flight[group_id]))

    async def one_group(self, group_id: int, sample: Sample) -> None:
        """Consumes one problem; produces one group, or gives it up and counts why."""
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
        rewards = [e.reward for e in group.episodes]
        self.best_reward = max([self.best_reward, *rewards])
        self.worst_reward = min([self.worst_reward, *rewards])
        if len(group.episodes) < 2:
            self.run.metrics.add("groups/failed", 1)
            await self.buffer.discard(group_id)
        elif self.config.grpo.dynamic_sampling and not group.has_signal:
            await self.buffer.discard(group_id)
            try:
                self.count_flat([group])
            except (NothingToLearn, NothingLeftToLearn) as end:  # told where the trainer is between two steps
                await self.buffer.end(end)
        else:
            if self.config.grpo.dynamic_sampling:
                self.flat_rewards = []
            await self.buffer.add(group)

    async def training(self, tasks: asyncio.TaskGroup) -> None:
        """Consumes groups; produces weights, metrics and checkpoints; waits for groups, and for the last weight sync
        before the next; ends after the last step, or when the run is stopped."""
        config, last = self.config, self.config.training.steps
        try:
            while self.steps_done < last:
                await self.one_step(self.steps_done)
                done = self.steps_done = self.steps_done + 1
                if done % config.training.sync_interval == 0 or done == last:
                    await self.start_sync(done, tasks)
                self.run.log_step(done)
                self.run.raise_if_stopped()
                if config.checkpoint.interval and done % config.checkpoint.interval == 0 and done < last:
                    await self.save()
                if config.eval.interval and done % config.eval.interval == 0 and done < last and self.baseline:
                    await self.sync_now(tasks)
                    await self.run.unless_stopped(self.evaluate(done))
        except NothingLeftToLearn as reason:
            self.run.console.note(f"ending after step {self.steps_done} of {last}: {reason}")
        except Stopped:
            if self.steps_done > self.run.start_step:
                await self.save()
            raise
        await self.save()
        await self.sync_now(tasks)

    async def one_step(self, step: int) -> None:
        """Takes the groups of optimizer step `step` (from 0), trains on them, and measures both."""
        from forge.batching import make_batch
        from forge.observability.group_metrics import group_metrics

        metrics, parts = self.run.metrics, self.parts
        metrics.update({"buffer/waiting": len(self.buffer), "buffer/running": self.buffer.running})
        stale_before = self.buffer.stale
        began = time.perf_counter()
        groups = await self.run.unless_stopped(self.next_groups(step))
        waited = time.perf_counter() - began
        trained = [g for g in groups if g.has_signal]
        replaced, self.replaced = self.replaced, []
        self.run.rollouts.write(step + 1, [*replaced, *groups])
        metrics.update({"groups/trained": len(trained), **group_metrics([*replaced, *groups], step=step)})
        metrics.add("episodes/failed", self.budget.failed - self.failed_before)
        self.failed_before = self.budget.failed
        metrics.add("groups/too_old", self.buffer.stale - stale_before)
        metrics.update({f"prompts/{why}": count for why, count in self.parts.samples.dropped.items()})
        metrics.update(parts.health())
        inputs, targets = make_batch(trained, ranks=parts.data_parallel_ranks, pad_id=0)
        before = await self.generator_work()
        if parts.colocated:  # it wakes with the weights that come of this step
            await parts.generator.sleep.fanout()
        await parts.trainer.train_step.call(inputs, targets)
        during = await self.generator_work()
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

    async def next_groups(self, step: int) -> list[Group]:
        """The groups of one step, at least one of them with something to learn from."""
        while True:
            groups = await self.buffer.take(step)
            flat = [g for g in groups if not g.has_signal]
            if len(flat) < len(groups):
                self.flat_rewards = []
                self.run.metrics.add("groups/zero_variance", len(flat))
                return groups
            self.count_flat(flat)
            await self.buffer.discard(*[g.id for g in groups])

    def count_flat(self, groups: list[Group]) -> None:
        """Counts groups that will be replaced because all their episodes got the same reward.

        Raises, after `grpo.max_empty_batches` batches' worth of them in a row:
            NothingLeftToLearn: they all got the best reward of the run: the task is solved.
            NothingToLearn: they did not.
        """
        self.run.metrics.add("groups/zero_variance", len(groups))
        self.replaced += groups
        self.flat_rewards += [g.episodes[0].reward for g in groups]
        if len(self.flat_rewards) < self.config.grpo.max_empty_batches * self.config.groups_per_step:
            return
        if self.worst_reward < self.best_reward <= min(self.flat_rewards):
            raise NothingLeftToLearn(f"the last {len(self.flat_rewards)} groups all got the best reward of the run")
        last = groups[-1].episodes[0]
        raise NothingToLearn(
            f"{len(self.flat_rewards)} groups in a row had the same reward in every episode, as many as "
            f"grpo.max_empty_batches = {self.config.grpo.max_empty_batches} batches hold: there is nothing to "
            "learn from. Choose easier or harder problems, show worked examples in dataset.examples, raise "
            "grpo.n_samples, or use a finer-grained reward. The last one answered "
            f"{last.response!r} where {last.target!r} was right, and got {last.reward:g}."
        )

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
            await self.parts.generator.update_weights.fanout(version)
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

    async def generator_work(self) -> GeneratorWork:
        """What the generators did since the last call."""
        stats = await self.parts.generator.stats.fanout()
        total = GeneratorWork(
            tokens=sum(s["generated_tokens"] for s in stats),
            busy_s=sum(s["busy_s"] for s in stats) / len(stats),
            idle_s=sum(s["idle_s"] for s in stats) / len(stats),
        )
        last, self.work_so_far = self.work_so_far, total
        # A replacement of a replica that died counts from 0.
        return GeneratorWork(
            tokens=max(0.0, total.tokens - last.tokens),
            busy_s=max(0.0, total.busy_s - last.busy_s),
            idle_s=max(0.0, total.idle_s - last.idle_s),
        )

    async def evaluate_baseline(self) -> None:
        """The held-out measures before training; a resumed run has them from its checkpoint, or never took them."""
        if self.parts.heldout and not self.steps_done:
            self.baseline = await self.evaluate(0)
        self.step_ended = time.perf_counter()
        await self.generator_work()  # what was done so far belongs to no step

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
        return values

    async def save(self) -> None:
        """Writes a checkpoint from which the run goes on as if nothing had happened."""
        step = self.steps_done
        state = {
            "step": step,
            "samples": self.parts.samples.state_dict(),
            "in_flight": [[i, dataclasses.asdict(s)] for i, s in self.in_flight.items()],
            "buffer": {
                key: [dataclasses.asdict(g) for g in value] if key == "finished" else value
                for key, value in self.buffer.state_dict().items()
            },
            "baseline": self.baseline,
            "rewards_seen": [self.worst_reward, self.best_reward] if self.best_reward > -math.inf else None,
        }
        with self.run.metrics.timer("time/checkpoint"):
            partial = self.run.checkpoints.begin(step)
            await self.parts.trainer.save.call(str(partial))
            await asyncio.to_thread(self.run.checkpoints.commit, step, state=state)

    async def resume(self) -> None:
        """Goes on from the checkpoint, if there is one."""
        from forge.checkpoint import load_state
        from forge.data.datasets import Sample
        from forge.types import Episode, Group

        path = self.run.resume_from
        if path is None:
            return
        state = load_state(path)
        await self.parts.trainer.load.call(str(path))
        self.parts.samples.load_state_dict(state["samples"])
        self.in_flight = {i: Sample(**s) for i, s in state["in_flight"]}
        finished = [
            Group(id=g["id"], sample_id=g["sample_id"], episodes=[Episode(**e) for e in g["episodes"]])
            for g in state["buffer"]["finished"]
        ]
        self.buffer.load_state_dict({**state["buffer"], "finished": finished}, running=list(self.in_flight))
        self.baseline = state["baseline"]
        if state["rewards_seen"] is not None:
            self.worst_reward, self.best_reward = state["rewards_seen"]
        await self.parts.trainer.collect_weights.call()
        await self.sync(self.steps_done)


if __name__ == "__main__":
    sys.exit(launch("grpo", GRPOConfig, train, check))
