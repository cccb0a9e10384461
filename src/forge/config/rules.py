"""Rules between keys. Each yields what is wrong, with the arithmetic and a way out."""

from __future__ import annotations

import difflib
import math
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from forge.config.errors import Problem

if TYPE_CHECKING:
    from forge.config.schema import GRPOConfig
    from forge.config.sections import ParallelismConfig, RunConfig, ServiceConfig
    from forge.config.sft_schema import SFTConfig

LOSSES = ("simple_grpo", "grpo", "dr_grpo", "dapo", "cispo", "gspo", "sapo", "reinforce")
_CLIPPED = {"grpo", "dr_grpo", "dapo", "gspo"}  # those that read clip_low and clip_high
_GSPO_CLIP = 0.1  # a sequence's mean ratio never gets this far from 1, so a wider clip clips nothing (losses.md)
_UNAVAILABLE = {
    "context": "attention over shared prompts needs a packed row whole on one process; long sequences take "
    "activation_checkpointing, and tensor parallelism, which splits the activations between layers",
    "expert": "the supported architectures (Llama 3, SmolLM2, Qwen2.5, Qwen3) have no experts",
}
"""Kinds of parallelism that users know from elsewhere, and why there is no such thing here."""
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def shared_problems(cfg: RunConfig) -> Iterator[Problem]:
    """What is wrong in the sections that every app has."""
    if not cfg.model.strip():
        yield Problem(key="model", value=cfg.model, rule="must not be empty", fix="--model FOLDER_OR_HUB_ID")
    yield from _training(cfg)
    if cfg.lora is not None and cfg.lora.target_modules == []:
        yield Problem(
            key="lora.target_modules",
            value=[],
            rule="must name at least one matrix",
            why="nothing would be trained",
            fix="--lora.target_modules null, which is every matrix of a block",
        )
    if cfg.launcher == "hosts" and not cfg.hosts:
        yield Problem(
            key="hosts",
            value=cfg.hosts,
            rule="must name the machines of launcher: hosts",
            fix="--hosts '[node1, node2]', or --launcher local",
        )


def _training(cfg: RunConfig) -> Iterator[Problem]:
    training = cfg.training
    if training.warmup_steps > training.steps:
        yield Problem(
            key="training.warmup_steps",
            value=training.warmup_steps,
            rule=f"must be at most training.steps = {training.steps}",
            why="the learning rate would never reach its peak",
            fix=f"--training.warmup_steps {training.steps // 10}",
            involves=("training.steps",),
        )
    packed = training.max_tokens_per_microbatch
    if packed is not None and packed < training.seq_len:
        yield Problem(
            key="training.max_tokens_per_microbatch",
            value=packed,
            rule=f"must be at least training.seq_len = {training.seq_len}",
            why="one sequence has to fit",
            fix=f"--training.max_tokens_per_microbatch {training.seq_len}, or a smaller --training.seq_len",
            involves=("training.seq_len",),
        )


def processes_problems(cfg: RunConfig, trainer: ServiceConfig) -> Iterator[Problem]:
    """Parallel degrees against the trainer's processes, and groups against data-parallel ranks."""
    p = cfg.parallelism
    world = trainer.procs * trainer.hosts
    involves = (*(f"parallelism.{name}" for name in p.__slots__), "services.trainer.procs", "services.trainer.hosts")
    for kind, why in _UNAVAILABLE.items():
        key = f"{kind}_parallel_degree"
        if getattr(p, key) > 1:
            yield Problem(
                key=f"parallelism.{key}",
                value=getattr(p, key),
                rule="must be 1",
                why=why,
                fix=f"--parallelism.{key} 1",
            )
    if p.data_parallel_shard_degree == 0:
        yield Problem(
            key="parallelism.data_parallel_shard_degree",
            value=0,
            rule="must be at least 1, or -1 for all processes that the other degrees leave",
            fix="--parallelism.data_parallel_shard_degree -1",
        )
        return
    degrees = _degrees(p)
    product = math.prod(degrees.values())
    spelled = " × ".join(f"{name} {degree}" for name, degree in degrees.items())
    sum_ = f"{spelled}: {'×'.join(map(str, degrees.values()))} = {product}"
    have = f"{trainer.procs}×{trainer.hosts} = {world} (procs × hosts)" if trainer.hosts > 1 else f"{world}"
    if p.data_parallel_shard_degree == -1:
        if world % product:
            yield Problem(
                key="services.trainer.procs",
                value=trainer.procs,
                rule=f"must make a multiple of {product} trainer processes",
                why=f"parallelism asks for {sum_}, and {have} configured trainer processes are no multiple of it",
                fix=_procs_fix(product * math.ceil(world / product), trainer),
                involves=involves,
            )
            return
        shard = world // product
    else:
        shard = p.data_parallel_shard_degree
        if product != world:
            others = product // shard
            rest = f", or --parallelism.data_parallel_shard_degree {world // others}" if world % others == 0 else ""
            yield Problem(
                key="services.trainer.procs",
                value=trainer.procs,
                rule=f"must make {product} trainer processes",
                why=f"parallelism asks for {sum_} trainer processes, and {have} are configured",
                fix=_procs_fix(product, trainer) + rest,
                involves=involves,
            )
            return
    yield from _ranks(cfg, shard=shard, involves=involves)


