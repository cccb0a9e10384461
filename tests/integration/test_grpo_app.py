"""The main job on the whole real stack, with a tiny model: Monarch processes, vLLM, TorchTitan, TorchStore."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import forge
from apps.grpo.main import check, train
from forge.app import launch
from forge.config import GRPOConfig, load_config
from forge.provisioner import Provisioner, available_gpus

ROOT = Path(__file__).parents[2]
TOY = ["--config", "apps/grpo/toy.yaml"]
COMMAND = [sys.executable, "-m", "apps.grpo.main", *TOY]


def grpo(*overrides: str, timeout: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=timeout, env={**os.environ, **env}
    )


@pytest.fixture
def in_process(monkeypatch, capsys):
    """The program in this process, for what must end before any actor is started: (exit status, stdout, stderr)."""

    def run(*overrides: str) -> tuple[int, str, str]:
        def refuse(self):
            pytest.fail("an actor was about to be started")

        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(Provisioner, "__aenter__", refuse)
        monkeypatch.setattr(sys, "argv", ["main.py", *TOY, *overrides])
        try:
            status = launch("grpo", GRPOConfig, train, check)
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(folder: Path) -> list[dict]:
    return [m for m in lines(folder / "metrics.jsonl") if "loss" in m]


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory):
    """The smoke run as users are told to start it."""
    folder = tmp_path_factory.mktemp("run") / "toy"
    started = time.monotonic()
    result = grpo("--output_dir", str(folder))
    assert result.returncode == 0, result.stderr[-3000:]
    return folder, result.stdout, time.monotonic() - started


def test_the_toy_task_is_learned_in_under_three_minutes(toy_run):
    folder, _, seconds = toy_run
    steps = steps_of(folder)
    assert [m["step"] for m in steps] == list(range(1, len(steps) + 1))
    assert steps[0]["reward/mean"] < 0.3
    assert sum(m["reward/mean"] for m in steps[-5:]) / 5 > 0.9
    assert seconds < 180


def test_the_end_of_the_run_says_before_and_after(toy_run):
    folder, out, _ = toy_run
    evaluations = [m for m in lines(folder / "metrics.jsonl") if "eval/reward" in m]
    before, after = evaluations[0]["eval/reward"], evaluations[-1]["eval/reward"]
    assert before < 0.3
    assert after > 0.9
    assert f"held-out reward    {before:.3f} -> {after:.3f}" in out


def test_generation_goes_on_while_the_trainer_trains(toy_run):
    steps = steps_of(toy_run[0])
    assert sum(m["time/generate_while_training"] for m in steps) > 0.1 * sum(m["time/train"] for m in steps)


def test_staleness_stays_within_the_bound(toy_run):
    steps = steps_of(toy_run[0])
    assert max(m["policy/staleness_max"] for m in steps) == 1
    rollouts = [r for r in lines(toy_run[0] / "rollouts.jsonl") if r["kind"] == "train"]
    assert all(0 <= r["step"] - 1 - r["version"] <= 1 for r in rollouts)


def test_no_group_is_trained_twice(toy_run):
    rollouts = [r for r in lines(toy_run[0] / "rollouts.jsonl") if r["kind"] == "train"]
    of_group = {}
    for r in rollouts:
        of_group.setdefault(r["group"], set()).add(r["step"])
    assert all(len(steps) == 1 for steps in of_group.values())


def test_the_run_folder_holds_what_the_contract_lists(toy_run):
    folder = toy_run[0]
    last = max((folder / "checkpoints").iterdir(), key=lambda p: int(p.name.removeprefix("step-")))
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "rollouts.jsonl"):
        assert (folder / name).stat().st_size > 0
    assert list((folder / "logs").iterdir())
    names = {name for m in lines(folder / "metrics.jsonl") for name in m}
    assert {
        "step", "loss", "reward/mean", "reward/std", "reward/toy_reward", "kl/ref", "entropy", "ratio/mean",
        "ratio/clipped_frac", "grad_norm", "lr", "completion/mean_len", "completion/truncated_frac", "policy/staleness",
        "mismatch/logprob_diff", "throughput/episodes_per_s", "throughput/train_tokens_per_s",
        "throughput/generate_tokens_per_s", "time/step", "time/wait_rollouts", "time/train", "time/push_weights",
        "time/pull_weights", "eval/reward", "eval/accuracy",
    } <= names  # fmt: skip
    assert {  # what is logged about any loss
        "ratio/max", "ratio/clipped_low_frac", "ratio/clipped_high_frac", "kl/ref_k1", "tokens/dropped",
        "correction/weight_mean", "correction/weight_max", "correction/capped_frac",
    } <= names  # fmt: skip
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(last / "hf")
    tokenizer = AutoTokenizer.from_pretrained(last / "hf")
    assert model.config.vocab_size >= len(tokenizer)


def test_the_environment_says_what_a_rerun_needs(toy_run):
    record = json.loads((toy_run[0] / "environment.json").read_text())
    assert record["command"][-4:] == [*TOY, "--output_dir", str(toy_run[0])]
    assert record["seed"] == load_config(GRPOConfig, toy_run[0] / "config.yaml").training.seed
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert (record["git"] or {}).get("commit", "") == head.stdout.strip()  # nothing where the project is no repository
    for package in ("torch", "torchmonarch", "torchtitan", "torchstore", "transformers"):
        assert record["versions"][package] == version(package)
    assert record["versions"]["forge"] == forge.__version__
    assert record["cpu"]["cores"] == len(os.sched_getaffinity(0))
    assert record["cpu"]["model"]
    assert record["memory_gib"] == pytest.approx(psutil.virtual_memory().total / 2**30, rel=0.01)
    assert len(record["gpus"]) == len(available_gpus())
    assert record["dataset"]["path"] == "toy"


def test_tensorboard_holds_every_number_of_metrics_jsonl_and_no_other(toy_run):
    expected = {}
    for metrics in lines(toy_run[0] / "metrics.jsonl"):
        for name in metrics.keys() - {"step"}:
            expected.setdefault(name, {})[metrics["step"]] = metrics[name]
    events = EventAccumulator(str(toy_run[0] / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert {*events.Tags()["scalars"]} == expected.keys()
    for name, by_step in expected.items():
        assert {e.step: e.value for e in events.Scalars(name)} == pytest.approx(by_step, rel=1e-6), name


def on_terminal(*arguments: str) -> tuple[int, bytes]:
    """The program under a pseudo-terminal: its exit status, and what it drew."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.environ |= {"TERM": "xterm", "TORCHSTORE_USE_RDMA": "1"}
        os.execv(COMMAND[0], [*COMMAND, *arguments])
    shown = b""
    try:
        while block := os.read(terminal, 65536):
            shown += block
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(terminal)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), shown


