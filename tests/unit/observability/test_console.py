"""What is printed where there is no terminal, and what is drawn where there is one."""

from __future__ import annotations

import io
import re

import pytest

from forge.observability.console import Console, duration

STEP = {
    "reward/mean": 0.25,
    "loss": -0.0123,
    "kl/ref": 0.0012,
    "entropy": 0.7,
    "policy/staleness": 0.5,
    "throughput/train_tokens_per_s": 1234.0,
    "throughput/generate_tokens_per_s": 371.4,
    "time/step": 4.0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_a_step_is_one_line_with_every_number() -> None:
    out = io.StringIO()
    Console(steps=20, stream=out).step(1, STEP)
    assert out.getvalue() == (
        "step  1/20  reward 0.250  loss -0.0123  kl 0.0012  entropy 0.700  staleness 0.50  "
        "train tok/s 1,234  generate tok/s 371  s/step 4.0  left 1:16\n"
    )


def test_without_a_terminal_nothing_is_coloured_even_if_colours_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    out = io.StringIO()
    with Console(steps=2, stream=out) as console:
        console.phase("starting the generator")
        console.step(1, STEP)
        console.warn("entropy has collapsed")
        console.summary({"eval/accuracy": 0.17}, {"eval/accuracy": 0.55})
    assert "\x1b" not in out.getvalue()
    assert len(out.getvalue().splitlines()) == 4


def test_a_terminal_shows_the_same_numbers_as_a_pipe() -> None:
    terminal = Terminal()
    with Console(steps=20, stream=terminal) as console:
        console.step(1, STEP)
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    for shown in ("1/20", "0.250", "-0.0123", "0.0012", "0.700", "0.50", "1,234", "371", "4.0", "1:16 left"):
        assert shown in drawn
    assert "\x1b" in terminal.getvalue()


def test_the_cursor_is_given_back_when_the_run_fails() -> None:
    terminal = Terminal()
    with pytest.raises(RuntimeError), Console(steps=2, stream=terminal):
        raise RuntimeError
    assert terminal.getvalue().rfind("\x1b[?25h") > terminal.getvalue().rfind("\x1b[?25l")


def test_a_phase_is_seen_when_it_begins() -> None:
    out = io.StringIO()
    Console(steps=1, stream=out).phase("starting the generator")
    assert out.getvalue() == "[0:00] starting the generator ...\n"


def test_a_phase_is_drawn_on_the_terminal() -> None:
    terminal = Terminal()
    with Console(steps=1, stream=terminal) as console, console.during("starting the generator"):
        pass
    assert "starting the generator" in terminal.getvalue()


def test_time_left_counts_the_steps_that_are_left_at_the_recent_pace() -> None:
    out = io.StringIO()
    console = Console(steps=12, start_step=4, stream=out)
    console.step(5, {"time/step": 10.0})
    console.step(6, {"time/step": 20.0})
    # 6 steps left at (10 + 20) / 2 seconds
    assert out.getvalue().splitlines()[-1].endswith("left 1:30")


def test_the_summary_compares_what_was_measured_before_and_after() -> None:
    out = io.StringIO()
    Console(steps=1, stream=out).summary(
        {"eval/accuracy": 0.17, "eval/reward": 0.2},
        {"eval/reward": 0.6, "eval/accuracy": 0.55, "eval/samples": 64.0, "loss": 1.0},
        notes={"checkpoint": "runs/a/checkpoints/step-20"},
    )
    assert out.getvalue().splitlines() == [
        "held-out accuracy  0.170 -> 0.550  (+0.380)",
        "held-out reward    0.200 -> 0.600  (+0.400)",
        "checkpoint: runs/a/checkpoints/step-20",
    ]


def test_a_console_that_is_off_still_warns_and_sums_up() -> None:
    out = io.StringIO()
    console = Console(steps=1, stream=out, enabled=False)
    console.phase("starting")
    console.step(1, STEP)
    console.note("hello")
    console.evaluation(1, {"eval/reward": 1.0})
    assert out.getvalue() == ""
    console.warn("careful")
    console.summary({}, {"eval/reward": 0.5})
    assert out.getvalue() == "warning: careful\nheld-out reward  0.500\n"


def test_text_from_a_model_is_not_read_as_markup() -> None:
    terminal = Terminal()
    with Console(steps=1, stream=terminal) as console:
        console.note("[bold]x[/bold] [/nonsense]")
    assert "[bold]x[/bold] [/nonsense]" in terminal.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3725, "1:02:05")])
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text
