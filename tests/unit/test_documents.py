"""README.md and docs/*.md name only what there is, their commands are understood, and their code runs."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pkgutil
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest
import torch

import benchmarks.__main__ as benchmarks
import forge.config
from forge.config import ConfigError, GRPOConfig, RunConfig, load_config
from forge.config.fields import all_keys
from forge.data.rewards import build_rewards, score
from forge.losses import build_loss
from forge.observability.catalogue import describe

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGS = [c for c in vars(forge.config).values() if isinstance(c, type) and issubclass(c, RunConfig)]
# Held against a real run by tests/integration/test_grpo_app.py.
RUN_FOLDER = {"config.yaml", "environment.json", "metrics.jsonl", "rollouts.jsonl", "logs/", "tensorboard/"}
SUFFIXES = (".py", ".yaml", ".md", ".sh", ".toml", ".txt", ".json", ".jsonl")


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def lines(document: Path) -> Iterator[str]:
    """What the document quotes: inline code, and the commands in its blocks, without their comments."""
    prose = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"`([^`\n]+)`", prose)
    for block in blocks(document, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if command := re.sub(r"\s+#.*", "", line).strip():
                yield command


def named(found: dict[Path, set[str]]) -> list:
    """One test for each document and name, called "README.md apps/grpo/main.py"."""
    pairs = [(document, name) for document, names in found.items() for name in sorted(names)]
    return [pytest.param(document, name, id=f"{document.name} {name}") for document, name in pairs]


def python_files(document: Path) -> dict[str, str]:
    """The Python blocks that begin with the name of a file, such as `# my_rewards.py`."""
    return {m[1]: block for block in blocks(document, "python") if (m := re.match(r"# (\w+)\.py\n", block))}


def files_of(document: Path) -> set[str]:
    words = {word.removesuffix(",") for line in lines(document) for word in line.split()}
    words |= set(re.findall(r"\]\((?!http)([^)#]+)", document.read_text()))
    shaped = {
        w for w in words if re.fullmatch(r"(\./)?[\w*][\w.*-]*(/[\w.*-]+)*/?", w) and w.endswith((*SUFFIXES, "/"))
    }
    theirs = {f"{name}.py" for name in python_files(document)} | RUN_FOLDER
    # my_... is the reader's own file.
    return {w for w in shaped if w not in theirs and not w.startswith(("runs/", "checkpoints/", "my_"))}


@pytest.mark.parametrize(("document", "file"), named({d: files_of(d) for d in DOCUMENTS}))
def test_a_file_that_is_named_exists(document: Path, file: str) -> None:
    file = file.removeprefix("./")
    trees = [ROOT / "src" / "forge", ROOT / "tests"]
    places = [*(tree.rglob(file) for tree in trees), ROOT.glob(file), document.parent.glob(file)]
    assert any(next(place, None) for place in places)


def targets_of(document: Path) -> set[str]:
    return {m[1] for line in lines(document) if (m := re.match(r"make ([a-z][\w-]*)", line))}


@pytest.mark.parametrize(("document", "target"), named({d: targets_of(d) for d in DOCUMENTS}))
def test_a_make_target_that_is_named_has_a_rule(document: Path, target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


KEYS = {".".join(key) for config in CONFIGS for key, _, _ in all_keys(config)}
SECTIONS = {key.partition(".")[0] for key in KEYS if "." in key}


def keys_of(document: Path) -> set[str]:
    text = " ".join([*lines(document), *blocks(document, "yaml")])
    dotted = re.findall(r"(?<![\w./])(?:--)?([a-z_]+(?:\.[a-z_]+)+)", text)
    return {key for key in dotted if key.partition(".")[0] in SECTIONS and not key.endswith(SUFFIXES)}


@pytest.mark.parametrize(("document", "key"), named({d: keys_of(d) for d in DOCUMENTS}))
def test_a_config_key_that_is_named_exists(document: Path, key: str) -> None:
    inside_free_form = any(key.startswith(f"{free}.") for free in ("loss.args", "dataset.parameters"))
    assert key in KEYS or f"services.{key}" in KEYS or inside_free_form


def commands_of(document: Path) -> set[str]:
    """Programs with their arguments, without those that have a <folder> or a NAME for the reader to fill in."""
    found = {line for line in lines(document) if re.match(r"(\S*python -m |make \w+ ARGS=)", line)}
    found = {line for line in found if not re.search(r"<| [A-Z_]+( |$)", line)}
    return {re.sub(r"^\S*python", "python", line) for line in found}


@pytest.mark.parametrize(("document", "command"), named({d: commands_of(d) for d in DOCUMENTS}))
def test_a_command_is_understood(
    document: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        arguments = shlex.split(words[2].removeprefix("ARGS="))
        assert words[1] == "grpo", "only make grpo takes arguments of a program"
        words = ["python", "-m", "apps.grpo.main", "--config", "apps/grpo/smollm2_135m.yaml", *arguments]
    module, arguments = words[2], words[3:]
    assert importlib.util.find_spec(module)
    if module == "benchmarks":
        assert set(takewhile(lambda word: not word.startswith("-"), arguments)) <= set(benchmarks.NAMES)
    elif module.startswith("apps."):
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", [module, *arguments, "--print_config"])
        monkeypatch.delitem(sys.modules, module, raising=False)
        with pytest.raises(SystemExit) as end:
            runpy.run_module(module, run_name="__main__")
        assert not end.value.code, capsys.readouterr().err


def names_of(document: Path) -> set[str]:
    return {m for line in lines(document) for m in re.findall(r"(?<![\w/.])forge(?:\.\w+)+", line)}


@pytest.mark.parametrize(("document", "name"), named({d: names_of(d) for d in DOCUMENTS}))
def test_a_name_of_the_library_can_be_imported(document: Path, name: str) -> None:
    assert pkgutil.resolve_name(name) is not None


def metrics_of(document: Path) -> set[str]:
    words = {word for line in lines(document) for word in line.split()}
    return {w for w in words if re.fullmatch(r"[a-z]+/[a-z_0-9]+(<\w+>)?|[a-z]+/<\w+>", w)} - {
        "runs/grpo",
        "checkpoints/best",
    }


@pytest.mark.parametrize(("document", "name"), named({d: metrics_of(d) for d in DOCUMENTS}))
def test_a_metric_that_is_named_is_in_the_catalogue(document: Path, name: str) -> None:
    assert describe(name)


@pytest.mark.parametrize(
    ("document", "block"),
    [pytest.param(d, b, id=f"{d.name} {b.split(chr(10))[0]}") for d in DOCUMENTS for b in blocks(d, "yaml")],
)
def test_a_piece_of_config_is_understood(document: Path, block: str, tmp_path: Path) -> None:
    refused = []
    for config in CONFIGS:
        try:
            piece(config, block, tmp_path)
            return
        except ConfigError as error:
            refused.append(str(error))
    pytest.fail("\n".join(refused))


def piece(config: type[RunConfig], block: str, folder: Path) -> RunConfig:
    file = folder / "piece.yaml"
    needed = {"model": "model: toy\n", "dataset": "dataset: {path: toy}\n"}
    given = re.findall(r"^(\w+):", block, flags=re.MULTILINE)
    file.write_text("".join(line for key, line in needed.items() if key not in given) + block)
    return load_config(config, file)


@pytest.fixture
def user_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a document's Python files where a user would: into the folder that the program is started from."""

    def write(document: Path) -> list[str]:
        files = python_files(document)
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.syspath_prepend(tmp_path)
        return list(files)

    return write


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_python_in_a_document_runs(document: Path, user_files) -> None:
    for name in user_files(document):
        importlib.import_module(name)
    for block in blocks(document, "python"):
        if not re.match(r"# \w+\.py\n", block):
            exec(compile(block, document.name, "exec"), {})


