"""What a person watches: a live display on a terminal, one plain line a step elsewhere, the same numbers in both."""

from __future__ import annotations

import math
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import Group as Stack
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Values = Mapping[str, float]

# Label and digits; a metric that a run does not have is left out. Each label stands for one name of the catalogue.
_SHOWN: dict[str, tuple[str, str]] = {
    "reward/mean": ("reward", ".3f"),
    "loss": ("loss", ".4g"),
    "kl/ref": ("kl", ".2g"),
    "entropy": ("entropy", ".3f"),
    "policy/staleness": ("staleness", ".2f"),
    "completion/mean_len": ("length", ".1f"),
    "throughput/train_tokens_per_s": ("train tok/s", ",.0f"),
    "throughput/generate_tokens_per_s": ("generate tok/s", ",.0f"),
    "throughput/mfu": ("mfu", ".0%"),
    "time/trainer_idle": ("trainer idle", ".0%"),
    "time/generator_idle": ("generator idle", ".0%"),
    "time/step": ("s/step", ".1f"),
}
_SUMMARY_ORDER = ("eval/accuracy", "eval/reward", "eval/loss")
_PACE_STEPS = 10  # steps whose mean time the remaining time is estimated from


class Console:
    """Shows one run's progress.

    Args:
        steps: how many optimizer steps the run has in all.
        start_step: how many were done before, in a resumed run.
        stream: where to write; standard output by default.
        live: True draws on the terminal, False prints lines; None decides by whether `stream` is a terminal. Without
            Unicode there are lines only.
        enabled: False shows warnings and the summary only (`metrics.console: false`).

    Example, not on a terminal:
        >>> with Console(steps=20) as console:
        ...     console.phase("starting the generator")
        ...     console.step(1, {"reward/mean": 0.25, "entropy": 0.7, "time/step": 4.0})
        ...     console.summary({"eval/accuracy": 0.17}, {"eval/accuracy": 0.55})
        [0:00] starting the generator ...
        step  1/20  reward 0.250  entropy 0.700  s/step 4.0  left 1:16
        held-out accuracy  0.170 -> 0.550  (+0.380)
    """

    def __init__(
        self,
        *,
        steps: int,
        start_step: int = 0,
        stream: TextIO | None = None,
        live: bool | None = None,
        enabled: bool = True,
    ) -> None:
        out = stream or sys.stdout
        self._encoding = out.encoding or "utf-8"
        is_terminal = out.isatty() if live is None else live
        is_terminal = is_terminal and self._encoding.lower().startswith("utf")  # rich draws with what ASCII has not
        # Without a terminal rich would wrap lines at 80 columns and, told so by the environment, still write colours.
        self._rich = RichConsole(file=out, force_terminal=is_terminal, no_color=None if is_terminal else True)
        self._out = out
        self._steps = steps
        self._done = start_step
        self._enabled = enabled
        self._began = time.monotonic()
        self._paces: deque[float] = deque(maxlen=_PACE_STEPS)
        self._last_step_at: float | None = None
        self._phase: tuple[str, float] | None = None
        self._values: dict[str, float] = {}
        self._live: Live | None = None
        if is_terminal and enabled:
            self._live = Live(get_renderable=self._render, console=self._rich, refresh_per_second=4, transient=False)

    def __enter__(self) -> Console:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the terminal as it was; may be called twice."""
        self._end_phase()
        if self._live:
            self._live.stop()
            self._live = None

    def phase(self, text: str) -> None:
        """Says what is going on now; it is over when the next phase or step comes."""
        self._end_phase()
        now = time.monotonic()
        self._phase = (printable(text, encoding=self._encoding), now)
        if not self._live:
            self._line(f"[{duration(now - self._began)}] {text} ...", routine=True)

    @contextmanager
    def during(self, text: str) -> Iterator[None]:
        """A phase that lasts as long as the block."""
        self.phase(text)
        try:
            yield
        finally:
            self._end_phase()

    def step(self, step: int, values: Values) -> None:
        """Shows one finished step."""
        self._end_phase()
        now = time.monotonic()
        self._paces.append(values.get("time/step") or now - (self._last_step_at or self._began))
        self._last_step_at = now
        self._done = step
        self._values = dict(values)
        if not self._live:
            width = len(str(self._steps))
            parts = [f"step {step:>{width}}/{self._steps}", *(f"{k} {v}" for k, v in shown(values))]
            self._line("  ".join([*parts, f"left {self._time_left()}"]), routine=True)

    def evaluation(self, step: int, values: Values) -> None:
        """Shows held-out results, such as `{"eval/reward": 0.5, "eval/accuracy": 0.4}`."""
        self._end_phase()
        parts = [f"{_plain_name(name)} {number(value)}" for name, value in _ordered(values)]
        self._line(f"held-out after step {step}:  " + "  ".join(parts), routine=True)

    def note(self, text: str) -> None:
        """One line that is no warning."""
        self._line(text, routine=True)

    def warn(self, text: str) -> None:
        """One line that is shown even when the console is off."""
        self._line(f"warning: {text}", style="yellow")

    def summary(self, before: Values, after: Values, *, notes: Mapping[str, str] | None = None) -> None:
        """The end of the run: held-out measures before and after, and whatever else is worth a line.

        Args:
            before: held-out measures before training; names that `after` has too are compared.
            after: the same after it.
            notes: such as `{"checkpoint": "runs/a/checkpoints/step-20"}`.
        """
        self.close()
        names = [name for name, _ in _ordered(after) if name in _SUMMARY_ORDER]
        width = max((len(_plain_name(name)) for name in names), default=0)
        for name in names:
            label = f"held-out {_plain_name(name):<{width}}"
            if name in before:
                change = after[name] - before[name]
                self._line(f"{label}  {number(before[name])} -> {number(after[name])}  ({change:+.3f})", style="bold")
            else:
                self._line(f"{label}  {number(after[name])}", style="bold")
        for label, text in (notes or {}).items():
            self._line(f"{label}: {text}")

    def _end_phase(self) -> None:
        if self._phase is None:
            return
        text, since = self._phase
        self._phase = None
        if self._live:
            self._line(f"{text}: {duration(time.monotonic() - since)}", style="dim")

    def _line(self, text: str, *, style: str = "", routine: bool = False) -> None:
        if routine and not self._enabled:
            return
        text = printable(text, encoding=self._encoding)
        if self._rich.is_terminal:
            self._rich.print(Text(text, style=style))
        else:
            print(text, file=self._out, flush=True)

    def _time_left(self) -> str:
        if not self._paces:
            return "?"
        return duration(sum(self._paces) / len(self._paces) * max(self._steps - self._done, 0))

    def _render(self) -> Stack:
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"step {self._done}/{self._steps}", style="bold"),
            ProgressBar(total=max(self._steps, 1), completed=self._done, width=30),
            f"{duration(time.monotonic() - self._began)} gone, {self._time_left()} left",
        )
        rows: list[Table | Text] = [head]
        pairs = shown(self._values)
        if pairs:
            grid = Table.grid(padding=(0, 2))
            half = math.ceil(len(pairs) / 2)
            for part in (pairs[:half], pairs[half:]):
                cells: list[Text] = [cell for k, v in part for cell in (Text(k, style="dim"), Text(v))]
                grid.add_row(*cells)
            rows.append(grid)
        if self._phase is not None:
            text, since = self._phase
            rows.append(Text(f"{text} ... {duration(time.monotonic() - since)}", style="cyan"))
        return Stack(*rows)


def printable(text: str, *, encoding: str) -> str:
    r"""The text without what a terminal would obey, and without what the encoding has no bytes for: a warning may quote
    what a model said.

    >>> printable("\x1b[31mred", encoding="utf-8")
    '\\x1b[31mred'
    """
    text = _CONTROL.sub(lambda match: repr(match.group())[1:-1], text)
    return text.encode(encoding, "backslashreplace").decode(encoding)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def shown(values: Values) -> list[tuple[str, str]]:
    """The numbers that both displays show, as label and text.

    >>> shown({"reward/mean": 0.5, "kl/ref": 0.00123, "grad_norm": 2.0})
    [('reward', '0.500'), ('kl', '0.0012')]
    """
    return [(label, format(values[name], digits)) for name, (label, digits) in _SHOWN.items() if name in values]


def duration(seconds: float) -> str:
    """
    >>> duration(4), duration(76), duration(3725)
    ('0:04', '1:16', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float) -> str:
    """Counts without a fraction, everything else with three digits.

    >>> number(64.0), number(0.5)
    ('64', '0.500')
    """
    return f"{value:.0f}" if value.is_integer() and abs(value) >= 2 else f"{value:.3f}"


def _plain_name(name: str) -> str:
    return name.removeprefix("eval/")


def _ordered(values: Values) -> list[tuple[str, float]]:
    held_out = [(name, float(value)) for name, value in values.items() if name.startswith("eval/")]
    return sorted(held_out, key=lambda pair: _SUMMARY_ORDER.index(pair[0]) if pair[0] in _SUMMARY_ORDER else 9)