def _degrees(p: ParallelismConfig) -> dict[str, int]:
    """The factors of the number of processes; the replicas only where there are any."""
    degrees = {
        "tensor_parallel_degree": p.tensor_parallel_degree,
        "pipeline_parallel_degree": p.pipeline_parallel_degree,
    }
    if p.data_parallel_shard_degree > 0:
        degrees["data_parallel_shard_degree"] = p.data_parallel_shard_degree
    if p.data_parallel_replicate_degree > 1:
        degrees["data_parallel_replicate_degree"] = p.data_parallel_replicate_degree
    return degrees


def _procs_fix(processes: int, trainer: ServiceConfig) -> str:
    if processes % trainer.hosts == 0:
        return f"--trainer.procs {processes // trainer.hosts}"
    return f"--trainer.procs {processes} --trainer.hosts 1"


def _ranks(cfg: RunConfig, *, shard: int, involves: tuple[str, ...]) -> Iterator[Problem]:
    """Rules that need the shard degree, which -1 leaves to the number of processes."""
    p, training = cfg.parallelism, cfg.training
    ranks = shard * p.data_parallel_replicate_degree
    accumulation = training.gradient_accumulation_steps
    groups = training.batch_size * accumulation
    if groups < ranks:
        yield Problem(
            key="training.batch_size",
            value=training.batch_size,
            rule=f"must be at least {math.ceil(ranks / accumulation)}",
            why=f"batch_size × gradient_accumulation_steps = {training.batch_size}×{accumulation} = {groups} prompts "
            f"a step leave some of the {ranks} data-parallel ranks without one",
            fix=f"--training.batch_size {math.ceil(ranks / accumulation)}, or a smaller data-parallel degree",
            involves=("training.gradient_accumulation_steps", *involves),
        )


def grpo_problems(cfg: GRPOConfig) -> Iterator[Problem]:
    """What is wrong in the keys of GRPO."""
    template = cfg.dataset.prompt_template
    if template is not None and "{prompt}" not in template:
        yield Problem(
            key="dataset.prompt_template",
            value=template,
            rule="must contain {prompt}",
            why="the question would be left out",
            fix="write {prompt} where the question belongs",
        )
    yield from services_problems(cfg)
    yield from processes_problems(cfg, cfg.services.trainer)
    yield from _lengths(cfg)
    if cfg.lora is not None and cfg.lora.dropout:
        yield Problem(
            key="lora.dropout",
            value=cfg.lora.dropout,
            rule="must be 0 with GRPO",
            why="the policy that is trained would not be the one that sampled",
            fix="--lora.dropout 0",
        )
    bound, oldest = cfg.training.staleness_bound, cfg.training.sync_interval - 1
    if oldest > bound:
        yield Problem(
            key="training.max_staleness",
            value=bound,
            rule=f"must be at least training.sync_interval - 1 = {oldest}",
            why=f"with a weight sync every {oldest + 1} steps, weights are up to {oldest} steps old before the next",
            fix=f"--training.max_staleness {oldest}, or --training.sync_interval {bound + 1}",
            involves=("training.sync_interval",),
        )
    if cfg.weights.transport == "shm" and cfg.launcher != "local":
        yield Problem(
            key="weights.transport",
            value="shm",
            rule=f"must be auto, rdma or tcp with launcher: {cfg.launcher}",
            why="memory is shared between the processes of one host only",
            fix="--weights.transport auto, which shares it there and sends it elsewhere",
            involves=("launcher",),
        )
    yield from _colocated(cfg)
    yield from _loss(cfg)
    if not cfg.rewards:
        yield Problem(
            key="rewards",
            value=[],
            rule="must name at least one reward",
            fix="--rewards '[forge.data.rewards.MathReward]'",
        )
    for i, entry in enumerate(cfg.rewards):
        if not _IMPORT_PATH.fullmatch(entry.reward):
            yield Problem(
                key=f"rewards.{i}.reward",
                value=entry.reward,
                rule="must be an import path",
                fix="write module.name, such as my_rewards.CustomMathReward",
            )


