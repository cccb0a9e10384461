"""What every app does around its training: command line, run folder, signals, exit status.

Exit status: 0 done; 1 the run failed; 2 the user's input is wrong; 130 or 143 interrupted, after a clean stop and a
checkpoint.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from forge.config import RunConfig, make_output_dir, parse_args, to_yaml
from forge.service.unseen import ended
from forge.types import UserError

C = TypeVar("C", bound=RunConfig)
T = TypeVar("T")

EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C; what ends a job; what SLURM sends ahead of a pre-emption if asked to (`--signal=USR1@60`)."""
STEP_SECONDS = 20.0
"""How long a stopped run waits for the step that it is in; then the step is dropped."""
SAVE_SECONDS = 38.0
"""How long after the signal the last checkpoint may still be written."""
STOP_SECONDS = 58.0
"""When a stopped run ends by force: the contract gives it 60."""


class Stopped(Exception):
    """The user or the cluster asked the run to end."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_status = stop_status(signal_number)


class Dropped(Stopped):
    """The same, and the step that was under way did not end in time: the trainer is still busy with it."""


def stop_status(signal_number: int) -> int:
    """130 for Ctrl-C, 143 for what a cluster sends."""
    return 130 if signal_number == signal.SIGINT else 143


class Run(Generic[C]):
    """One run: its config, its folder, and where its progress goes.

    Attributes:
        config: as resolved.
        folder: `output_dir`; holds what section 6 of the users' contract lists.
        resume_from: the intact checkpoint that this run continues, or None.
        start_step: optimizer steps that were done before.
        went_back: whether this process has lost steps and does them again (`go_back`).
        console, metrics, rollouts, checkpoints, health: see their modules.
    """

    def __init__(self, config: C, *, app: str, warnings: list[str]) -> None:
        from forge.checkpoint import Checkpoints, load_state
        from forge.config.changes import write_config
        from forge.observability.console import Console
        from forge.observability.environment import describe_environment, write_environment
        from forge.observability.health import HealthMonitor
        from forge.observability.metrics import Metrics
        from forge.observability.redaction import redact
        from forge.observability.rollout_log import RolloutLog
        from forge.observability.sinks import open_sinks

        self.config = config
        self.folder = make_output_dir(config.output_dir, app=app)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", keep_latest_k=config.checkpoint.keep_latest_k)
        self._refuse_other_run()
        self.resume_from = self.checkpoints.latest()
        self.start_step = int(load_state(self.resume_from)["step"]) if self.resume_from else 0
        shown = redact(dataclasses.asdict(config))  # what is written down has no secrets
        changed = write_config(self.folder, to_yaml(shown), resume_step=self._resume_step)
        self.console = Console(steps=config.training.steps, start_step=self.start_step, enabled=config.metrics.console)
        dataset = config.dataset
        environment = describe_environment(
            seed=config.training.seed,
            dataset={"path": dataset.path, "name": dataset.name, "split": dataset.split, "size": dataset.size},
        )
        write_environment(self.folder, environment)
        self.metrics = Metrics()
        self.health = HealthMonitor(config.guards)
        self._sinks = open_sinks(
            self.folder,
            resume_step=self._resume_step,
            tensorboard=config.metrics.tensorboard,
            wandb=config.metrics.wandb,
            wandb_project=config.metrics.wandb_project,
            config=shown,
            warn=self.console.warn,
        )
        self.rollouts = RolloutLog(self.folder / "rollouts.jsonl", resume_step=self._resume_step)
        self.went_back = False
        self._signal: asyncio.Future[int] | None = None
        self._signalled_at = math.inf
        for text in [*warnings, *self.checkpoints.torn]:
            self.console.warn(text)
        if self.resume_from:
            self.console.note(f"resuming after step {self.start_step} from {self.resume_from}")
        for change in changed:
            self.console.note(f"changed since then: {change}")

    def _refuse_other_run(self) -> None:
        holds_run = (self.folder / "metrics.jsonl").exists()
        if holds_run and self.config.checkpoint.resume == "never":
            raise UserError(
                f"output_dir {self.folder} holds a run, and checkpoint.resume is never. Choose another output_dir, "
                "remove the folder, or continue the run with --checkpoint.resume auto."
            )

    @property
    def _resume_step(self) -> int | None:
        return self.start_step if self.resume_from else None

    def go_back(self) -> None:
        """To the newest intact checkpoint, or to the start: what was written of later steps is dropped, as when the
        same command is run again. The app's own state is to be built anew from `resume_from`."""
        from forge.checkpoint import load_state
        from forge.observability.health import HealthMonitor

        self.resume_from = self.checkpoints.latest()
        self.start_step = int(load_state(self.resume_from)["step"]) if self.resume_from else 0
        self._sinks.rewind(self._resume_step)
        self.rollouts.rewind(self._resume_step)
        self.metrics.flush(self.start_step)
        self.health = HealthMonitor(self.config.guards)
        self.went_back = True
        self.console.note(f"going on after step {self.start_step}, from {self.resume_from or 'the start'}")

    def flush_to_disk(self) -> None:
        """What was logged so far survives the machine, as a checkpoint that continues it does."""
        self._sinks.flush_to_disk()
        self.rollouts.flush_to_disk()

    async def unless_stopped(self, work: Awaitable[T]) -> T:
        """The result of `work`; raises `Stopped` instead, and cancels it, as soon as the run is asked to end."""
        task = asyncio.ensure_future(work)
        try:
            first: set[asyncio.Future[Any]] = {task, self._stop_signal()}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Stopped(self._stop_signal().result())
        finally:
            await ended(task)

    async def finish_or_drop(self, step: Awaitable[T]) -> T:
        """The result of `step`, also when the run is asked to end meanwhile, if that takes no longer than STEP_SECONDS.

        Raises:
            Dropped: it takes longer.
        """
        task = asyncio.ensure_future(step)
        try:
            first: set[asyncio.Future[Any]] = {task, self._stop_signal()}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait({task}, timeout=self._seconds_until(STEP_SECONDS))
            if task.done():
                return task.result()
            raise Dropped(self._stop_signal().result())
        finally:
            await ended(task)

    async def last_checkpoint(self, saving: Awaitable[None]) -> None:
        """Waits for a stopped run's checkpoint, as long as there is time."""
        try:
            await asyncio.wait_for(saving, self._seconds_until(SAVE_SECONDS))
        except TimeoutError:
            self.console.warn("there was no time to write a checkpoint; the one before it stays the last")

    def raise_if_stopped(self) -> None:
        """Raises `Stopped` if the run was asked to end."""
        if self._stop_signal().done():
            raise Stopped(self._stop_signal().result())

    def _stop_signal(self) -> asyncio.Future[int]:
        if self._signal is None:
            self._signal = asyncio.get_running_loop().create_future()
        return self._signal

    def _seconds_until(self, seconds: float) -> float:
        """What is left of so many seconds after the signal."""
        now = time.monotonic()
        return max(min(self._signalled_at, now) + seconds - now, 0.0)

    def handle_signals(self) -> None:
        """SIGINT, SIGTERM and SIGUSR1 ask the run to end; a second one ends it at once, and so does the time limit."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._stop_signal().done():
            os._exit(stop_status(number))  # the children die with this process
        self.console.note("stopping after a checkpoint; a second signal stops at once")
        self._signalled_at = time.monotonic()
        # A thread, because whatever holds the run up may hold up the event loop as well.
        limit = threading.Timer(STOP_SECONDS, os._exit, [stop_status(number)])
        limit.daemon = True
        limit.start()
        self._stop_signal().set_result(number)

    def log_step(self, step: int) -> None:
        """Writes what `metrics` collected since the last call as step `step`, and warns where it looks unhealthy.

        Raises:
            GuardStop: a guard says that the run is not worth going on with.
        """
        values = self.metrics.flush(step)
        self._sinks.write(step, values)
        self.console.step(step, values)
        for warning in self.health.check(values):
            self.console.warn(warning)

    def log_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Writes held-out measures after step `step`."""
        self._sinks.write(step, {"step": step, **values})
        self.console.evaluation(step, values)

    def close(self) -> None:
        self._sinks.close()
        self.rollouts.close()
        self.console.close()


