"""What an episode costs the controller: CPU milliseconds of its process, with generator and trainer that take no time.

    python -m benchmarks.rollout_overhead [--json FILE]

The real program (`apps.grpo.main`: both loops, replay buffer, batches, metrics, rollout log), real processes and
messages; the generator answers at once, the trainer forgets its batch, the reward is a string comparison. 8 prompts ×
8 samples of 32 tokens a step, as in a small run: larger groups cost less an episode. Medians of three runs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from apps.grpo.main import Grpo
from apps.grpo.parts import Parts
from benchmarks.report import median_of, parser, report
from forge.actors.reward import RewardActor
from forge.app import Run
from forge.config import GRPOConfig, MetricsConfig
from forge.data.datasets import Sample
from forge.provisioner import Provisioner
from forge.service import ForgeActor
from forge.types import Completion

LIMIT_MS = 2.0
STEPS, PROMPTS, SAMPLES, TOKENS = 20, 8, 8, 32


class InstantGenerator(ForgeActor):
    """Answers at once."""

    def __init__(self) -> None:
        self.tokens = 0
        self.version = 0
        self.random = random.Random(0)

    async def generate(self, prompt: list[int], *, n: int = 1, **sampling: Any) -> list[Completion]:
        self.tokens += n * TOKENS
        made = []
        for _ in range(n):
            ids = [self.random.randrange(40_000) for _ in range(TOKENS)]
            metadata = {
                "policy_version": self.version,
                "policy_version_max": self.version,
                "finish_reason": "stop",
            }
            made.append(Completion(text=str(ids[0] % 2), token_ids=ids, logprobs=[-1.0] * TOKENS, metadata=metadata))
        return made

    async def update_weights(self, version: int, *, rollback: bool) -> None:
        self.version = version

    async def stats(self) -> dict[str, float]:
        return {"generated_tokens": self.tokens, "busy_s": 0.0, "idle_s": 0.0}


class ForgetfulTrainer(ForgeActor):
    """Takes any batch."""

    def train_step(self, inputs: Any, targets: Any) -> float:
        return 0.0

    def metrics(self) -> dict[str, float]:
        return {"loss": 0.0, "time/train": 0.0}

    def collect_weights(self) -> float:
        return 0.0

    def push_weights(self, version: int) -> float:
        return 0.0

    def save(self, folder: str) -> None:
        (Path(folder) / "trainer").mkdir(parents=True)

    def save_finished(self) -> None:
        pass


class Problems:
    """A data set without end."""

    def __init__(self) -> None:
        self.dropped: dict[str, int] = {}
        self.count = 0

    def __next__(self) -> Sample:
        self.count += 1
        ids = [7] * 150
        return Sample(id=f"p/{self.count}", prompt="x" * 600, prompt_ids=ids, target="1", question="x")

    def state_dict(self) -> dict[str, int]:
        return {"epoch": 0, "position": self.count}


def is_target(prompt: str, response: str, target: str) -> float:
    return float(response == target)


async def one_run(folder: Path) -> dict[str, float]:
    """Milliseconds of CPU and of wall time an episode."""
    config = GRPOConfig(model="toy", output_dir=str(folder), metrics=MetricsConfig(console=False))
    training = dataclasses.replace(config.training, steps=STEPS, batch_size=PROMPTS, max_staleness=1)
    config = dataclasses.replace(
        config, training=training, grpo=dataclasses.replace(config.grpo, n_samples=SAMPLES, max_new_tokens=TOKENS)
    )
    run = Run(config, app="grpo", warnings=[])
    async with Provisioner(log_dir=folder / "logs"):
        trainer, generator, reward = await asyncio.gather(
            ForgetfulTrainer.as_actor(),
            InstantGenerator.as_service(),
            RewardActor.as_service(rewards=["benchmarks.rollout_overhead.is_target"]),
        )
        parts = Parts(
            samples=Problems(),  # type: ignore[arg-type]  # in the place of a SampleStream
            heldout=[],
            trainer=trainer,
            generator=generator,
            reward=reward,
            reference=None,
            data_parallel_ranks=1,
            colocated=False,
        )
        cpu, wall = time.process_time(), time.perf_counter()
        await Grpo(run, parts).train()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        await asyncio.gather(trainer.shutdown(), generator.shutdown(), reward.shutdown())
    run.close()
    episodes = STEPS * PROMPTS * SAMPLES
    return {"cpu_ms": cpu / episodes * 1e3, "wall_ms": wall / episodes * 1e3}


def main() -> None:
    options = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runs = [asyncio.run(one_run(Path(scratch) / str(i))) for i in range(3)]
    row = {
        "episodes": STEPS * PROMPTS * SAMPLES,
        "cpu_ms": median_of([r["cpu_ms"] for r in runs]),
        "wall_ms": median_of([r["wall_ms"] for r in runs]),
        "limit_ms": LIMIT_MS,
    }
    report(
        "rollout_overhead",
        [row],
        columns={
            "episodes": "episodes:,",
            "cpu_ms": "controller CPU ms/episode:.2f",
            "wall_ms": "wall ms/episode:.2f",
            "limit_ms": "limit:.1f",
        },
        json_path=options.json,
        runs=runs,
    )


if __name__ == "__main__":
    main()
