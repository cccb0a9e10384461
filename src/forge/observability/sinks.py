"""Where a step's metrics go. A sink that fails is warned about once and left out; it never ends the run."""

from __future__ import annotations

import logging
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from forge.config.errors import ConfigError
from forge.observability.files import JsonLines, make_folder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Values = Mapping[str, float]
T = TypeVar("T")
log = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes the metrics of each step."""

    def write(self, step: int, values: Values) -> None: ...

    def rewind(self, resume_step: int | None) -> None:
        """The run goes on from that step; None: from the start."""

    def flush_to_disk(self) -> None:
        """What was written survives the machine."""

    def close(self) -> None: ...


class JsonlSink:
    """`metrics.jsonl`: one JSON object a step, NaN as null. See `JsonLines` for what resuming does."""

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        self._lines = JsonLines(path, resume_step=resume_step)

    def write(self, step: int, values: Values) -> None:
        self._lines.write({"step": step, **{name: value for name, value in values.items() if name != "step"}})

    def rewind(self, resume_step: int | None) -> None:
        self._lines.rewind(resume_step)

    def flush_to_disk(self) -> None:
        self._lines.flush_to_disk()

    def close(self) -> None:
        self._lines.close()


class TensorBoardSink:
    """Event files in `folder`, one curve for each name."""

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        make_folder(folder)
        self._folder = folder
        self._writer = self._open(resume_step)

    def _open(self, resume_step: int | None) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        # Readers drop what earlier files hold from this step on: a new run starts at 0.
        purge = 0 if resume_step is None else resume_step + 1
        return SummaryWriter(str(self._folder), purge_step=purge)

    def write(self, step: int, values: Values) -> None:
        for name, value in values.items():
            if name != "step" and not math.isnan(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def rewind(self, resume_step: int | None) -> None:
        self._writer.close()
        self._writer = self._open(resume_step)

    def flush_to_disk(self) -> None:
        """Curves only: metrics.jsonl is the record."""

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run, online or offline, with its files under `folder`/wandb.

    Args:
        folder: the run folder. The id of the W&B run is kept there, so that a resumed run continues its curves.
        project: W&B's project.
        name: W&B's name for the run.
        mode: "online" or "offline"; None leaves it to WANDB_MODE, and to online where that is not set.
        config: the resolved config, shown beside the curves. Secrets must be gone from it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        project: str = "forge",
        name: str | None = None,
        mode: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        import wandb

        make_folder(folder / "wandb")
        self._teardown = wandb.teardown
        self._run = wandb.init(
            dir=str(folder),
            project=project,
            name=name or folder.name,
            id=_kept_id(folder / "wandb" / "run_id"),
            resume="allow",
            mode=mode or os.environ.get("WANDB_MODE", "online"),  # type: ignore[arg-type]  # W&B checks the word
            config=dict(config or {}),
            # The console is the run's own; W&B's copy of it would hold every refresh of the progress bar.
            settings=wandb.Settings(console="off", silent=True),
        )
        # W&B's own counter never goes back; with `step` as the axis, a resumed run may write a step again.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Values) -> None:
        self._run.log({**values, "step": step})

    def rewind(self, resume_step: int | None) -> None:
        """Nothing: with `step` as the axis, a step that is written again takes the place of the first."""

    def flush_to_disk(self) -> None:
        """Curves only: metrics.jsonl is the record."""

    def close(self) -> None:
        self._run.finish()
        self._teardown()  # its service process would otherwise live as long as this one


def _kept_id(path: Path) -> str:
    if not path.exists():
        path.write_text(uuid.uuid4().hex)
    return path.read_text().strip()


class Sinks:
    """Several sinks as one.

    Args:
        opened: each sink by the name that a warning calls it by, as a function that opens it.
        warn: told once for each sink that fails, on opening or later; by default the log.

    Raises:
        ConfigError: from opening a sink: the folder cannot be written to. That is the user's to mend before the start.

    Example:
        >>> sinks = Sinks({"metrics.jsonl": lambda: JsonlSink(run / "metrics.jsonl")})
        >>> sinks.write(1, {"loss": 0.5})
        >>> sinks.close()
    """

    def __init__(self, opened: Mapping[str, Callable[[], Sink]], *, warn: Callable[[str], None] | None = None) -> None:
        self._warn = warn or log.warning
        self._sinks: dict[str, Sink] = {}
        for name, open_sink in opened.items():
            sink = self._guard(name, open_sink)
            if sink is not None:
                self._sinks[name] = sink

    @property
    def names(self) -> Sequence[str]:
        """Those that work so far."""
        return tuple(self._sinks)

    def write(self, step: int, values: Values) -> None:
        """Hands one step's metrics to every sink."""
        for name, sink in list(self._sinks.items()):
            self._guard(name, partial(sink.write, step, values))

    def rewind(self, resume_step: int | None) -> None:
        """The run goes on from that step; what came after it is dropped."""
        for name, sink in list(self._sinks.items()):
            self._guard(name, partial(sink.rewind, resume_step))

    def flush_to_disk(self) -> None:
        """Before a checkpoint gets its name, so that what it continues is on disk too."""
        for name, sink in list(self._sinks.items()):
            self._guard(name, sink.flush_to_disk)

    def close(self) -> None:
        for name, sink in list(self._sinks.items()):
            self._guard(name, sink.close)
        self._sinks.clear()

    def _guard(self, name: str, act: Callable[[], T]) -> T | None:
        """The boundary where exceptions of sinks are caught: a full disk or a lost network costs its curves only."""
        try:
            return act()
        except ConfigError:
            raise
        except Exception as error:  # third-party code: wandb and tensorboard document no exceptions
            self._sinks.pop(name, None)
            self._warn(f"{name} is left out from here on: {type(error).__name__}: {error}")
            return None


def open_sinks(
    folder: Path,
    *,
    resume_step: int | None = None,
    tensorboard: bool = True,
    wandb: bool | str = False,
    wandb_project: str = "forge",
    config: Mapping[str, Any] | None = None,
    warn: Callable[[str], None] | None = None,
) -> Sinks:
    """The sinks of a run folder.

    Args:
        folder: the run folder: `metrics.jsonl`, `tensorboard/`, `wandb/` are made in it.
        resume_step: the step a resumed run continues from; None for a new run.
        tensorboard: whether to write event files.
        wandb: the config's `metrics.wandb`: False, True (as WANDB_MODE says, else online), "online" or "offline".
        wandb_project: W&B's project.
        config: the resolved config, for W&B.
        warn: where a failing sink is reported.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    make_folder(folder)
    wanted: dict[str, Callable[[], Sink]] = {
        "metrics.jsonl": lambda: JsonlSink(folder / "metrics.jsonl", resume_step=resume_step)
    }
    if tensorboard:
        wanted["TensorBoard"] = lambda: TensorBoardSink(folder / "tensorboard", resume_step=resume_step)
    if wandb:
        mode = wandb if isinstance(wandb, str) else None
        wanted["Weights & Biases"] = lambda: WandbSink(folder, project=wandb_project, mode=mode, config=config)
    return Sinks(wanted, warn=warn)