def launch(
    app: str,
    config_class: type[C],
    train: Callable[[Run[C]], Awaitable[None]],
    check: Callable[[C], list[str]],
    *,
    defaults: Sequence[str] = (),
) -> int:
    """Runs an app from its command line; returns the exit status.

    Args:
        app: such as "grpo": names the program (`apps.<app>.main`) and its run folders.
        config_class: what the config file is read into.
        train: the app itself.
        check: what `--dry_run` does instead: reads and checks the inputs, starts nothing, and returns lines to show.
        defaults: arguments in front of those of the command line, such as a config file where none is given.
    """
    # Until there is an event loop to handle them.
    before = {n: signal.signal(n, lambda number, _: sys.exit(stop_status(number))) for n in STOP_SIGNALS}
    try:
        return _launch(app, config_class, train, check, defaults)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _launch(
    app: str,
    config_class: type[C],
    train: Callable[[Run[C]], Awaitable[None]],
    check: Callable[[C], list[str]],
    defaults: Sequence[str],
) -> int:
    given = sys.argv[1:]
    if "--config" in given or any(a.startswith("--config=") for a in given):
        defaults = ()
    asked = parse_args(config_class, [*defaults, *given], prog=f"python -m apps.{app}.main")
    try:
        if asked.dry_run:
            print("\n".join([*(f"warning: {w}" for w in asked.warnings), *check(asked.config)]))
            return 0
        run = Run(asked.config, app=app, warnings=asked.warnings)
    except UserError as error:
        return _wrong_input(error)
    try:
        with run.console:
            asyncio.run(_with_signals(run, train))
        return 0
    except UserError as error:
        return _wrong_input(error)
    except Stopped as stopped:
        run.console.note(f"stopped by {stopped}; the same command with --output_dir {run.folder} goes on from here")
        return stopped.exit_status
    except Exception as error:
        run.console.close()
        _tell_failure(_first_cause(error), run.checkpoints.latest())
        return EXIT_FAILED
    finally:
        run.close()


async def _with_signals(run: Run[C], train: Callable[[Run[C]], Awaitable[None]]) -> None:
    run.handle_signals()
    try:
        await train(run)
    except BaseExceptionGroup as group:
        # Tasks that run side by side fail as a group; the first failure is what ended the run.
        cause = _first_cause(group)
        raise cause from cause.__cause__


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        told = (e for e in error.exceptions if isinstance(e, Stopped | UserError))
        error = next(told, error.exceptions[0])
    return error


def _tell_failure(cause: BaseException, newest: Path | None) -> None:
    from forge.checkpoint import is_disk_full
    from forge.observability.health import GuardStop

    if not isinstance(cause, GuardStop) and not is_disk_full(cause):  # those messages are complete
        traceback.print_exception(cause)
    print(
        f"\nThe run failed: {type(cause).__name__}: {cause}\nLast good checkpoint: {newest or 'none yet'}",
        file=sys.stderr,
    )


def _wrong_input(error: UserError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return EXIT_WRONG_INPUT