def test_the_readmes_reward_and_loss_do_what_they_say(user_files, tmp_path: Path) -> None:
    user_files(ROOT / "README.md")
    yaml = blocks(ROOT / "README.md", "yaml")
    rewards, loss = (next(b for b in yaml if b.startswith(section)) for section in ("rewards:", "loss:"))
    entries = piece(GRPOConfig, rewards, tmp_path).rewards
    assert [entry.reward for entry in entries] == ["forge.data.rewards.MathReward", "my_rewards.CustomMathReward"]
    for response, expected in ((r"so \boxed{4}", 0.5), (r"so \boxed{5}", 0.0), ("so 4", 0.0)):
        total, _ = score(build_rewards(entries[1:]), "2 + 2?", response, "4")
        assert total == expected
    spec = dataclasses.asdict(piece(GRPOConfig, loss, tmp_path).loss)
    logprobs = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    value = build_loss(spec)(
        logprobs=logprobs,
        ref_logprobs=torch.tensor([[-1.5, -2.0, -9.0]]),
        advantages=torch.tensor([[2.0]]),
        padding_mask=torch.tensor([[1.0, 1.0, 0.0]]),
    )
    assert value.item() == pytest.approx((1 * 2 + 0.05 * 0.25 / 2 + 2 * 2) / 2)  # beta 0.05 of the config
    value.backward()
    assert logprobs.grad.tolist() == [pytest.approx([(-2 + 0.05 * 0.5) / 2, -1, 0])]


def test_the_reward_and_the_loss_of_the_new_algorithm_do_what_they_say(user_files) -> None:
    user_files(ROOT / "docs" / "new_algorithm.md")
    rewards = build_rewards(["my_rewards.vowels"])
    assert score(rewards, "", "abba", "") == (0.5, {"vowels": 0.5})
    assert score(rewards, "", "aa", "")[0] == 0.5  # a short one counts as four characters
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    value = build_loss("my_losses.Squared")(
        logprobs=logprobs,
        generator_logprobs=torch.tensor([[-1.0, -5.0]]),
        advantages=torch.tensor([[0.5]]),
        padding_mask=torch.tensor([[1.0, 0.0]]),
    )
    assert value.item() == pytest.approx(0.25)  # (1 − 1 − 0.5)²
    value.backward()
    assert logprobs.grad.tolist() == [[-1.0, 0.0]]  # a descent raises the ratio
