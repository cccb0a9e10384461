"""Starting a toy run, breaking it at a chosen moment, and reading what it left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
SHORT = ("--metrics.tensorboard", "false", "--metrics.console", "false")
EXACT = ("loss", "grad_norm", "entropy", "reward/mean", "kl/ref", "mismatch/logprob_diff", "completion/mean_len", "lr")
"""Metrics that a repeated step has again to the last bit; times and throughputs are not among them."""


class App:
    """One start of a program (grpo, sft) with its toy config in `folder`; its output goes to `folder`.log."""

    def __init__(self, folder: Path, *overrides: str, program: str = "grpo") -> None:
        self.folder = folder
        command = [sys.executable, "-m", f"apps.{program}.main", "--config", f"apps/{program}/toy.yaml"]
        self._log = folder.with_suffix(".log")
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--output_dir", str(folder), *SHORT, *overrides],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._process = psutil.Process(self.process.pid)

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def until(self, condition: Callable[[], Any], *, timeout: float = 400.0) -> Any:
        """Waits, looking again and again, and fails when the run ends before."""
        deadline = time.monotonic() + timeout
        while not (found := condition()):
            assert self.process.poll() is None, f"it ended too early:\n{self.output[-3000:]}"
            assert time.monotonic() < deadline, f"waited for {timeout} s:\n{self.output[-3000:]}"
            time.sleep(0.002)
        return found

    def until_step(self, step: int) -> None:
        """Until the metrics of `step` are written."""
        metrics = self.folder / "metrics.jsonl"
        self.until(lambda: _has(metrics, step))

    def until_saving(self, *, after: int = 0) -> Path:
        """Until a checkpoint of a step above `after` is being written; its unfinished folder."""
        folder = self.folder / "checkpoints"
        return self.until(lambda: next((p for p in folder.glob("step-*.partial") if _number(p) > after), None))

    def child(self, name: str) -> psutil.Process:
        """The process of a service, such as `trainer/0`."""
        return self.until(lambda: next((p for p in self._process.children(recursive=True) if _name(p) == name), None))

    def kill(self) -> None:
        """As the kernel does when memory runs out; returns when everything of the run is gone."""
        children = self._process.children(recursive=True)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive, f"left behind: {[p.cmdline() for p in alive]}"

    def stop(self, *signals: int, timeout: float = 60.0) -> int:
        """Sends the signals half a second apart; the exit status."""
        children = self._process.children(recursive=True)
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.5)
        status = self.process.wait(timeout)
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive, f"left behind: {[p.cmdline() for p in alive]}"
        return status

    def finish(self, *, timeout: float = 200.0) -> None:
        """Waits for the good end."""
        assert self.process.wait(timeout) == 0, self.output[-3000:]

    def end(self) -> None:
        """For a test that has failed."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def curve(folder: Path) -> list[list[float]]:
    """What was measured in each step and must not depend on where the run was broken; the step first."""
    found = [m for m in lines(folder / "metrics.jsonl") if "loss" in m]
    return [[m["step"], *(m.get(name) for name in EXACT)] for m in found]


def evaluations(folder: Path) -> list[list[float]]:
    return [[m["step"], m["eval/reward"]] for m in lines(folder / "metrics.jsonl") if "eval/reward" in m]


@contextlib.contextmanager
def starting() -> Iterator[Callable[..., App]]:
    """What starts runs, as `App` does; ends those that a failed test leaves."""
    started: list[App] = []

    def start_one(*args: Any, **kwargs: Any) -> App:
        started.append(App(*args, **kwargs))
        return started[-1]

    try:
        yield start_one
    finally:
        for app in started:
            app.end()


def ledger(folder: Path) -> dict[int, set[tuple[Any, ...]]]:
    """Of each group of rollouts.jsonl: (step, outcome, epoch, sample) of its lines; one if nothing went wrong."""
    groups: dict[int, set[tuple[Any, ...]]] = {}
    for r in lines(folder / "rollouts.jsonl"):
        if r["kind"] == "train":
            groups.setdefault(r["group"], set()).add((r["step"], r["outcome"], r["epoch"], r["sample"]))
    return groups


def newest(folder: Path) -> int:
    """The step of the newest checkpoint; 0 if there is none."""
    return max((_number(p) for p in (folder / "checkpoints").glob("step-*") if p.suffix == ""), default=0)


def _has(metrics: Path, step: int) -> bool:
    if not metrics.exists():
        return False
    whole = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return any(m["step"] >= step and "loss" in m for m in map(json.loads, whole))


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step-").removesuffix(".partial"))


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        return process.environ().get("FORGE_PROC_NAME", "")
    return ""
