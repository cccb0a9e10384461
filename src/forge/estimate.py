"""What a run would take: where its services go, memory of each device, work of each step. Arithmetic; starts nothing.

`--dry_run` and `forge estimate` print it. The figures of memory are those that the program itself plans with (float32
weights, gradients and Adam's moments; `forge.models.memory` for activations), without fragmentation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from forge.config import GeneratorServiceConfig, ParallelismConfig, RunConfig, ServiceConfig, TrainingConfig
from forge.logprobs import CHUNK_BYTES
from forge.models.architectures import Architecture
from forge.models.memory import activation_bytes_per_token
from forge.observability.environment import gpus
from forge.placement import InsufficientResources, Machine, Placement, Request, place
from forge.precision import resolve_dtype

GIB = 2**30
ASSUMED_GPUS_PER_HOST = 8
ASSUMED_GPU_GIB = 80.0
"""An A100 or H100, where this machine has no GPU to ask."""
MODEL_SHARE = 0.9
"""Of a GPU's memory; the rest is the CUDA context, communication buffers and fragmentation."""
_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(kw_only=True, slots=True)
class Memory:
    """GiB on one device."""

    service: str
    devices: int
    on: str
    """"GPU" or "CPU process"."""
    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    kv_cache: float = 0.0
    note: str = ""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.kv_cache


def assumed_machines(
    requests: Sequence[Request], here: Machine, *, launcher: str = "local", names: Sequence[str] = ()
) -> list[Machine]:
    """The machines of a run as far as they are known before one is asked. None is asked.

    Other machines are taken to be like this one; where this one has no GPU and the config asks for some, to have 8.

    Args:
        names: those of the hosts, where the config or SLURM says which there are; else there are as many as it takes.

    Raises:
        InsufficientResources: no number of such machines can hold the services.
    """
    on_gpus = any(request.with_gpus for request in requests)
    if launcher == "local" and (here.gpus or not on_gpus):
        return [here]
    gpus_there = here.gpus or tuple(str(index) for index in range(ASSUMED_GPUS_PER_HOST if on_gpus else 0))
    if names:
        return [Machine(name=name, cores=here.cores, gpus=gpus_there) for name in names]
    most = sum(request.processes for request in requests)
    for count in range(max(request.hosts for request in requests), most + 1):
        machines = [Machine(name=f"host {i}", cores=here.cores, gpus=gpus_there) for i in range(count)]
        try:
            place(requests, machines)
        except InsufficientResources:
            if count == most:
                raise
            continue
        break
    return machines


def gpu_gib() -> float | None:
    """Memory of this machine's smallest GPU; None where there is none."""
    found = [re.match(r"(\d+) MiB", gpu["memory"]) for gpu in gpus()]
    return min((int(m[1]) / 1024 for m in found if m), default=None)


def placement_lines(placement: Placement, machines: Sequence[Machine]) -> list[str]:
    """One line for each replica, alike ones together."""
    lines: dict[str, list[int]] = {}
    for (service, replica), slots in placement.items():
        places = [machines[s.machine].name + (f" GPU {','.join(s.gpus)}" if s.gpus else " CPU") for s in slots]
        lines.setdefault(f"{service:<10} {' + '.join(places)}", []).append(replica)
    return [f"  {text}" + (f"  (replicas {r[0]}-{r[-1]})" if len(r) > 1 else "") for text, r in lines.items()]


def trainer_memory(
    arch: Architecture,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    service: ServiceConfig,
    *,
    trained: bool = True,
) -> Memory:
    """Of one rank. Sharded are weights, gradients and moments; activations are those of one microbatch.

    Args:
        trained: False where adapters are trained beside frozen weights; the adapters' own state is not counted.

    Example:
        8.19 B parameters on 4 ranks of FSDP: 7.6 GiB of weights, as much of gradients, 15.3 GiB of moments
    """
    p = parallelism
    world = service.procs * service.hosts
    model_parallel = p.tensor_parallel_degree * p.pipeline_parallel_degree
    rest = world // (model_parallel * p.context_parallel_degree * p.data_parallel_replicate_degree)
    shard = rest if p.data_parallel_shard_degree == -1 else p.data_parallel_shard_degree
    shards = max(1, model_parallel * shard * p.context_parallel_degree)
    number = _BYTES[resolve_dtype(training.dtype, with_gpus=service.with_gpus)]
    per_layer = (arch.num_parameters - _embedding_parameters(arch)) / arch.n_layers
    working = 0.0
    if shard > 1 or number == 2:  # two gathered blocks, and the embeddings, in the compute dtype
        working = number * (2 * per_layer + _embedding_parameters(arch)) / p.tensor_parallel_degree
    tokens = training.max_tokens_per_microbatch or training.seq_len
    per_token = activation_bytes_per_token(
        arch, number_bytes=number, checkpointing=training.activation_checkpointing, trainable=True
    )
    activations = tokens * per_token / (model_parallel * p.context_parallel_degree) + 2 * CHUNK_BYTES
    state = 4 * arch.num_parameters / shards / GIB
    if not trained:
        state *= number / 4
    return Memory(
        service="trainer",
        devices=world,
        on="GPU" if service.with_gpus else "CPU process",
        weights=state + working / GIB,
        gradients=state if trained else 0.0,
        optimizer=2 * state if trained else 0.0,
        activations=activations / GIB,
        note=f"activations of {tokens:,} tokens in a forward",
    )


