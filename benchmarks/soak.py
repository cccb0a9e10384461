"""A run that survives: the toy task, while a seeded script kills one of its processes every 20 to 40 s.

    python -m benchmarks.soak [--minutes 15] [--seed 0] [--pause 20 40] [--kills N] [--victims generator reward ...]

The victims come in shuffled rounds, so that each kind is hit alike; of several ranks a random one. Afterwards it checks
that the run did all its steps and learned the task, that every group was trained exactly once, and that nothing is
left.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from forge.testing import toy_reward

ROOT = Path(__file__).parents[1]
VICTIMS = ("generator", "reward", "ref_model", "trainer")
STEPS_PER_MINUTE = 80  # two Zen 4 cores do 73, restarts included; slower ones take longer
GROUPS_PER_STEP = 8
GOAL = 0.9
MARK = "FORGE_SOAK"


def paced_reward(prompt: str, response: str, target: str) -> float:
    """The toy reward, slowly: a step takes about a second, so that most kills meet requests in flight.

    The noise keeps it so once the task is learned, for groups whose rewards are all the same are not trained.
    """
    time.sleep(0.01)
    return toy_reward(prompt, response, target) - 0.01 * random.random()


def command(folder: Path, steps: int) -> list[str]:
    """The run. It learns the more slowly the longer it is, so that the kills come while it does."""
    return [
        *(sys.executable, "-m", "apps.grpo.main", "--config", "apps/grpo/toy.yaml", "--output_dir", str(folder)),
        *("--training.steps", str(steps), "--training.learning_rate", str(3e-3 * min(1.0, 90 / steps))),
        *("--grpo.beta", "0.001", "--ref_model.with_gpus", "false", "--rewards", "[benchmarks.soak.paced_reward]"),
        *("--grpo.max_empty_batches", "100000", "--eval.samples", "0", "--checkpoint.interval", "10"),
        *("--restarts.max", "100000", "--restarts.backoff_s", "0"),
    ]


class Killer:
    """Kills processes of one run, and remembers when and whom."""

    def __init__(self, controller: psutil.Process, log: Path, *, seed: int, victims: list[str]) -> None:
        self._controller = controller
        self._log = log
        self._random = random.Random(seed)
        self._victims = victims
        self._round: list[str] = []
        self.kills: list[tuple[float, str]] = []
        self.ports: set[int] = set()

    def pause(self, shortest: float, longest: float) -> float:
        return self._random.uniform(shortest, longest)

    def kill(self) -> str | None:
        """Kills one process of the next kind that is not being replaced just now; its name, such as "trainer/0.1"."""
        running, away = self._running(), being_replaced(self._log.read_text())
        for _ in self._victims:
            if not self._round:
                self._next_round()
            kind = self._round.pop()
            if kind not in away and (candidates := running[kind]):
                name, process = self._random.choice(candidates)
                process.kill()
                self.kills.append((time.monotonic(), name))
                return name
        return None

    def _next_round(self) -> None:
        """All kinds in a new order, the last one not again at once: a request that meets two deaths is an error."""
        self._round = self._random.sample(self._victims, len(self._victims))
        if self.kills and self.kills[-1][1].startswith(self._round[-1]):
            self._round.reverse()

    def _running(self) -> dict[str, list[tuple[str, psutil.Process]]]:
        found = defaultdict(list)
        for process in self._controller.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                self.ports |= {c.laddr.port for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
                name = process.environ().get("FORGE_PROC_NAME", "")
                if process.parent() == self._controller:
                    found[name.partition("/")[0]].append((name, process))
        return found


def being_replaced(log: str) -> set[str]:
    """The services that have lost a replica which is not back yet, by what the run says.

    A generator takes 15 s to start, on a busy machine a minute; killed again and again it would never be there.
    """
    away: set[str] = set()
    for line in log.splitlines():
        if told := re.search(r"(\w+) \(replica \d+\).* A replacement is being started", line):
            away.add(told[1])
        elif told := re.search(r"(\w+) \(replica \d+\) is back after", line):
            away.discard(told[1])
    return away


def ledger(rollouts: list[dict[str, Any]], metrics: list[dict[str, Any]], *, steps: int) -> list[str]:
    """What is wrong with the groups of a run; nothing if each was trained in exactly one step and none is missing.

    Groups that the run itself says it gave up (too old, failed) may be missing.
    """
    steps_of: dict[int, set[int]] = defaultdict(set)
    groups_of: dict[int, set[int]] = defaultdict(set)
    for line in rollouts:
        if line["kind"] == "train":
            steps_of[line["group"]].add(line["step"])
            groups_of[line["step"]].add(line["group"])
    wrong = [f"group {g} in steps {sorted(s)}" for g, s in steps_of.items() if len(s) > 1]
    for step in range(1, steps + 1):
        if len(groups_of[step]) < GROUPS_PER_STEP:
            wrong.append(f"step {step} has {len(groups_of[step])} groups, not {GROUPS_PER_STEP}")
    missing = set(range(max(steps_of, default=-1) + 1)) - steps_of.keys()
    given_up = sum(m.get("groups/too_old", 0) + m.get("groups/failed", 0) for m in metrics)
    if len(missing) > given_up:
        wrong.append(f"{len(missing)} groups are missing, {given_up:.0f} of them accounted for: {sorted(missing)[:20]}")
    done = [m["step"] for m in metrics if "loss" in m]
    if done != list(range(1, steps + 1)):
        wrong.append(f"steps in metrics.jsonl: {len(done)} lines, up to {max(done, default=0)}, of {steps}")
    return wrong


def marked(mark: str) -> Iterator[psutil.Process]:
    """Living processes that have the mark in their environment."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def left_behind(mark: str, temporary: Path, shared_before: set[str], ports: set[int]) -> list[str]:
    """Processes, temporary files, shared memory and ports of a run that ended a moment ago."""
    deadline = time.monotonic() + 20  # what was killed last may be cleaned up by others
    while (left := _left(mark, temporary, shared_before, ports)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def _left(mark: str, temporary: Path, shared_before: set[str], ports: set[int]) -> list[str]:
    left = [f"process {p.pid}: {' '.join(p.cmdline())[:100]}" for p in marked(mark)]
    left += [f"file {path}" for path in temporary.rglob("*") if "torchinductor" not in str(path)]
    mapped = "".join(maps for path in Path("/proc").glob("[0-9]*/maps") for maps in _text(path))
    new = set(os.listdir("/dev/shm")) - shared_before
    left += [f"shared memory /dev/shm/{name}" for name in new if name not in mapped]  # else of another program
    listening = {c.laddr.port for c in psutil.net_connections("inet") if c.laddr and c.status == psutil.CONN_LISTEN}
    return left + [f"port {port}" for port in ports & listening]


def _text(path: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield path.read_text()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass(kw_only=True, slots=True)
class Result:
    """What became of one soak."""

    steps: int
    kills: int
    seconds: float
    reward: float
    """Of the last ten steps."""
    restarts: dict[str, float]
    wrong: list[str]
    """What should not be; empty where all is well."""


def soak(
    folder: Path, *, steps: int, seed: int, pause: tuple[float, float], kills: float, victims: list[str]
) -> Result:
    """One run with kills; prints them as they happen."""
    mark = uuid.uuid4().hex
    temporary, run = folder / "tmp", folder / "run"
    temporary.mkdir(parents=True)
    shared_before = set(os.listdir("/dev/shm"))
    environment = {**os.environ, MARK: mark, "TMPDIR": str(temporary)}
    started = time.monotonic()
    with (folder / "run.log").open("w") as log:
        process = subprocess.Popen(command(run, steps), cwd=ROOT, stdout=log, stderr=log, env=environment)
    killer = Killer(psutil.Process(process.pid), folder / "run.log", seed=seed, victims=victims)
    try:
        while not lines_written(run / "metrics.jsonl") and process.poll() is None:
            time.sleep(0.2)
        while ended_after(process, killer.pause(*pause)) is None:
            if len(killer.kills) < kills and (name := killer.kill()):
                done = lines_written(run / "metrics.jsonl")
                print(f"[{time.monotonic() - started:5.0f} s] step {done:4}/{steps}: SIGKILL to {name}", flush=True)
    finally:
        process.kill()
        process.wait()
    metrics = lines(run / "metrics.jsonl")
    rewards = [m["reward/mean"] for m in metrics if "loss" in m][-10:]
    reward = sum(rewards) / max(len(rewards), 1)
    wrong = ledger(lines(run / "rollouts.jsonl"), metrics, steps=steps)
    if process.returncode != 0:
        wrong.append(f"exit status {process.returncode}: {(folder / 'run.log').read_text()[-2000:]}")
    if reward < GOAL:
        wrong.append(f"the reward is {reward:.3f} at the end, not {GOAL}")
    wrong += left_behind(mark, temporary, shared_before, killer.ports)
    return Result(
        steps=steps,
        kills=len(killer.kills),
        seconds=time.monotonic() - started,
        reward=reward,
        restarts={k.split("/")[1]: v for k, v in (metrics or [{}])[-1].items() if k.endswith("/restarts")},
        wrong=wrong,
    )


def lines_written(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def ended_after(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit status if the process ends within `seconds`."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0, help="about how long, on two cores")
    parser.add_argument("--steps", type=int, help=f"of the run (default: {STEPS_PER_MINUTE} a minute, 60 at least)")
    parser.add_argument("--seed", type=int, default=0, help="of whom to kill when")
    parser.add_argument("--pause", type=float, nargs=2, default=(20.0, 40.0), help="seconds between two kills")
    parser.add_argument("--kills", type=int, default=math.inf, help="at most so many (default: until its end)")
    parser.add_argument("--victims", nargs="+", default=list(VICTIMS), choices=VICTIMS)
    parser.add_argument("--folder", type=Path, help="where the run and its log go (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="where to write the result")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the run is ended then, too
    with tempfile.TemporaryDirectory(prefix="forge-soak-") as temporary:
        result = soak(
            asked.folder or Path(temporary),
            steps=asked.steps or max(60, round(asked.minutes * STEPS_PER_MINUTE)),
            seed=asked.seed,
            pause=tuple(asked.pause),
            kills=asked.kills,
            victims=asked.victims,
        )
    print(
        f"{result.steps} steps with {result.kills} kills in {result.seconds:.0f} s; reward of the last steps "
        f"{result.reward:.3f}; restarts: {', '.join(f'{name} {n:.0f}' for name, n in result.restarts.items())}"
    )
    right = "no group lost or trained twice; no process, file, shared memory or port left"
    print("\n".join(result.wrong) or right)
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps([dataclasses.asdict(result)], indent=1))
    return 1 if result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
