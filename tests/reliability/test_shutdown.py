"""Signals at awkward moments, and a second start with another config. Nothing is left behind."""

from __future__ import annotations

import signal
import time

import pytest

from tests.reliability.runs import lines, starting

pytestmark = pytest.mark.timeout(600)
ENDLESS = ("--training.steps", "100000", "--eval.samples", "0")


@pytest.fixture
def start():
    with starting() as start_one:
        yield start_one


def test_a_signal_while_everything_starts_ends_it_without_a_traceback(start, tmp_path):
    app = start(tmp_path / "run", *ENDLESS)
    app.child("generator/0")
    assert app.stop(signal.SIGINT) == 130
    assert "Traceback" not in app.output


def test_a_second_signal_ends_it_at_once_and_another_config_is_looked_at_on_resume(start, tmp_path):
    folder = tmp_path / "run"
    app = start(folder, *ENDLESS, "--checkpoint.interval", "2")
    app.until_step(3)
    began = time.monotonic()
    assert app.stop(signal.SIGTERM, signal.SIGTERM) == 143  # half a second apart
    assert time.monotonic() - began < 5

    refused = start(folder, "--training.steps", "4", "--training.seed", "7")
    assert refused.process.wait(60) == 2
    assert "training.seed must stay 42" in refused.output
    assert "Traceback" not in refused.output

    changed = start(folder, "--training.steps", str(len(lines(folder / "metrics.jsonl")) + 1), "--eval.samples", "0")
    changed.until(lambda: (folder / "config.yaml").exists() and list(folder.glob("config.until-step-*.yaml")))
    changed.kill()
