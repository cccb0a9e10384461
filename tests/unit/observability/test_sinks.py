"""metrics.jsonl, TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from forge.config.errors import ConfigError
from forge.observability.sinks import JsonlSink, Sinks, TensorBoardSink, open_sinks


def lines(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON")) for line in path.open()]


def test_each_step_is_one_object_and_readable_at_once(run_folder: Path) -> None:
    sink = JsonlSink(run_folder / "metrics.jsonl")
    sink.write(1, {"step": 1.0, "loss": 0.5})
    assert lines(run_folder / "metrics.jsonl") == [{"step": 1, "loss": 0.5}]
    sink.write(2, {"loss": 0.25})
    assert lines(run_folder / "metrics.jsonl")[1] == {"step": 2, "loss": 0.25}


def test_nan_and_infinity_are_null(run_folder: Path) -> None:
    JsonlSink(run_folder / "metrics.jsonl").write(1, {"loss": math.nan, "kl/ref": math.inf})
    assert lines(run_folder / "metrics.jsonl") == [{"step": 1, "loss": None, "kl/ref": None}]


def test_a_resumed_run_drops_the_steps_that_it_does_again_and_a_torn_line(run_folder: Path) -> None:
    path = run_folder / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in (1, 2, 3):
        sink.write(step, {"loss": float(step)})
    sink.close()
    with path.open("a") as file:
        file.write('{"step": 2, "los')  # killed while writing
    JsonlSink(path, resume_step=2).write(3, {"loss": 30.0})
    assert [(r["step"], r["loss"]) for r in lines(path)] == [(1, 1), (2, 2), (3, 30)]
    assert [p.name for p in run_folder.iterdir()] == ["metrics.jsonl"]


def test_a_last_line_without_its_end_is_torn_even_if_it_parses(run_folder: Path) -> None:
    run_folder.mkdir(parents=True)
    path = run_folder / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    JsonlSink(path, resume_step=5).write(3, {})
    assert [r["step"] for r in lines(path)] == [1, 3]


def test_a_new_run_does_not_append_to_what_lies_there(run_folder: Path) -> None:
    JsonlSink(run_folder / "metrics.jsonl").write(1, {})
    JsonlSink(run_folder / "metrics.jsonl").write(7, {})
    assert [r["step"] for r in lines(run_folder / "metrics.jsonl")] == [7]


def test_a_folder_that_cannot_be_made_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"(?s)output_dir must be a folder that can be written, got .*file/run.*Fix"):
        open_sinks(tmp_path / "file" / "run", tensorboard=False)


class Broken:
    """A sink whose second write fails."""

    def __init__(self) -> None:
        self.writes = 0

    def write(self, step: int, values: object) -> None:
        self.writes += 1
        if self.writes == 2:
            raise OSError("no space left")

    def close(self) -> None: ...


def test_a_sink_that_fails_is_warned_about_once_and_the_others_go_on(run_folder: Path) -> None:
    warnings: list[str] = []
    broken = Broken()
    sinks = Sinks(
        {"broken": lambda: broken, "metrics.jsonl": lambda: JsonlSink(run_folder / "metrics.jsonl")},
        warn=warnings.append,
    )
    for step in (1, 2, 3, 4):
        sinks.write(step, {"loss": 0.0})
    sinks.close()
    assert warnings == ["broken is left out from here on: OSError: no space left"]
    assert broken.writes == 2
    assert [r["step"] for r in lines(run_folder / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_sink_that_cannot_be_opened_does_not_end_the_run() -> None:
    def missing() -> Broken:
        raise ImportError("No module named 'wandb'")

    warnings: list[str] = []
    sinks = Sinks({"Weights & Biases": missing}, warn=warnings.append)
    sinks.write(1, {})
    assert sinks.names == ()
    assert warnings == ["Weights & Biases is left out from here on: ImportError: No module named 'wandb'"]


def test_tensorboard_holds_the_values_under_the_same_names(run_folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(run_folder / "tensorboard")
    sink.write(1, {"step": 1.0, "reward/mean": 0.25, "loss": math.nan})
    sink.write(2, {"reward/mean": 0.5})
    sink.close()
    events = EventAccumulator(str(run_folder / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert events.Tags()["scalars"] == ["reward/mean"]


def test_a_resumed_tensorboard_run_has_one_value_a_step(run_folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardSink(run_folder)
    for step in (1, 2, 3):
        first.write(step, {"loss": 1.0})
    first.close()
    second = TensorBoardSink(run_folder, resume_step=1)
    second.write(2, {"loss": 2.0})
    second.close()
    events = EventAccumulator(str(run_folder))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 2.0)]


def test_a_new_run_shows_nothing_of_one_that_died_before_its_first_checkpoint(run_folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for value in (1.0, 2.0):
        sink = TensorBoardSink(run_folder)
        sink.write(0, {"eval/reward": value})
        sink.close()
    events = EventAccumulator(str(run_folder))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("eval/reward")] == [(0, 2.0)]