@pytest.fixture(scope="module")
def on_policy_run(tmp_path_factory):
    """Four strictly on-policy steps with two generators and a reference model, on a terminal, RDMA asked for."""
    folder = tmp_path_factory.mktemp("on_policy") / "run"
    status, shown = on_terminal(
        "--output_dir", str(folder), "--training.max_staleness", "0", "--training.steps", "4", "--eval.samples", "0",
        "--generator.num_replicas", "2", "--grpo.beta", "0.1", "--ref_model.with_gpus", "false",
    )  # fmt: skip
    assert status == 0, shown[-3000:].decode()
    return folder, shown


def test_rdma_that_is_not_there_is_told_once_and_the_weights_come_all_the_same(on_policy_run):
    assert on_policy_run[1].count(b"this machine has no RDMA device") == 1


def test_on_policy_means_staleness_zero_and_engines_that_agree(on_policy_run):
    steps = steps_of(on_policy_run[0])
    assert [m["policy/staleness_max"] for m in steps] == [0, 0, 0, 0]
    # Fails if a generator misses an update: at this learning rate one step moves log-probabilities by 0.05 and more.
    assert max(m["mismatch/logprob_diff"] for m in steps) < 1e-4


def test_a_reference_model_is_asked_when_beta_is_set(on_policy_run):
    kl = [m["kl/ref"] for m in steps_of(on_policy_run[0])]
    assert abs(kl[0]) < 1e-6 < kl[2]  # nothing has been learned before the first step


def test_on_a_terminal_the_numbers_are_drawn(on_policy_run):
    assert b"reward" in on_policy_run[1]
    assert b"step 4/4" in on_policy_run[1]


INTERRUPTED = ["--eval.samples", "8", "--eval.interval", "20", "--checkpoint.interval", "15"]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A long run after Ctrl-C: its folder, exit status and output, and its process group."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    process = subprocess.Popen(
        [*COMMAND, "--output_dir", str(folder), "--training.steps", "100000", *INTERRUPTED],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 180
    while (time.monotonic() < deadline and not (folder / "metrics.jsonl").exists()) or len(steps_of(folder)) < 25:
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the children get it too
    out, _ = process.communicate(timeout=60)
    return folder, process.returncode, out, process.pid


