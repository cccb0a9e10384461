"""The parts of a GRPO run: what is read before anything starts, and the actors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.actors.reference_model import ReferenceModel
from forge.actors.reward import RewardActor
from forge.actors.trainer import Trainer, build_correction
from forge.app import Run
from forge.config import GRPOConfig
from forge.data.datasets import Sample, SampleStream, build_datasets
from forge.data.rewards import build_rewards
from forge.data.sources import Row
from forge.losses import build_loss
from forge.models.architectures import check_architecture
from forge.models.hf_folder import read_config
from forge.models.memory import CUDA_CONTEXT_BYTES, TRAINING_BYTES_PER_PARAMETER
from forge.parts import (
    Services,
    check_place,
    check_supported,
    device,
    ending,
    generator_arguments,
    generator_options,
    health_metrics,
    options,
    provisioned,
    read_model,
    refuse_unless,
)
from forge.precision import resolve_dtype
from forge.provisioner import this_machine
from forge.service import ActorHandle, Service
from forge.types import UserError
from forge.weights import WeightStore


@dataclass(kw_only=True, slots=True)
class Parts:
    """Everything that the loops use."""

    samples: SampleStream[Row, Sample]
    """Problems to train on, without end."""
    heldout: list[Sample]
    trainer: ActorHandle
    generator: Service
    reward: Service
    reference: Service | None
    data_parallel_ranks: int
    colocated: bool
    """Trainer and generator take turns on the same devices."""

    def health(self) -> dict[str, float]:
        """How the services are, under the names of metrics.jsonl."""
        return health_metrics(
            {"trainer": self.trainer, "generator": self.generator, "reward": self.reward, "ref_model": self.reference}
        )


@dataclass(kw_only=True, slots=True)
class GeneratorWork:
    """Tokens that all generators sampled, and seconds that one was busy, or without work, on average."""

    tokens: float
    busy_s: float
    idle_s: float


class GeneratorMeter:
    """What the generators did between two looks."""

    def __init__(self, generator: Service) -> None:
        self._generator = generator
        self._last = GeneratorWork(tokens=0.0, busy_s=0.0, idle_s=0.0)

    async def since_last(self) -> GeneratorWork:
        """What they did since the last call; one that was replaced begins at 0."""
        stats = await self._generator.stats.fanout()
        total = GeneratorWork(
            tokens=sum(s["generated_tokens"] for s in stats),
            busy_s=sum(s["busy_s"] for s in stats) / len(stats),
            idle_s=sum(s["idle_s"] for s in stats) / len(stats),
        )
        last, self._last = self._last, total
        return GeneratorWork(
            tokens=max(0.0, total.tokens - last.tokens),
            busy_s=max(0.0, total.busy_s - last.busy_s),
            idle_s=max(0.0, total.idle_s - last.idle_s),
        )


@dataclass(kw_only=True, slots=True)
class Inputs:
    """What a run reads before anything starts."""

    model: Path
    samples: SampleStream[Row, Sample]
    heldout: list[Sample]


def read_inputs(config: GRPOConfig, scratch: Path) -> Inputs:
    """Reads model config, data, rewards and loss, and checks the placement, so that what is wrong is told first.

    Args:
        scratch: where the tiny model of `model: toy` is made.

    Raises:
        UserError: with what to mend.
    """
    check_place(config.launcher, services_of(config), turns_of(config))
    check_settings(config)
    folder, tokenizer = read_model(config, scratch, generator=config.services.generator)
    samples, heldout = read_data(config, tokenizer)
    return Inputs(model=folder, samples=samples, heldout=heldout)


def check_settings(config: GRPOConfig) -> None:
    """What can be checked without model and data: services, rewards, loss.

    Raises:
        UserError: with what to mend.
    """
    check_supported(services_of(config))
    if config.services.ref_model is not None:
        refuse_unless("services.ref_model.procs", config.services.ref_model.procs, 1)
    build_rewards(config.rewards)
    try:
        loss = build_loss(loss_spec(config), defaults=loss_defaults(config))
        if (correction := build_correction(config.grpo.correction)) is not None:
            correction.check(loss)
    except ValueError as error:
        raise UserError(str(error)) from error


def read_data(config: GRPOConfig, tokenizer: Any) -> tuple[SampleStream[Row, Sample], list[Sample]]:
    """Problems to train on, and held-out ones."""
    return build_datasets(
        config.dataset,
        config.eval,
        tokenizer,
        seed=config.training.seed,
        max_prompt_tokens=config.training.seq_len - (config.grpo.max_new_tokens or 1),
    )


@asynccontextmanager
async def start_parts(run: Run[GRPOConfig]) -> AsyncIterator[Parts]:
    """Reads the inputs and starts every actor; when left, ends them all."""
    run.console.phase("reading model and data")
    inputs = await run.unless_stopped(asyncio.to_thread(read_inputs, run.config, run.folder))
    async with provisioned(run, services_of(run.config), turns_of(run.config)) as provisioner:
        parts = await start_actors(run, inputs)
        async with ending([parts.trainer, parts.generator, parts.reward, parts.reference], provisioner):
            yield parts


async def start_actors(run: Run[GRPOConfig], inputs: Inputs) -> Parts:
    """Starts every service at the same time; returns when all are ready."""
    config, services, model = run.config, run.config.services, str(inputs.model)
    run.console.phase("starting the trainer, the generator and the rewards")
    store = await WeightStore.start(transport=config.weights.transport)
    trainer_dtype = resolve_dtype(config.training.dtype, with_gpus=services.trainer.with_gpus)
    arguments = generator_arguments(config, services.generator, services.trainer)
    colocated = bool(turns_of(config))
    if colocated and services.generator.with_gpus:
        arguments["reserved_bytes"] = trainer_bytes(config, inputs.model)
    generating = asyncio.ensure_future(
        generator_options(services.generator).as_service(model=model, weights=store, **arguments)
    )

    async def start_trainer() -> ActorHandle:
        if colocated and services.generator.with_gpus:
            await generating  # vLLM measures how much of the GPU is free, and nobody else may change that meanwhile
        return await options(Trainer, services.trainer, "trainer").as_actor(
            model=model,
            training=config.training,
            parallelism=config.parallelism,
            lora=config.lora,
            loss=loss_spec(config),
            loss_defaults=loss_defaults(config),
            correction=config.grpo.correction,
            temperature=config.grpo.temperature,
            device=device(services.trainer),
            weights=store,
            weights_dtype=arguments["dtype"],
            shares_device=colocated,
        )

    starting: list[Any] = [
        start_trainer(),
        generating,
        options(RewardActor, services.reward, "reward").as_service(rewards=config.rewards),
    ]
    if config.reference is not None:
        starting.append(
            options(ReferenceModel, config.reference, "ref_model").as_service(
                model=model,
                temperature=config.grpo.temperature,
                dtype=trainer_dtype,
                device=device(config.reference),
                seq_len=config.training.seq_len,
            )
        )
    trainer, generator, reward, *reference = await run.unless_stopped(asyncio.gather(*starting))
    return Parts(
        samples=inputs.samples,
        heldout=inputs.heldout,
        trainer=trainer,
        generator=generator,
        reward=reward,
        reference=reference[0] if reference else None,
        data_parallel_ranks=await trainer.data_parallel_ranks.call(),
        colocated=colocated,
    )


def services_of(config: GRPOConfig) -> Services:
    """The services that the config starts, by name."""
    services = config.services
    return {
        "trainer": services.trainer,
        "generator": services.generator,
        "ref_model": config.reference,
        "reward": services.reward,
    }


def turns_of(config: GRPOConfig) -> dict[str, str]:
    """Which services share devices."""
    return {"generator": "trainer"} if config.colocated(len(this_machine().gpus)) else {}


def trainer_bytes(config: GRPOConfig, model: Path) -> int:
    """What the trainer keeps on each of its GPUs between two steps, at most."""
    shards = config.services.trainer.procs * config.services.trainer.hosts
    shards //= config.parallelism.data_parallel_replicate_degree
    numbers = check_architecture(read_config(model)).num_parameters
    return numbers * TRAINING_BYTES_PER_PARAMETER // shards + CUDA_CONTEXT_BYTES


def loss_spec(config: GRPOConfig) -> dict[str, Any]:
    return {"name": config.loss.name, "args": config.loss.args}


def loss_defaults(config: GRPOConfig) -> dict[str, Any]:
    """What a loss is given where its constructor names it; None leaves it the loss's own default."""
    return {
        "clip_low": config.grpo.clip_low,
        "clip_high": config.grpo.clip_high,
        "beta": config.beta,
        "max_response_len": config.grpo.max_new_tokens or config.training.seq_len,
    }
