"""Fine-tuning on the whole real stack, with a tiny model: what it learns, writes and refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forge.observability.catalogue import CATALOGUE

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "apps.sft.main", "--config", "apps/sft/toy.yaml"]


def sft(*overrides: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(folder: Path) -> list[dict]:
    return [m for m in lines(folder / "metrics.jsonl") if "loss" in m]


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory):
    """The smoke run as users are told to start it."""
    folder = tmp_path_factory.mktemp("run") / "toy"
    result = sft("--output_dir", str(folder))
    assert result.returncode == 0, result.stderr[-3000:]
    return folder, result.stdout


def test_the_toy_answers_are_learned_and_the_held_out_loss_falls(toy_run):
    folder, out = toy_run
    steps = steps_of(folder)
    assert [m["step"] for m in steps] == list(range(1, 61))
    assert steps[0]["loss"] > 5
    assert steps[-1]["loss"] < 0.1
    evaluations = [m for m in lines(folder / "metrics.jsonl") if "eval/loss" in m]
    assert [m["step"] for m in evaluations] == [0, 20, 40, 60]
    assert evaluations[-1]["eval/loss"] < 0.1 < 5 < evaluations[0]["eval/loss"]
    assert evaluations[-1]["eval/token_accuracy"] > 0.95
    assert "held-out loss" in out


def test_the_prompts_are_answered_by_the_generator_under_the_new_weights(toy_run):
    folder, out = toy_run
    said = lines(folder / "rollouts.jsonl")
    assert [(r["step"], r["kind"]) for r in said] == [(s, "eval") for s in (0, 20, 40, 60) for _ in range(2)]
    assert [r["response"] for r in said[-2:]] == ["abcd", "ABCD"]
    assert [r["response"] for r in said[:2]] != ["abcd", "ABCD"]
    assert "'LETTERS 8' -> 'ABCD'" in out


def test_the_run_folder_holds_what_the_contract_lists(toy_run):
    folder, _ = toy_run
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "rollouts.jsonl"):
        assert (folder / name).stat().st_size > 0
    names = {name for m in lines(folder / "metrics.jsonl") for name in m}
    assert {
        "step", "loss", "entropy", "grad_norm", "lr", "throughput/train_tokens_per_s", "throughput/documents_per_s",
        "time/step", "time/train", "time/wait_data", "tokens/trained", "data/epoch", "eval/loss", "eval/perplexity",
        "eval/token_accuracy",
    } <= names  # fmt: skip
    patterns = {name.split("<")[0] for name in CATALOGUE}
    assert all(any(name.startswith(p) for p in patterns) for name in names)
    assert not any(name.startswith(("ratio/", "reward/", "kl/")) for name in names)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    best = folder / "checkpoints" / "best" / "hf"
    tokenizer, model = AutoTokenizer.from_pretrained(best), AutoModelForCausalLM.from_pretrained(best)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "LETTERS 8"}], tokenize=False, add_generation_prompt=True
    )
    answer = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(answer[0]).endswith("ABCD<|im_end|>")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--dataset.path", "/nowhere/data.jsonl"], "/nowhere/data.jsonl"),
        (["--dataset.path", "{tmp}/torn.jsonl"], "line 2"),
        (["--dataset.path", "{tmp}/empty.jsonl"], "empty.jsonl"),
        (["--dataset.path", "{tmp}/role.jsonl"], "narrator"),
        (["--training.seq_len", "12", "--eval.max_new_tokens", "2"], "seq_len"),
        (["--eval.prompts", "[{long}]"], "eval.prompts.0 has"),
        (["--trainer.with_gpus", "true"], "Insufficient GPU resources"),
        (["--model", "/nowhere/model"], "/nowhere/model"),
    ],
)
def test_wrong_input_ends_with_status_2_before_anything_starts(tmp_path, capfd, monkeypatch, overrides, message):
    from apps.sft.main import check, train
    from forge.app import launch
    from forge.config import SFTConfig
    from forge.provisioner import Provisioner

    def refuse(self):
        pytest.fail("an actor was about to be started")

    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "torn.jsonl").write_text('{"prompt": "1", "completion": "1"}\n{"prompt": \n')
    (tmp_path / "role.jsonl").write_text('{"messages": [{"role": "narrator", "content": "x"}]}\n')
    overrides = [o.replace("{tmp}", str(tmp_path)).replace("{long}", "a " * 40) for o in overrides]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(Provisioner, "__aenter__", refuse)
    monkeypatch.setattr(sys, "argv", [*COMMAND[2:], *overrides, "--output_dir", str(tmp_path / "run")])
    assert launch("sft", SFTConfig, train, check) == 2
    told = capfd.readouterr().err
    assert message in told
    assert "Traceback" not in told
