"""What the parts of every app have in common: reading the model, and turning `services` into actors' places."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forge.actors.generator import Generator
from forge.app import Run, Stopped
from forge.config import GeneratorServiceConfig, RunConfig, ServiceConfig
from forge.estimate import assumed_machines, placement_lines
from forge.launcher import host_names, open_hosts
from forge.models.architectures import (
    Architecture,
    check_architecture,
    check_pipeline_parallel,
    check_seq_len,
    check_tensor_parallel,
)
from forge.models.hf_folder import WeightFiles, read_config, resolve_folder
from forge.models.published import published_config
from forge.placement import Request, place
from forge.precision import resolve_dtype
from forge.provisioner import Provisioner, this_machine
from forge.service import ActorHandle, Options, Service
from forge.types import UserError

SHUTDOWN_SECONDS = 15.0
"""For every service together; the contract gives a stopped run 60."""

Services = Mapping[str, ServiceConfig | None]
"""Each service's config by its name, or None for one that is not started."""
Turns = Mapping[str, str]
"""{service: the one whose devices it shares, so that they take turns}"""


def read_model(config: RunConfig, scratch: Path, *, generator: ServiceConfig | None) -> tuple[Path, Any]:
    """The model's local folder and its tokenizer, once everything in it was found to fit the config.

    Args:
        scratch: where the tiny model of `model: toy` is made.
        generator: the service whose processes the model is split over; None if there is none.

    Raises:
        UserError: with what to mend.
    """
    from transformers import AutoTokenizer  # here, because importing it adds a log handler

    folder = model_folder(config.model, scratch)
    check_model(config, check_architecture(read_config(folder)), generator=generator)
    try:
        # Without the False it would ask on the terminal whether the folder's code may run.
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"model {config.model!r} has no tokenizer that can be read: {error}") from error
    with WeightFiles(folder) as files:  # missing or torn weights are told before the actors meet them
        files.shapes()
    return folder, tokenizer


def check_model(config: RunConfig, architecture: Architecture, *, generator: ServiceConfig | None) -> None:
    """Whether lengths and parallel degrees suit the model.

    Raises:
        UserError: with the arithmetic.
    """
    check_seq_len(architecture, config.training.seq_len)
    for degree in (config.parallelism.tensor_parallel_degree, generator.procs if generator else 1):
        check_tensor_parallel(architecture, degree)
    check_pipeline_parallel(architecture, config.parallelism.pipeline_parallel_degree)


def published_architecture(model: str) -> Architecture | None:
    """The shape of a well-known hub model that is not in reach; None for any other."""
    config = published_config(model)
    return None if config is None or Path(model).expanduser().exists() else check_architecture(config)


def model_folder(model: str, run_folder: Path) -> Path:
    """The model's local folder; `toy` makes a tiny random model in the run folder."""
    if model != "toy":
        return resolve_folder(model)
    from forge.testing.tiny_model import make_tiny_model

    folder = run_folder / "toy_model"
    return folder if (folder / "model.safetensors").exists() else make_tiny_model(folder)


def check_supported(services: Services) -> None:
    """Refuses what the config can say and this version cannot do: ignoring it would mislead.

    Raises:
        UserError: naming the key.
    """
    for name, service in services.items():
        if service is not None and name != "trainer":
            refuse_unless(f"services.{name}.hosts", service.hosts, 1)


def check_place(launcher: str, services: Services, turns: Turns = MappingProxyType({})) -> None:
    """Whether this machine has room for the services, where it is the only one.

    Other machines are asked what they have once they are attached, before a service starts there.

    Raises:
        InsufficientResources: see `forge.placement.place`.
    """
    if launcher == "local":
        place(requests(services, turns), [this_machine()])


def refuse_unless(key: str, value: Any, supported: Any) -> None:
    """
    Raises:
        UserError: the key has another value than the one that this version supports.
    """
    if value != supported:
        raise UserError(f"{key} must be {supported} in this version, got {value}.\n    Fix: --{key} {supported}")


