"""The parts of a GRPO run: what is read before anything starts, and the actors."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from forge.actors.generator import Generator
from forge.actors.reference_model import ReferenceModel
from forge.actors.reward import RewardActor
from forge.actors.trainer import Trainer, build_correction
from forge.app import Run
from forge.config import GRPOConfig, ServiceConfig
from forge.data.datasets import Sample, SampleStream, build_datasets
from forge.data.rewards import build_rewards
from forge.losses import build_loss
from forge.models.architectures import check_architecture, check_seq_len, check_tensor_parallel
from forge.models.hf_folder import WeightFiles, read_config, resolve_folder
from forge.models.memory import TRAINING_BYTES_PER_PARAMETER
from forge.precision import resolve_dtype
from forge.provisioner import Provisioner, Request, available_gpus, check_gpus
from forge.service import ActorHandle, Options, Service
from forge.types import UserError
from forge.weights import WeightStore

SHUTDOWN_SECONDS = 15.0
"""For every service together; the contract gives a stopped run 60."""


@dataclass(kw_only=True, slots=True)
class Parts:
    """Everything that the loops use."""

    samples: SampleStream
    """Problems to train on, without end."""
    heldout: list[Sample]
    trainer: ActorHandle
    generator: Service
    reward: Service
    reference: Service | None
    data_parallel_ranks: int


@dataclass(kw_only=True, slots=True)
class Inputs:
    """What a run reads before anything starts."""

    model: Path
    samples: SampleStream
    heldout: list[Sample]


def read_inputs(config: GRPOConfig, scratch: Path) -> Inputs:
    """Reads model config, data, rewards and loss, and checks the placement, so that what is wrong is told first.

    Args:
        scratch: where the tiny model of `model: toy` is made.

    Raises:
        UserError: with what to mend.
    """
    check_supported(config)
    check_gpus(requests(config), len(available_gpus()))
    folder = model_folder(config.model, scratch)
    architecture = check_architecture(read_config(folder))
    check_seq_len(architecture, config.training.seq_len)
    for degree in (config.parallelism.tensor_parallel_degree, config.services.generator.procs):
        check_tensor_parallel(architecture, degree)
    build_rewards(config.rewards)
    try:
        loss = build_loss(loss_spec(config), defaults=loss_defaults(config))
        if (correction := build_correction(config.grpo.correction)) is not None:
            correction.check(loss)
    except ValueError as error:
        raise UserError(str(error)) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"model {config.model!r} has no tokenizer that can be read: {error}") from error
    with WeightFiles(folder) as files:  # missing or torn weights are told before the actors meet them
        files.shapes()
    samples, heldout = build_datasets(
        config.dataset,
        config.eval,
        tokenizer,
        seed=config.training.seed,
        max_prompt_tokens=config.training.seq_len - (config.grpo.max_new_tokens or 1),
    )
    return Inputs(model=folder, samples=samples, heldout=heldout)


@asynccontextmanager
async def start_parts(run: Run[GRPOConfig]) -> AsyncIterator[Parts]:
    """Reads the inputs and starts every actor; when left, ends them all."""
    run.console.phase("reading model and data")
    inputs = await run.unless_stopped(asyncio.to_thread(read_inputs, run.config, run.folder))
    async with Provisioner(log_dir=run.folder / "logs") as provisioner:
        provisioner.plan(requests(run.config))
        parts = await start_actors(run, inputs)
        try:
            yield parts
        finally:
            services = [parts.trainer, parts.generator, parts.reward, parts.reference]
            goodbyes = asyncio.gather(*(s.shutdown() for s in services if s is not None), return_exceptions=True)
            with contextlib.suppress(TimeoutError):  # what does not end by itself is ended by the provisioner
                await asyncio.wait_for(goodbyes, SHUTDOWN_SECONDS)


async def start_actors(run: Run[GRPOConfig], inputs: Inputs) -> Parts:
    """Starts every service at the same time; returns when all are ready."""
    config, services, model = run.config, run.config.services, str(inputs.model)
    run.console.phase("starting the trainer, the generator and the rewards")
    store = await WeightStore.start()
    trainer_dtype = resolve_dtype(config.training.dtype, with_gpus=services.trainer.with_gpus)
    generator_dtype = (
        trainer_dtype
        if services.generator.dtype == "auto"
        else resolve_dtype(services.generator.dtype, with_gpus=services.generator.with_gpus)
    )
    starting: list[Any] = [
        options(Trainer, services.trainer, "trainer").as_actor(
            model=model,
            training=config.training,
            parallelism=config.parallelism,
            loss=loss_spec(config),
            loss_defaults=loss_defaults(config),
            correction=config.grpo.correction,
            temperature=config.grpo.temperature,
            device=device(services.trainer),
            weights=store,
            weights_dtype=generator_dtype,
        ),
        generator_options(services.generator).as_service(
            model=model,
            dtype=generator_dtype,
            device=device(services.generator),
            tensor_parallel=services.generator.procs,
            max_model_len=config.training.seq_len,
            max_num_seqs=services.generator.max_num_seqs,
            seed=config.training.seed,
            gpu_memory_utilization=services.generator.gpu_memory_utilization,
            weights=store,
        ),
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
    )


def check_supported(config: GRPOConfig) -> None:
    """Refuses what the config can say and this version cannot do: ignoring it would mislead.

    Raises:
        UserError: naming the key.
    """
    wanted = {"launcher": (config.launcher, "local")}
    for name in ("pipeline", "context", "expert"):
        key = f"{name}_parallel_degree"
        wanted[f"parallelism.{key}"] = (getattr(config.parallelism, key), 1)
    if config.services.ref_model is not None:
        wanted["services.ref_model.procs"] = (config.services.ref_model.procs, 1)
    for key, (value, supported) in wanted.items():
        if value != supported:
            raise UserError(f"{key} must be {supported} in this version, got {value}.\n    Fix: --{key} {supported}")


def describe(config: GRPOConfig, inputs: Inputs) -> list[str]:
    """What a run would start, for `--dry_run`."""
    model = check_architecture(read_config(inputs.model))
    lines = [
        f"model      {config.model}: {model.name}, {model.num_parameters / 1e6:.1f} M parameters",
        f"data       {config.dataset.path}: {len(inputs.heldout)} problems held out",
        f"step       {config.groups_per_step} prompts × {config.grpo.n_samples} samples, {config.training.steps} steps",
    ]
    processes = config.services.trainer.procs
    gib = model.num_parameters * TRAINING_BYTES_PER_PARAMETER / processes / 2**30
    lines.append(
        f"memory     {gib:.1f} GiB of weights, gradients and optimizer for each of {processes} trainer processes"
    )
    for r in requests(config):
        where = "GPU" if r.with_gpus else "CPU"
        lines.append(f"{r.service:<10} {r.num_replicas} replicas × {r.procs} processes on the {where}")
    return lines


def model_folder(model: str, run_folder: Path) -> Path:
    """The model's local folder; `toy` makes a tiny random model in the run folder."""
    if model != "toy":
        return resolve_folder(model)
    from forge.testing.tiny_model import make_tiny_model

    folder = run_folder / "toy_model"
    return folder if (folder / "model.safetensors").exists() else make_tiny_model(folder)


def requests(config: GRPOConfig) -> list[Request]:
    """What each service asks of the machine."""
    services = {
        "trainer": config.services.trainer,
        "generator": config.services.generator,
        "ref_model": config.reference,
        "reward": config.services.reward,
    }
    return [
        Request(
            service=name,
            procs=s.procs,
            num_replicas=s.num_replicas,
            with_gpus=s.with_gpus,
            threads=s.threads,
            heavy=name != "reward",
        )
        for name, s in services.items()
        if s is not None
    ]


def generator_options(service: ServiceConfig) -> Options:
    """One process for each replica: vLLM starts the workers of tensor parallelism itself, on the GPUs it sees."""
    return dataclasses.replace(options(Generator, service, "generator"), procs=1, gpus_per_proc=service.procs)


def options(actor: Any, service: ServiceConfig, name: str) -> Options:
    """The service's entry in the config as actor options."""
    made: Options = actor.options(
        procs=service.procs,
        num_replicas=service.num_replicas,
        with_gpus=service.with_gpus,
        threads=service.threads,
        name=name,
    )
    return made


def device(service: ServiceConfig) -> str:
    return "cuda" if service.with_gpus else "cpu"


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