def test_interrupted_it_writes_a_checkpoint_and_leaves_nothing_behind(interrupted):
    folder, status, out, group = interrupted
    assert status == 130, out[-3000:]
    assert "Traceback" not in out
    assert (folder / "checkpoints" / f"step-{steps_of(folder)[-1]['step']}").is_dir()
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def test_the_same_command_again_resumes(interrupted, in_process):
    folder = interrupted[0]
    done = steps_of(folder)[-1]["step"]
    common = ["--output_dir", str(folder), *INTERRUPTED]
    again = grpo(*common, "--training.steps", str(done + 2))
    assert again.returncode == 0, again.stderr[-3000:]
    assert f"resuming after step {done}" in again.stdout
    assert [m["step"] for m in steps_of(folder)] == list(range(1, done + 3))
    rewards = [m["reward/mean"] for m in steps_of(folder)]
    assert rewards[done] > 0.5 * rewards[done - 1] > 0.15  # what was learned is still there: the start was 0.08
    evaluated = [m["step"] for m in lines(folder / "metrics.jsonl") if "eval/reward" in m]
    assert evaluated == sorted({0, 20, done + 2})
    rollouts = [r for r in lines(folder / "rollouts.jsonl") if r["kind"] == "train"]
    groups = len({r["group"] for r in rollouts})
    assert groups == len({(r["group"], r["step"]) for r in rollouts}) == (done + 2) * 8
    status, _, err = in_process(*common, "--checkpoint.resume", "never")
    assert status == 2
    assert "holds a run" in err


class WantsValues(nn.Module):
    """A loss that asks for what the trainer does not have."""

    def forward(self, logprobs, values):
        return logprobs.sum()


def raises(prompt: str, response: str, target: str) -> float:
    raise KeyError("the reward's own mistake")


def test_a_reward_that_always_fails_ends_the_run_with_the_first_failure(tmp_path):
    result = grpo(
        "--output_dir", str(tmp_path / "run"), "--rewards", "[tests.integration.test_grpo_app.raises]",
        "--eval.samples", "0",
    )  # fmt: skip
    assert result.returncode == 1
    assert "grpo.max_error_fraction" in result.stderr
    assert "the reward's own mistake" in result.stderr


def test_a_dry_run_checks_and_starts_nothing(tmp_path, in_process):
    status, out, err = in_process("--output_dir", str(tmp_path / "run"), "--dry_run")
    assert (status, err) == (0, "")
    assert "8 prompts × 8 samples" in out
    assert not (tmp_path / "run").exists()
    status, _, err = in_process("--dry_run", "--dataset.path", "/nowhere/data.jsonl")
    assert status == 2
    assert "/nowhere/data.jsonl" in err


def test_the_custom_reward_and_loss_learn_their_task(tmp_path):
    """apps/custom: what a user copies. The reward rises from chance, a tenth of all letters, to nearly 1."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "apps.custom.main", "--output_dir", str(folder), "--eval.samples", "0"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-3000:]
    rewards = [m["reward/Vowels"] for m in steps_of(folder)]
    assert rewards[0] < 0.2
    assert sum(rewards[-5:]) / 5 > 0.8


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--model", "/nowhere/model"], "/nowhere/model"),
        (["--dataset.path", "/nowhere/data.jsonl"], "/nowhere/data.jsonl"),
        (["--rewards", "[forge.data.rewards.MathRewart]"], "MathReward"),
        (["--loss", "dapoo"], "dapo"),
        (["--trainer.with_gpus", "true"], "Insufficient GPU resources"),
        (["--training.seq_len", "8"], "seq_len"),
        (["--training.seq_len", "100000"], "max_position_embeddings"),
        (["--loss", "tests.integration.test_grpo_app.WantsValues"], "values"),
        (["--dataset.path", "{tmp}/empty.jsonl"], "empty.jsonl"),
        (["--dataset.path", "{tmp}/columns.jsonl"], "question"),
        (["--dataset.path", "{tmp}/torn.jsonl"], "line 2"),
        (["--model", "{tmp}/gpt2"], "GPT2LMHeadModel"),
        (
            ["--parallelism.pipeline_parallel_degree", "4", "--trainer.procs", "4"],
            "at most 2, the model's number of layers",
        ),
        (["--launcher", "slurm"], "launcher"),
        (["--output_dir", "/proc/run"], "/proc/run"),
    ],
)
def test_wrong_input_ends_with_status_2_before_anything_starts(tmp_path, in_process, overrides, message):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "columns.jsonl").write_text('{"a": 1, "b": 2}\n')
    (tmp_path / "torn.jsonl").write_text('{"question": "1", "answer": "1"}\n{"question": \n')
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}')
    overrides = [o.replace("{tmp}", str(tmp_path)) for o in overrides]
    status, _, err = in_process("--output_dir", str(tmp_path / "run"), *overrides)
    assert status == 2
    assert message in err
    assert "Traceback" not in err


def test_the_program_passes_the_status_and_the_message_on(tmp_path):
    result = grpo("--output_dir", str(tmp_path / "run"), "--dataset.path", "/nowhere/data.jsonl")
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert "/nowhere/data.jsonl" in result.stderr
    assert "Traceback" not in result.stderr