def describe_placement(config: RunConfig, services: Services, turns: Turns = MappingProxyType({})) -> list[str]:
    """Where every service would run, for `--dry_run`; see `assumed_machines`.

    Raises:
        InsufficientResources: the machines are not enough.
    """
    here, wanted = this_machine(), requests(services, turns)
    names = host_names(config.launcher, config.hosts)
    machines = assumed_machines(wanted, here, launcher=config.launcher, names=names)
    placed = place(wanted, machines)
    note = "on this machine"
    if machines != [here]:
        note = f"assumed: {len(machines)} × {len(machines[0].gpus)} GPUs; this machine has {len(here.gpus)}"
    return [f"placement  {note}", *placement_lines(placed, machines)]


def requests(services: Services, turns: Turns = MappingProxyType({})) -> list[Request]:
    """What each service asks of the machine."""
    return [
        Request(
            service=name,
            procs=s.procs,
            num_replicas=s.num_replicas,
            hosts=s.hosts,
            with_gpus=s.with_gpus,
            threads=s.threads,
            heavy=name != "reward",
            takes_idle_cores=name in ("trainer", "generator"),
            turns_with=turns.get(name),
        )
        for name, s in services.items()
        if s is not None
    ]


def options(actor: Any, service: ServiceConfig, name: str) -> Options:
    """The service's entry in the config as actor options."""
    made: Options = actor.options(
        procs=service.procs * service.hosts,
        num_replicas=service.num_replicas,
        with_gpus=service.with_gpus,
        threads=service.threads,
        name=name,
    )
    return made


def generator_options(service: ServiceConfig) -> Options:
    """One process for each replica: vLLM starts the workers of tensor parallelism itself, on the GPUs it sees."""
    return dataclasses.replace(options(Generator, service, "generator"), procs=1, gpus_per_proc=service.procs)


def generator_arguments(config: RunConfig, service: GeneratorServiceConfig, trainer: ServiceConfig) -> dict[str, Any]:
    """What a `Generator` is built with, but for its model and where its weights come from."""
    dtype = config.training.dtype if service.dtype == "auto" else service.dtype
    return {
        "dtype": resolve_dtype(dtype, with_gpus=(trainer if service.dtype == "auto" else service).with_gpus),
        "device": device(service),
        "tensor_parallel": service.procs,
        "max_model_len": config.training.seq_len,
        "max_num_seqs": service.max_num_seqs,
        "seed": config.training.seed,
        "gpu_memory_utilization": service.gpu_memory_utilization,
    }


def device(service: ServiceConfig) -> str:
    """Where a service computes: "cuda" or "cpu"."""
    return "cuda" if service.with_gpus else "cpu"


def health_metrics(services: Mapping[str, ActorHandle | Service | None]) -> dict[str, float]:
    """How the services are, by their names: "services/reward/healthy" and so on."""
    found = {name: service.health() for name, service in services.items() if service is not None}
    return {f"services/{name}/{what}": value for name, health in found.items() for what, value in health.items()}


@asynccontextmanager
async def provisioned(
    run: Run[Any], services: Services, turns: Turns = MappingProxyType({})
) -> AsyncIterator[Provisioner]:
    """Processes for the services, on this machine or those of the launcher; when left, ends them all."""
    async with open_hosts(run.config.launcher, run.config.hosts) as hosts:
        provisioner = Provisioner(
            hosts=hosts,
            log_dir=run.folder / "logs",
            restarts=run.config.restarts,
            on_incident=lambda incident: run.console.warn(str(incident)),
        )
        async with provisioner, provisioner.ends_on_failure():
            provisioner.plan(requests(services, turns))
            yield provisioner


@asynccontextmanager
async def ending(services: Iterable[ActorHandle | Service | None], provisioner: Provisioner) -> AsyncIterator[None]:
    """Ends the services when the block is left, without asking them if the run failed: that has to end in seconds."""
    try:
        yield
    except BaseException as error:
        group = error if isinstance(error, BaseExceptionGroup) else BaseExceptionGroup("", [error])
        if group.subgroup(Stopped):
            await _say_goodbye(services)
        else:
            await provisioner.shutdown(now=True)
        raise
    await _say_goodbye(services)


async def _say_goodbye(services: Iterable[ActorHandle | Service | None]) -> None:
    """Asks every service to end; what does not in time is ended by the provisioner."""
    goodbyes = asyncio.gather(*(s.shutdown() for s in services if s is not None), return_exceptions=True)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(goodbyes, SHUTDOWN_SECONDS)