def services_problems(cfg: GRPOConfig | SFTConfig) -> Iterator[Problem]:
    """What is wrong in the services, whichever there are."""
    services = cfg.services
    if services.trainer.num_replicas > 1:
        n = services.trainer.num_replicas
        yield Problem(
            key="services.trainer.num_replicas",
            value=n,
            rule="must be 1",
            why="there is one policy; copies of it that see different data are a parallel degree",
            fix=f"--trainer.num_replicas 1 --trainer.procs {services.trainer.procs * n} "
            f"--parallelism.data_parallel_replicate_degree {n}",
        )
    if cfg.launcher != "local":
        return
    for name in services.__slots__:
        service = getattr(services, name)
        if service is not None and service.hosts > 1:
            yield Problem(
                key=f"services.{name}.hosts",
                value=service.hosts,
                rule="must be 1 with launcher: local",
                why="that launcher starts processes on this machine only",
                fix=f"--launcher slurm, --launcher hosts, or --{name}.hosts 1",
                involves=("launcher",),
            )


def _colocated(cfg: GRPOConfig) -> Iterator[Problem]:
    """What it takes that generator and trainer take turns."""
    if not cfg.services.generator.colocate:
        return
    key, trainer, generator = "services.generator.colocate", cfg.services.trainer, cfg.services.generator
    if cfg.training.staleness_bound:
        yield Problem(
            key=key,
            value=True,
            rule="needs training.max_staleness 0",
            why="taking turns, the trainer learns only from what the newest weights sampled, and a generator that is "
            "to work ahead has no device meanwhile",
            fix="--training.max_staleness 0, or --generator.colocate false",
            involves=("training.max_staleness", "training.sync_interval"),
        )
    if trainer.with_gpus != generator.with_gpus:
        where = "GPUs" if trainer.with_gpus else "the CPU"
        yield Problem(
            key=key,
            value=True,
            rule="needs the same with_gpus of trainer and generator",
            why=f"the trainer is on {where}, the generator is not",
            fix="--generator.colocate false",
            involves=("services.trainer.with_gpus", "services.generator.with_gpus"),
        )


def _lengths(cfg: GRPOConfig) -> Iterator[Problem]:
    seq_len, limit, buffer = cfg.training.seq_len, cfg.grpo.max_new_tokens, cfg.grpo.overlong_buffer
    for key, tokens in (("grpo.max_new_tokens", limit), ("eval.max_new_tokens", cfg.eval.max_new_tokens)):
        if tokens is not None and tokens >= seq_len:
            yield Problem(
                key=key,
                value=tokens,
                rule=f"must be below training.seq_len = {seq_len}",
                why="prompt and response share seq_len",
                fix=f"--{key} {max(seq_len // 2, 1)}, or --training.seq_len {2 * tokens}",
                involves=("training.seq_len",),
            )
    if buffer and (limit is None or buffer >= limit):
        yield Problem(
            key="grpo.overlong_buffer",
            value=buffer,
            rule="needs grpo.max_new_tokens" if limit is None else f"must be below grpo.max_new_tokens = {limit}",
            why="the penalty starts at max_new_tokens - overlong_buffer",
            fix=f"--grpo.max_new_tokens {max(seq_len // 2, 1)}"
            if limit is None
            else f"--grpo.overlong_buffer {limit // 4}",
            involves=("grpo.max_new_tokens",),
        )


