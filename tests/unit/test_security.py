"""The promises of docs/reliability.md about security: what the code may not contain, and hostile input that is tried.

Sockets are looked at where real processes run: reliability/test_fail_fast.py and integration/test_service.py.
"""

from __future__ import annotations

import ast
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from forge.actors.trainer_state import BackgroundWriter, load_random_state, read_state
from forge.app import Run
from forge.checkpoint import Checkpoints, load_state
from forge.config import GRPOConfig, load_config
from forge.data.chat import ChatFormat
from forge.data.math_judge import MathJudge
from forge.data.rewards import MathReward
from forge.models.hf_folder import ModelNotFound, WeightFiles
from forge.observability.redaction import redact_text
from forge.parts import read_model
from forge.testing.tiny_model import make_byte_tokenizer, make_tiny_model
from forge.types import UserError

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [path for folder in ("src", "apps") for path in sorted((ROOT / folder).rglob("*.py"))]
UNPICKLES = {"wire.py"}  # messages between the run's own processes

# --- what the code may not contain


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call with the dotted name of what is called: ("torch.load", ...)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


def is_constant(value: ast.expr | None, expected: object) -> bool:
    return isinstance(value, ast.Constant) and value.value is expected


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{name.name}" for name in node.names)


def unpickling(tree: ast.AST) -> list[str]:
    """Whatever may run code that stands in a file: pickles in their many forms, and YAML's tags."""
    modules = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "pandas"}
    found = [name for name in imported(tree) if name.partition(".")[0] in modules]
    for name, call in calls(tree):
        last = name.rpartition(".")[2]
        if name == "torch.load" and not is_constant(keyword(call, "weights_only"), True):
            found.append(name)
        if last == "load" and keyword(call, "allow_pickle") is not None:
            found.append(name)
        if name.startswith("yaml.") and last in ("load", "load_all", "unsafe_load", "full_load"):
            found.append(name)
    return found


def remote_code(tree: ast.AST) -> list[str]:
    """Calls that let a model's repository bring code, or would ask on the terminal whether it may."""
    found = []
    for name, call in calls(tree):
        trust = keyword(call, "trust_remote_code")
        from_folder = name.startswith("Auto") and name.endswith(".from_pretrained")
        if is_constant(trust, True) or (from_folder and trust is None):
            found.append(name)
    return found


def running(tree: ast.AST) -> list[str]:
    """Calls that take text for code or for a shell's command."""
    names = {"eval", "exec", "compile", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
    found = []
    for name, call in calls(tree):
        shell = keyword(call, "shell")
        if name in names or name.endswith("create_subprocess_shell") or (shell and not is_constant(shell, False)):
            found.append(name)
    return found


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PROGRAM, ids=relative)
def test_nothing_is_unpickled_trusted_or_run(path: Path) -> None:
    tree = tree_of(path)
    assert path.name in UNPICKLES or unpickling(tree) == []
    assert remote_code(tree) == []
    assert running(tree) == []


def test_what_unpickles_reads_no_file() -> None:
    (wire,) = [path for path in PROGRAM if path.name in UNPICKLES]
    names = {name for name, _ in calls(tree_of(wire))}
    assert "pickle.loads" in names
    assert not [name for name in names if name.rpartition(".")[2] in ("load", "open", "read_bytes", "Unpickler")]


@pytest.mark.parametrize(
    ("code", "finder"),
    [
        ("import pickle", unpickling),
        ("from pickle import loads", unpickling),
        ("import pandas as pd", unpickling),
        ("torch.load(path)", unpickling),
        ("torch.load(path, weights_only=False)", unpickling),
        ("numpy.load(path, allow_pickle=True)", unpickling),
        ("yaml.load(text, Loader=yaml.Loader)", unpickling),
        ("AutoTokenizer.from_pretrained(folder)", remote_code),
        ("AutoConfig.from_pretrained(folder, trust_remote_code=True)", remote_code),
        ("LLM(model, trust_remote_code=True)", remote_code),
        ("eval(text)", running),
        ("os.system(text)", running),
        ("subprocess.run(text, shell=True)", running),
        ("subprocess.run(text, shell=flag)", running),
    ],
)
def test_the_search_finds_what_it_is_for(code: str, finder: object) -> None:
    assert finder(ast.parse(code)) != []  # type: ignore[operator]


# --- hostile files


