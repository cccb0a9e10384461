"""How the controller scales: its real loops, buffer, services, routers and batching, with simulated generators and
trainers, in virtual time.

    python -m benchmarks.scale_sim [--replicas 1 4 16 64 256 1024] [--groups 2000] [--json FILE]

Everything that runs in the controller is the real code (`apps.grpo.main.Grpo`, `forge.service.Service`, replicas, wire
format, replay buffer, batches). What runs elsewhere answers after the latency of a table: the clock of the event loop
jumps to the next answer, so hours pass in seconds. The batch grows with the replicas, as it would in a run that uses
them: 4 groups of 8 for each replica. Controller time is processor time, without what the stand-ins themselves take.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import selectors
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GROUPS_PER_REPLICA = 4
SAMPLES = 8
PROMPT_TOKENS = 64
RESPONSE_TOKENS = 96  # on average; the spread is log-normal, as real lengths are
# Seconds for one token of every sequence, by how many a replica decodes: the shape of an 8B model on one large GPU.
TOKEN_SECONDS = ((8, 0.008), (32, 0.010), (64, 0.013), (128, 0.018), (1_000_000, 0.03))
REWARD_SECONDS = 0.005
TRAIN_TOKENS_PER_S_AND_REPLICA = 6_000.0  # trainers are added with generators
PUSH_SECONDS, PULL_SECONDS, STATS_SECONDS = 0.5, 1.0, 0.002
COLUMNS = {
    "replicas": "replicas:,",
    "groups": "groups:,",
    "microseconds": "controller µs per episode:.0f",
    "buffer_most": "groups waiting, most:,",
    "running_most": "groups running, most:,",
    "in_flight_most": "requests at one replica, most:,",
    "trainer_idle": "trainer idle:.0%",
    "peak_mib": "memory MiB:.0f",
    "virtual_hours": "hours simulated:.2f",
    "seconds": "seconds taken:.0f",
}


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer as soon as nothing else is to be done."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            return super().select(None)  # something in another thread is waited for
        if timeout > 0:
            self._loop.now += timeout
        return super().select(0)


@dataclass
class World:
    """The stand-ins, and what they saw."""

    loop: VirtualLoop
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    version: int = 0
    stand_in_s: float = 0.0
    trained_s: float = 0.0
    in_flight_most: int = 0


class SimulatedMesh:
    """The processes of one replica, as `forge.service.replica.Mesh` sees them."""

    def __init__(self, world: World, answer: Any) -> None:
        self.world = world
        self.load = 0
        self._answer = answer  # (mesh, method, args, kwargs) → (virtual seconds, value)

    def send(self, kind: str, payload: bytes) -> Sequence[asyncio.Future[bytes]]:
        from forge.service.wire import decode_call, encode_reply

        began = time.thread_time()
        reply: asyncio.Future[bytes] = self.world.loop.create_future()
        call = decode_call(payload)
        seconds, value = self._answer(self, call.method, call.args, call.kwargs)
        encoded = encode_reply(0, value)
        self.load += 1
        self.world.in_flight_most = max(self.world.in_flight_most, self.load)
        self.world.stand_in_s += time.thread_time() - began

        def deliver() -> None:
            self.load -= 1
            if not reply.done():
                reply.set_result(encoded)

        self.world.loop.call_later(seconds, deliver)
        return [reply]

    async def stop(self) -> None: ...

    def on_death(self, callback: Any) -> None: ...


def generator(mesh: SimulatedMesh, method: str, args: Any, kwargs: Any) -> tuple[float, Any]:
    from forge.types import Completion

    world = mesh.world
    if method == "stats":
        return STATS_SECONDS, {"generated_tokens": 0, "busy_s": 0.0, "idle_s": 0.0}
    if method == "update_weights":
        world.version = max(world.version, args[0])
        return PULL_SECONDS, {"fetch": 0.0, "swap": 0.0}
    n = kwargs["n"]
    lengths = [max(1, int(world.dice.lognormvariate(0.0, 0.6) * RESPONSE_TOKENS * 0.83)) for _ in range(n)]
    metadata = {"policy_version": world.version, "policy_version_max": world.version, "finish_reason": "stop"}
    completions = [
        Completion(text="x" * 3 * k, token_ids=list(range(k)), logprobs=[-0.5] * k, metadata=dict(metadata))
        for k in lengths
    ]
    sequences = (mesh.load + 1) * n
    token_s = next(seconds for most, seconds in TOKEN_SECONDS if sequences <= most)
    return max(lengths) * token_s, completions


def reward(mesh: SimulatedMesh, method: str, args: Any, kwargs: Any) -> tuple[float, Any]:
    from forge.rollout import Score

    values = [float(mesh.world.dice.random() < 0.5) for _ in args[0]]
    return REWARD_SECONDS, [Score(reward=v, rewards={"R": v}) for v in values]


def trainer(replicas: int) -> Any:
    def answer(mesh: SimulatedMesh, method: str, args: Any, kwargs: Any) -> tuple[float, Any]:
        if method == "train_step":
            tokens = sum(int(t["padding_mask"].sum()) for t in args[1]) + PROMPT_TOKENS * GROUPS_PER_REPLICA * replicas
            seconds = tokens / (TRAIN_TOKENS_PER_S_AND_REPLICA * replicas)
            mesh.world.trained_s += seconds
            return seconds, 0.0
        return (PUSH_SECONDS if method == "push_weights" else STATS_SECONDS), {
            "loss": 0.0
        } if method == "metrics" else 0.0

    return answer


class Problems:
    """An endless stream of problems."""

    def __init__(self) -> None:
        self.given = 0
        self.dropped: dict[str, int] = {}

    def __next__(self) -> Any:
        from forge.data.datasets import Sample

        self.given += 1
        name = f"p{self.given}"
        return Sample(id=name, prompt=name, prompt_ids=list(range(PROMPT_TOKENS)), target="x", question=name)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given, "epoch": 0}


def service(actor: Any, name: str, count: int, world: World, answer: Any) -> Any:
    from forge.service.handles import Service
    from forge.service.replica import Replica, State
    from forge.service.routers import LeastLoaded

    replicas = [Replica(SimulatedMesh(world, answer), service=name, index=i) for i in range(count)]
    for replica in replicas:
        replica.state = State.HEALTHY
    return Service(actor, name, replicas, LeastLoaded())


def simulated_run(config: Any, depth: dict[str, int]) -> Any:
    """What `Grpo` needs of a `Run`: metrics are collected, nothing is written."""
    from forge.observability.metrics import Metrics

    metrics = Metrics()

    async def unless_stopped(work: Any) -> Any:
        return await work

    def log_step(step: int) -> None:
        values = metrics.flush(step)
        for key in depth:
            depth[key] = max(depth[key], int(values[key]))

    return types.SimpleNamespace(
        config=config,
        start_step=0,
        metrics=metrics,
        unless_stopped=unless_stopped,
        finish_or_drop=unless_stopped,
        resume_from=None,
        flush_to_disk=lambda: None,
        health=types.SimpleNamespace(state_dict=dict),
        raise_if_stopped=lambda: None,
        log_step=log_step,
        console=types.SimpleNamespace(note=print, warn=print),
        rollouts=types.SimpleNamespace(write=lambda *a, **k: None),
        checkpoints=types.SimpleNamespace(begin=lambda *a, **k: Path("."), commit=lambda *a, **k: None),
    )


def simulate(replicas: int, groups: int) -> dict[str, float]:
    """One row of the table."""
    from apps.grpo.main import Grpo
    from apps.grpo.parts import Parts
    from forge.actors.generator import Generator
    from forge.actors.reward import RewardActor
    from forge.actors.trainer import Trainer
    from forge.config import GRPOConfig, load_config
    from forge.service.handles import ActorHandle

    per_step = GROUPS_PER_REPLICA * replicas
    steps = max(3, round(groups / per_step))
    overrides = [f"training.steps={steps}", f"training.batch_size={per_step}", f"grpo.n_samples={SAMPLES}"]
    config = load_config(GRPOConfig, "apps/grpo/toy.yaml", [*overrides, "training.seq_len=4096", "eval.samples=0"])
    config.checkpoint.interval = config.eval.interval = None
    loop = VirtualLoop()
    world = World(loop)
    depth = {"buffer/waiting": 0, "buffer/running": 0}

    async def go() -> None:
        parts = Parts(
            samples=Problems(),  # type: ignore[arg-type]  # in the place of a SampleStream
            heldout=[],
            trainer=ActorHandle(Trainer, "trainer", service(Trainer, "t", 1, world, trainer(replicas)).replicas[0]),
            generator=service(Generator, "generator", replicas, world, generator),
            reward=service(RewardActor, "reward", max(4, replicas // 4), world, reward),
            reference=None,
            data_parallel_ranks=1,
            colocated=False,
        )
        await Grpo(simulated_run(config, depth), parts).train()

    asyncio.set_event_loop(loop)
    wall, cpu = time.perf_counter(), time.process_time()
    loop.run_until_complete(go())
    cpu = time.process_time() - cpu - world.stand_in_s
    return {
        "replicas": replicas,
        "groups": steps * per_step,
        "microseconds": 1e6 * cpu / (steps * per_step * SAMPLES),
        "buffer_most": depth["buffer/waiting"],
        "running_most": depth["buffer/running"],
        "in_flight_most": world.in_flight_most,
        "trainer_idle": 1 - world.trained_s / loop.now,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "virtual_hours": loop.now / 3600,
        "seconds": time.perf_counter() - wall,
    }


def main() -> None:
    from benchmarks.report import parser, report

    arguments = parser(__doc__)
    arguments.add_argument("--replicas", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    arguments.add_argument("--groups", type=int, default=4000, help="per row, at least; three steps at the least")
    arguments.add_argument("--one", type=int, nargs=2, metavar=("REPLICAS", "GROUPS"), help="one row, as JSON")
    given = arguments.parse_args()
    if given.one:
        simulate(1, 12)  # what is imported on the way
        print(json.dumps(simulate(*given.one)))
        return
    rows = []
    for replicas in given.replicas:  # each in a process of its own, so that memory is its own
        groups = max(given.groups, 3 * GROUPS_PER_REPLICA * replicas)
        command = [sys.executable, "-m", "benchmarks.scale_sim", "--one", str(replicas), str(groups)]
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            cwd=Path(__file__).parents[1],
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # idle threads of torch's count as processor time
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    report("scale_sim", rows, columns=COLUMNS, json_path=given.json)


if __name__ == "__main__":
    main()