def _loss(cfg: GRPOConfig) -> Iterator[Problem]:
    name, args, grpo = cfg.loss.name, cfg.loss.args, cfg.grpo
    if name not in LOSSES and not _IMPORT_PATH.fullmatch(name):
        close = difflib.get_close_matches(name, LOSSES, n=1)
        yield Problem(
            key="loss",
            value=name,
            rule=f"must be one of {', '.join(LOSSES)}, or the import path of a class",
            fix=f"did you mean {close[0]}?" if close else "--loss grpo",
        )
    for key in ("clip_low", "clip_high"):
        value = getattr(grpo, key)
        if name == "gspo" and value is not None and value >= _GSPO_CLIP:
            yield Problem(
                key=f"grpo.{key}",
                value=value,
                rule=f"must be below {_GSPO_CLIP} with loss: gspo",
                why="its ratio is a mean over the sequence and stays so near 1 that this clip would never act",
                fix=f"--grpo.{key} null, which is the paper's {'3e-4' if key == 'clip_low' else '4e-4'}",
                involves=("loss",),
            )
        if key in args and value is not None:
            yield Problem(
                key=f"loss.args.{key}",
                value=args[key],
                rule=f"must not be given together with grpo.{key} = {value:g}",
                why="a value is written once",
                fix=f"remove loss.args.{key}",
                involves=(f"grpo.{key}",),
            )
    if "beta" in args:
        yield from _beta(cfg)


def _beta(cfg: GRPOConfig) -> Iterator[Problem]:
    """`beta` among the loss's arguments is as good as `grpo.beta`, but not beside it."""
    beta = cfg.loss.args["beta"]
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta < math.inf:
        yield Problem(key="loss.args.beta", value=beta, rule="must be a number at least 0", fix="--loss.args.beta 0.1")
    elif cfg.grpo.beta and cfg.grpo.beta != beta:
        yield Problem(
            key="loss.args.beta",
            value=beta,
            rule=f"must not contradict grpo.beta = {cfg.grpo.beta:g}",
            fix="remove loss.args.beta: grpo.beta is passed to the loss",
            involves=("grpo.beta",),
        )


def grpo_warnings(cfg: GRPOConfig) -> Iterator[str]:
    """What is allowed but probably not meant."""
    grpo, name = cfg.grpo, cfg.loss.name
    if cfg.services.ref_model is not None and cfg.reference is None:
        yield "services.ref_model is not started, because grpo.beta is 0: --grpo.beta 0.1 uses it."
    if grpo.top_p < 1:
        yield (
            f"grpo.top_p = {grpo.top_p:g} samples from a part of the vocabulary, but ratios and KL are over all of it, "
            "so they are biased: --grpo.top_p 1 avoids that."
        )
    if name in LOSSES and name not in _CLIPPED:
        for key in ("clip_low", "clip_high"):
            if getattr(grpo, key) is not None:
                yield f"grpo.{key} has no effect with loss: {name}; its own limits are in loss.args."
    if name == "simple_grpo" and cfg.training.staleness_bound:
        yield (
            f"loss: simple_grpo does not correct for old weights, and training.max_staleness is "
            f"{cfg.training.staleness_bound}: --training.max_staleness 0, or --loss grpo."
        )
    if cfg.eval.interval is not None and not cfg.eval.samples:
        yield "eval.interval has no effect, because eval.samples is 0."


def output_problems(output_dir: str | None) -> Iterator[Problem]:
    """Whether the run folder can be made. Nothing is left behind: the file that is tried has no name."""
    wanted = Path(output_dir or "runs")
    there = wanted.absolute()
    while not os.path.lexists(there):
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            return
    except OSError as error:
        yield Problem(
            key="output_dir",
            value=str(wanted),
            rule="must be a folder that can be written",
            why=f"nothing can be written in {there} ({error.strerror or error})",
            fix="--output_dir FOLDER, one where you may write",
        )