class Planted:
    """A pickle that leaves a file behind when it is read."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._mark,)


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    """A file that must not come into being."""
    path = tmp_path / "executed"
    yield path
    assert not path.exists(), "something in a file was executed"


def test_a_pickle_that_was_planted_would_work(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Planted(tmp_path / "x")))
    assert (tmp_path / "x").exists()


def test_pickles_in_a_checkpoint_are_not_read(tmp_path: Path, mark: Path) -> None:
    import asyncio

    evil = pickle.dumps(Planted(mark))
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_latest_k=1)
    partial = checkpoints.begin(3)
    writer = BackgroundWriter()
    writer.start({"w": torch.arange(4.0)}, partial / "trainer")
    asyncio.run(writer.finished())
    final = checkpoints.commit(3, state={"step": 3})
    for name in (".metadata", "__0_0.distcp", "optimizer.pt", "pytorch_model.bin", "random-0.pkl"):
        (final / "trainer" / name).write_bytes(evil)
        (final / name).write_bytes(evil)
    assert checkpoints.latest() == final
    tensors = {"w": torch.zeros(4)}
    read_state(tensors, final / "trainer")
    assert tensors["w"].tolist() == [0, 1, 2, 3]
    assert load_state(final) == {"step": 3}


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "trainer"])
def test_a_pickle_in_the_place_of_a_checkpoints_file_is_refused(tmp_path: Path, mark: Path, name: str) -> None:
    evil = pickle.dumps(Planted(mark))
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_latest_k=1)
    partial = checkpoints.begin(3)
    (partial / "trainer").mkdir()
    (partial / "trainer" / "model.safetensors").write_bytes(b"whole")
    final = checkpoints.commit(3, state={"step": 3})
    (final / (name if name.endswith("json") else "trainer/model.safetensors")).write_bytes(evil)
    assert checkpoints.latest() is None
    assert len(checkpoints.torn) == 1
    with pytest.raises(CheckpointException):
        read_state({"w": torch.zeros(4)}, final / "trainer")
    (tmp_path / "random.json").write_bytes(evil)
    with pytest.raises(ValueError, match="utf-8"):
        load_random_state(tmp_path / "random.json")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_model_in_a_pickle_is_refused(tmp_path: Path, mark: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(pickle.dumps(Planted(mark)))
    with pytest.raises(ModelNotFound):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_code_in_a_model_folder_is_not_run(
    tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """A folder such as the hub has many of: its files name classes in a module that it brings along."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder = make_tiny_model(tmp_path / "model")
    (folder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nclass Evil: pass\n")
    described = json.loads((folder / file).read_text())
    described |= {
        "tokenizer_class": "Evil",
        "auto_map": {
            "AutoConfig": "evil.Evil",
            "AutoModelForCausalLM": "evil.Evil",
            "AutoTokenizer": ["evil.Evil", None],
        },
    }
    if file == "config.json":
        described |= {"model_type": "evil", "architectures": ["Evil"]}
    (folder / file).write_text(json.dumps(described))
    config = load_config(GRPOConfig, ROOT / "apps/grpo/toy.yaml", [f"model={folder}"])
    try:
        read_model(config, tmp_path, generator=None)
    except UserError:
        return  # refused; or read without the code
    assert file == "tokenizer_config.json"


def test_a_template_in_a_question_is_text(tmp_path: Path, mark: Path) -> None:
    attack = "{{ 7 * 7 }} {% generation %} {{ ''.__class__.__mro__[1].__subclasses__() }}"
    text, _ = ChatFormat(make_byte_tokenizer(), prompt_template="Q: {prompt}").render(attack)
    assert attack in text


# --- hostile answers

HOSTILE = [
    "__import__('pathlib').Path({path!r}).touch()",
    "x + __import__('os').system('touch {path}')",
    "$(touch {path})",
    "`touch {path}`",
    "; touch {path} #",
    r"\text{{exec(open({path!r},'w').close())}}",
    r"\immediate\write18{{touch {path}}}",
    "{path}",
]


def test_an_answer_is_never_executed_and_never_a_file_name(
    tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is compared by math-verify in its real process, in an empty folder that stays empty."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    judge = MathJudge(seconds=1.0)
    reward = MathReward(timeout=1.0)
    try:
        for template in HOSTILE:
            text = template.format(path=str(mark))
            judge.is_equal("5*x", text)
            judge.is_equal(text, "5*x")
            assert reward("", f"<answer>{text}</answer>", "5*x") == 0.0
        assert judge.is_equal("5*x", "x*5")  # it was at work
    finally:
        judge.close()
        reward._judge.close()
    assert list(folder.iterdir()) == []


# --- secrets

SECRETS = {
    "HF_TOKEN": "hf-token-of-the-environment",
    "WANDB_API_KEY": "wandb-key-of-the-environment",
    "FORGE_SECRET": "the-secret-that-the-hosts-share",
    "AWS_SECRET_ACCESS_KEY": "aws-key-of-the-environment",
}


def test_no_secret_is_in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the environment, the command line, the config, and addresses in it."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    judge = "{reward: forge.data.rewards.MathReward, args: {api_key: key-of-a-judge}}"
    overrides = [
        f"output_dir={tmp_path / 'run'}",
        f"rewards=[{judge}]",
        "dataset.path=https://me:password-in-an-address@host/rows.jsonl?token=token-in-an-address&x=1",
        "dataset.parameters={hub_token: token-of-a-data-set, note: hf_AAAABBBBCCCCDDDDEEEEFFFF}",
    ]
    monkeypatch.setattr(
        sys, "orig_argv", ["python", "-m", "apps.grpo.main", "--hub.token", "token-of-the-command", *overrides]
    )
    run = Run(load_config(GRPOConfig, ROOT / "apps/grpo/toy.yaml", overrides), app="grpo", warnings=[])
    run.metrics.add("loss", 1.0)
    run.log_step(1)
    run.close()
    secrets = [*SECRETS.values(), "key-of-a-judge", "password-in-an-address", "token-in-an-address"]
    secrets += ["token-of-a-data-set", "hf_AAAABBBBCCCCDDDDEEEEFFFF", "token-of-the-command"]
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"config.yaml", "environment.json", "metrics.jsonl"} <= {path.name for path in files}
    found = [(path.name, secret) for path in files for secret in secrets if secret.encode() in path.read_bytes()]
    assert found == []
    again = load_config(GRPOConfig, tmp_path / "run" / "config.yaml")  # what was hidden is still a config
    assert again.training == run.config.training


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://host/x?X-Amz-Signature=abc&n=1", "https://host/x?X-Amz-Signature=<hidden>&n=1"),
        ("https://host/x?api_key=abc", "https://host/x?api_key=<hidden>"),
        ("https://host/x?page=2", "https://host/x?page=2"),
    ],
)
def test_keys_in_an_address_are_hidden(text: str, shown: str) -> None:
    assert redact_text(text) == shown
