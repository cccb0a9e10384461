"""A run that survives: the toy task, while a seeded script kills one of its processes every 20 to 40 s.

    python -m benchmarks.soak [--minutes 15] [--seed 0] [--pause 20 40] [--victims generator reward ref_model trainer]

The victims come in shuffled rounds, so that each kind is hit alike; of several ranks a random one. Afterwards it checks
that the run did all its steps and learned the task, that every group was trained exactly once, and that nothing is
left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from forge.testing import toy_reward

ROOT = Path(__file__).parents[1]
VICTIMS = ("generator", "reward", "ref_model", "trainer")
STEPS_PER_MINUTE = 45  # measured on two cores, the restarts included
GROUPS_PER_STEP = 8
GOAL = 0.9
MARK = "FORGE_SOAK"


def paced_reward(prompt: str, response: str, target: str) -> float:
    """The toy reward, slowly: a step takes about a second, so that most kills meet requests in flight."""
    time.sleep(0.01)
    return toy_reward(prompt, response, target)


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

    def __init__(self, controller: psutil.Process, *, seed: int, victims: list[str]) -> None:
        self._controller = controller
        self._random = random.Random(seed)
        self._victims = victims
        self._round: list[str] = []
        self.kills: list[tuple[float, str]] = []
        self.ports: set[int] = set()

    def pause(self, shortest: float, longest: float) -> float:
        return self._random.uniform(shortest, longest)

    def kill(self) -> str | None:
        """Kills one process of the next kind of which there is one; its name, such as "trainer/0.1"."""
        running = self._running()
        for _ in self._victims:
            if not self._round:
                self._next_round()
            if candidates := running[self._round.pop()]:
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
    """Processes, temporary files, shared memory and ports of a run that has ended."""
    deadline = time.monotonic() + 10
    while (processes := list(marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [f"process {p.pid}: {' '.join(p.cmdline())[:100]}" for p in processes]
    left += [f"file {path}" for path in temporary.rglob("*") if "torchinductor" not in str(path)]
    mapped = "".join(maps for path in Path("/proc").glob("[0-9]*/maps") for maps in _text(path))
    new = set(os.listdir("/dev/shm")) - shared_before
    left += [f"shared memory /dev/shm/{name}" for name in new if name not in mapped]  # else of another program
    listening = {c.laddr.port for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return left + [f"port {port}" for port in ports & listening]


def _text(path: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield path.read_text()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def soak(folder: Path, *, minutes: float, seed: int, pause: tuple[float, float], victims: list[str]) -> list[str]:
    """One run with kills; prints what happens, and returns what is wrong."""
    steps, mark = max(60, round(minutes * STEPS_PER_MINUTE)), uuid.uuid4().hex
    temporary, run = folder / "tmp", folder / "run"
    temporary.mkdir(parents=True)
    shared_before = set(os.listdir("/dev/shm"))
    environment = {**os.environ, MARK: mark, "TMPDIR": str(temporary)}
    started = time.monotonic()
    with (folder / "run.log").open("w") as log:
        process = subprocess.Popen(command(run, steps), cwd=ROOT, stdout=log, stderr=log, env=environment)
    killer = Killer(psutil.Process(process.pid), seed=seed, victims=victims)
    try:
        while not lines_written(run / "metrics.jsonl") and process.poll() is None:
            time.sleep(0.2)
        while ended_after(process, killer.pause(*pause)) is None:
            name = killer.kill()
            done = lines_written(run / "metrics.jsonl")
            print(f"[{time.monotonic() - started:5.0f} s] step {done:4}/{steps}: SIGKILL to {name}", flush=True)
            if time.monotonic() - started > 180 * minutes + 300:
                process.send_signal(signal.SIGABRT)
                return [f"not done after {time.monotonic() - started:.0f} s; see {folder}/run.log"]
    finally:
        process.kill()
        process.wait()
    metrics = lines(run / "metrics.jsonl")
    rewards = [m["reward/mean"] for m in metrics if "loss" in m][-10:]
    reward = sum(rewards) / max(len(rewards), 1)
    restarts = {k.split("/")[1]: v for k, v in (metrics or [{}])[-1].items() if k.endswith("/restarts")}
    print(
        f"{len(killer.kills)} kills in {time.monotonic() - started:.0f} s; exit status {process.returncode}; reward of "
        f"the last steps {reward:.3f}; restarts: {', '.join(f'{k} {v:.0f}' for k, v in restarts.items())}"
    )
    wrong = ledger(lines(run / "rollouts.jsonl"), metrics, steps=steps)
    if process.returncode != 0:
        wrong.append(f"exit status {process.returncode}: {(folder / 'run.log').read_text()[-2000:]}")
    if reward < GOAL:
        wrong.append(f"the reward is {reward:.3f} at the end, not {GOAL}")
    return wrong + left_behind(mark, temporary, shared_before, killer.ports)


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
    parser.add_argument("--seed", type=int, default=0, help="of whom to kill when")
    parser.add_argument("--pause", type=float, nargs=2, default=(20.0, 40.0), help="seconds between two kills")
    parser.add_argument("--victims", nargs="+", default=list(VICTIMS), choices=VICTIMS)
    parser.add_argument("--folder", type=Path, help="where the run and its log go (default: a temporary one)")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="forge-soak-") as temporary:
        wrong = soak(
            asked.folder or Path(temporary),
            minutes=asked.minutes,
            seed=asked.seed,
            pause=tuple(asked.pause),
            victims=asked.victims,
        )
    print("\n".join(wrong) if wrong else "no group lost or trained twice; no process, file, shared memory or port left")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
