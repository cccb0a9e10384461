"""environment.json, and what must never be in it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from forge.config.errors import ConfigError
from forge.observability.environment import describe_environment, git_state, write_environment
from forge.observability.redaction import HIDDEN, redact, redact_command, redact_text


def test_what_a_rerun_needs_is_there(run_folder: Path) -> None:
    environment = describe_environment(seed=7, dataset={"path": "reasoning_gym", "name": "chain_sum"}, argv=["main.py"])
    record = json.loads(write_environment(run_folder, environment).read_text())
    assert record["command"] == ["main.py"]
    assert record["seed"] == 7
    assert record["dataset"] == {"path": "reasoning_gym", "name": "chain_sum"}
    assert {"python", "forge", "torch", "torchmonarch", "torchtitan", "torchstore", "transformers"} <= {
        *record["versions"]
    }
    assert record["cpu"]["model"]
    assert record["cpu"]["cores"] >= 1
    assert record["memory_gib"] > 0
    assert isinstance(record["gpus"], list)
    assert set(record) >= {"git", "platform", "started", "working_folder"}


def test_no_environment_variable_is_written(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SETTING", "value-of-a-variable")
    write_environment(run_folder, describe_environment(seed=1))
    assert "value-of-a-variable" not in (run_folder / "environment.json").read_text()


def test_secrets_on_the_command_line_are_hidden(run_folder: Path) -> None:
    argv = ["main.py", "--wandb.api_key", "abc123", "hub.token=xyz789", "--model", "https://me:pw@host/m"]
    write_environment(run_folder, describe_environment(seed=1, argv=argv))
    text = (run_folder / "environment.json").read_text()
    assert not [secret for secret in ("abc123", "xyz789", "pw@", "me:pw") if secret in text]
    assert "https://<hidden>@host/m" in text


@pytest.mark.parametrize(
    "key",
    [
        "hf_" + "A" * 30,
        "sk-" + "a1" * 12,
        "sk-ant-api03-" + "b" * 20,
        "ghp_" + "c" * 36,
        "AKIA" + "A1B2" * 4,
        "xoxb-1234567890-abc",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.sig",
    ],
)
def test_a_known_kind_of_key_is_hidden_wherever_it_stands(key: str) -> None:
    assert redact({"note": f"use {key} please"}) == {"note": f"use {HIDDEN} please"}


def test_what_is_no_secret_stays() -> None:
    kept = {
        "max_new_tokens": 16,
        "tokenizer": "toy",
        "max_tokens_per_microbatch": 4096,
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "command": ["--grpo.max_new_tokens", "16", "--training.steps=5"],
    }
    assert redact(kept) == kept
    assert redact_command(kept["command"]) == kept["command"]  # type: ignore[arg-type]


def test_an_empty_secret_is_not_made_to_look_like_one() -> None:
    assert redact({"token": None, "api_key": ""}) == {"token": None, "api_key": ""}


def test_the_word_after_a_hidden_value_is_shown() -> None:
    assert redact_command(["--token", "--secret", "x"]) == ["--token", HIDDEN, "x"]


def test_an_address_without_a_password_is_left_alone() -> None:
    assert redact_text("https://host:8080/a@b") == "https://host:8080/a@b"


def test_a_resumed_run_keeps_what_the_earlier_ones_ran_on(run_folder: Path) -> None:
    for seed in (1, 2, 3):
        write_environment(run_folder, {"seed": seed})
    record = json.loads((run_folder / "environment.json").read_text())
    assert record == {"seed": 3, "earlier": [{"seed": 1}, {"seed": 2}]}


def test_a_torn_file_of_an_earlier_run_is_replaced(run_folder: Path) -> None:
    run_folder.mkdir(parents=True)
    (run_folder / "environment.json").write_text('{"seed":')
    write_environment(run_folder, {"seed": 2})
    assert json.loads((run_folder / "environment.json").read_text()) == {"seed": 2}


def test_a_folder_that_cannot_be_written_to_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output_dir"):
        write_environment(tmp_path / "file", {})


def test_git_says_commit_and_whether_tracked_files_differ(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    assert git_state(tmp_path) is None
    git("init", "-b", "main")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "first")
    clean = {"commit": git("rev-parse", "HEAD"), "branch": "main", "dirty": False}
    assert git_state(tmp_path) == clean
    (tmp_path / "untracked").write_text("")
    assert git_state(tmp_path) == clean
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == clean | {"dirty": True}