def generator_memory(
    arch: Architecture, *, dtype: str, seq_len: int, service: GeneratorServiceConfig, device_gib: float
) -> Memory:
    """Of one device of a tensor-parallel generator. On a GPU the KV cache takes what the weights leave of its share."""
    number, most = _BYTES[dtype], service.max_num_seqs
    weights = number * arch.num_parameters / service.procs / GIB
    per_token = 2 * arch.n_layers * arch.n_kv_heads * arch.head_dim * number / service.procs
    if service.with_gpus:
        room = max(device_gib * service.gpu_memory_utilization - weights, 0.0)
    else:
        room = most * seq_len * per_token / GIB
    fitting = int(room * GIB / (per_token * seq_len))
    wait = f", the rest of {most:,} waits" if fitting < most else ""
    return Memory(
        service="generator",
        devices=service.procs * service.num_replicas,
        on="GPU" if service.with_gpus else "CPU process",
        weights=weights,
        kv_cache=room,
        note=f"{per_token / 1024:.0f} KiB of KV cache a token: {min(fitting, most):,} sequences of {seq_len:,}{wait}",
    )


def reference_memory(arch: Architecture, training: TrainingConfig, service: ServiceConfig, *, dtype: str) -> Memory:
    """Of one device of the frozen reference model."""
    number = _BYTES[dtype]
    per_token = activation_bytes_per_token(arch, number_bytes=number, checkpointing="none", trainable=False)
    tokens = training.max_tokens_per_microbatch or training.seq_len
    return Memory(
        service="ref_model",
        devices=service.procs * service.num_replicas,
        on="GPU" if service.with_gpus else "CPU process",
        weights=number * arch.num_parameters / service.procs / GIB,
        activations=(tokens * per_token + CHUNK_BYTES) / GIB,
    )


def memory_lines(rows: Sequence[Memory], *, gpu: float, host: float) -> list[str]:
    """The table, and a warning under it for each service that does not fit."""
    columns = ("weights", "gradients", "optimizer", "activations", "kv_cache")
    lines = ["memory     GiB for each device     " + " ".join(f"{c:>11}" for c in (*columns, "sum"))]
    for row in rows:
        values = " ".join(f"{getattr(row, c):>11.1f}" if getattr(row, c) else f"{'-':>11}" for c in columns)
        lines.append(f"  {row.service:<10} {f'{row.devices} × {row.on}':<22} {values} {row.total:>11.1f}   {row.note}")
    for row in rows:
        if row.on == "GPU":
            limit = gpu * (1.0 if row.kv_cache else MODEL_SHARE)
            least = row.weights if row.service == "generator" else row.total
            if least > limit:
                lines.append(f"warning: {_too_large(row, limit, gpu)}")
    on_cpu = sum(row.total * row.devices for row in rows if row.on != "GPU")
    if on_cpu > host:
        lines.append(f"warning: the services on the CPU need about {on_cpu:.0f} GiB, and this machine has {host:.0f}.")
    return lines


def compute_lines(
    arch: Architecture,
    training: TrainingConfig,
    *,
    sequences: int,
    tokens: int,
    prompts: int = 0,
    prompt_tokens: int = 0,
    forwards: Sequence[str] = (),
) -> list[str]:
    """FLOP of one step where every sequence is as long as it may be: 2 for each parameter and token forward, 4 back.

    Args:
        tokens: of a sequence, its prompt apart if `prompts` share it.
        prompts, prompt_tokens: what is computed once for several sequences.
        forwards: what else computes all of it once, forward, such as "generate".
    """
    attention = 2 * arch.n_layers * arch.n_heads * arch.head_dim * training.seq_len
    forward = 2 * (arch.num_parameters - (0 if arch.tied else _embedding_parameters(arch) / 2)) + attention
    computed = sequences * tokens + prompts * prompt_tokens
    passes = {"none": 3, "selective": 3.5, "full": 4}[training.activation_checkpointing]
    work = {**{what: forward * computed for what in forwards}, "train": passes * forward * computed}
    said = ", ".join(f"{what} {flop:.1e}" for what, flop in work.items())
    total = training.steps * sum(work.values())
    return [
        f"compute    FLOP of a step, at most ({sequences:,} sequences of {tokens:,} tokens): {said}",
        f"           {training.steps:,} steps: {total:.1e}, {total / 4e14 / 3600:.1f} hours of a GPU at 4e14 a second",
    ]


def host_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB


def model_line(config: RunConfig, arch: Architecture, *, published: bool) -> str:
    where = ", shapes as published: the model is not in reach here" if published else ""
    return f"model      {config.model}: {arch.name}, {arch.num_parameters / 1e6:,.1f} M parameters{where}"


def _embedding_parameters(arch: Architecture) -> int:
    return arch.vocab_size * arch.dim * (1 if arch.tied else 2)


def _too_large(row: Memory, limit: float, gpu: float) -> str:
    ways = {
        "trainer": "raise --trainer.procs with parallelism.data_parallel_shard_degree, set "
        "training.activation_checkpointing: full, or lower training.max_tokens_per_microbatch or training.seq_len",
        "generator": "raise --generator.procs (tensor parallel)",
        "ref_model": "drop it (services.ref_model: null), or put it on the CPU (ref_model.with_gpus: false)",
    }
    return (
        f"the {row.service} needs about {row.total:.0f} GiB of each GPU, and {limit:.0f} of {gpu:.0f} GiB can be had: "
        f"{ways[row.service]}."
    )
