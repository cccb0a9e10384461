"""Weights & Biases without a network: its service is a process of its own, so this is no unit test."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.observability.sinks import open_sinks


def test_weights_and_biases_works_offline_and_a_resumed_run_keeps_its_id(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")  # the config's word counts
    for resume_step in (None, 1):
        warnings: list[str] = []
        sinks = open_sinks(
            run_folder,
            resume_step=resume_step,
            tensorboard=False,
            wandb="offline",
            config={"seed": 1},
            warn=warnings.append,
        )
        assert sinks.names == ("metrics.jsonl", "Weights & Biases")
        sinks.write(1, {"loss": 0.5})
        sinks.close()
        assert warnings == []
    files = sorted((run_folder / "wandb").glob("offline-run-*/run-*.wandb"))
    kept = (run_folder / "wandb" / "run_id").read_text()
    assert files
    assert {f.stem for f in files} == {f"run-{kept}"}
