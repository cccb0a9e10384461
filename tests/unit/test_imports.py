"""Who may import whom (the layers of the architecture), and that importing has no effect."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"

# The lower a number, the more may import it. A module imports its own layer and those below.
LAYERS = {
    "forge": 0,
    "forge.types": 0,
    "forge.config": 0,
    "forge.observability.catalogue": 0,
    "forge.observability.metrics": 0,
    "forge.precision": 0,
    "forge.advantages": 1,
    "forge.attention": 1,
    "forge.attention_cpu": 1,
    "forge.data": 1,
    "forge.logprobs": 1,
    "forge.losses": 1,
    "forge.models": 1,
    "forge.objective": 1,
    "forge.packing": 1,
    "forge.placement": 1,
    "forge.testing": 1,
    "forge.actors": 2,
    "forge.batching": 2,
    "forge.checkpoint": 2,
    "forge.doctor": 2,
    "forge.estimate": 2,
    "forge.evaluation": 2,
    "forge.launcher": 2,
    "forge.observability": 2,
    "forge.provisioner": 2,
    "forge.replay_buffer": 2,
    "forge.rollout": 2,
    "forge.service": 2,
    "forge.weights": 2,
    "forge.app": 3,
    "forge.cli": 3,
    "forge.parts": 3,
    "forge.saver": 3,
    "apps": 3,
}
# Only these may import the infrastructure, in as few files as it takes.
INFRASTRUCTURE = {"monarch", "vllm", "torchtitan", "torchstore"}
MAY_IMPORT_INFRASTRUCTURE = (
    "forge.doctor",  # it is what it looks at
    "forge.actors",
    "forge.service",
    "forge.models",
    "forge.provisioner",
    "forge.launcher",
    "forge.weights",
)


def modules() -> dict[str, Path]:
    """Every module of forge and apps by its dotted name."""
    found = {}
    for base, package in ((SOURCE, "forge"), (ROOT, "apps")):
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(module: str) -> Iterator[str]:
    """What the module imports anywhere in its text, `from a import b` as a.b where that is a module."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                source = ".".join([*above, *([source] if source else [])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield inner if inner in MODULES else source


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def layer(module: str) -> int:
    names = [name for name in LAYERS if name != "forge" and within(module, name)]
    if module == "forge":
        return 0
    assert names, f"{module} has no layer: place it in LAYERS of this test, as the architecture says"
    return LAYERS[max(names, key=len)]


@pytest.mark.parametrize("name", sorted({*LAYERS, *MAY_IMPORT_INFRASTRUCTURE}))
def test_what_is_named_here_exists(name: str) -> None:
    assert any(within(module, name) for module in MODULES), (
        f"there is no module {name}: take it out of the lists of this test"
    )


@pytest.mark.parametrize("module", MODULES)
def test_nothing_imports_upwards(module: str) -> None:
    ours = [name for name in imported(module) if within(name, "forge") or within(name, "apps")]
    upwards = [name for name in ours if layer(name) > layer(module)]
    assert upwards == [], f"{module} (layer {layer(module)}) imports from above"


@pytest.mark.parametrize("module", MODULES)
def test_infrastructure_is_imported_only_where_it_may_be(module: str) -> None:
    used = sorted({name.partition(".")[0] for name in imported(module)} & INFRASTRUCTURE)
    allowed = any(within(module, name) for name in MAY_IMPORT_INFRASTRUCTURE)
    assert used == [] or allowed, f"{module} imports {', '.join(used)}"


@pytest.mark.parametrize("module", MODULES)
def test_what_is_being_removed_from_torchtitan_is_not_used(module: str) -> None:
    assert [name for name in imported(module) if within(name, "torchtitan.experiments")] == []


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


_BLOCK = """
import importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is not to be imported here")

sys.path.insert(0, {source!r})
sys.meta_path.insert(0, Block())
"""


def import_without(modules: list[str], blocked: set[str]) -> str:
    lines = [f"import {module}" for module in modules]
    return run_python(_BLOCK.format(blocked=blocked, source=str(SOURCE)) + "\n".join(lines))


def test_config_needs_no_torch() -> None:
    import_without(["forge.config"], {"torch", "numpy", "transformers", *INFRASTRUCTURE})


def test_the_algorithm_needs_torch_alone() -> None:
    algorithm = ["losses", "packing", "attention", "logprobs", "advantages", "objective"]
    import_without([f"forge.{name}" for name in algorithm], {"transformers", "datasets", "rich", *INFRASTRUCTURE})


def test_metrics_and_types_need_nothing_but_python() -> None:
    import_without(["forge.types", "forge.observability.metrics"], {"torch", "numpy", "rich", "wandb", *INFRASTRUCTURE})


_WATCH = """
import importlib, json, logging, os, sys
sys.path.insert(0, {source!r})

def state():
    loggers = [logging.getLogger(), *(l for l in logging.Logger.manager.loggerDict.values() if hasattr(l, "handlers"))]
    handlers = {{f"{{l.name}}: {{h!r}}" for l in loggers for h in l.handlers}}
    return dict(os.environ), handlers

def load(name):
    before = state()
    importlib.import_module(name)
    after = state()
    variables = sorted(k for k in before[0].keys() | after[0].keys() if before[0].get(k) != after[0].get(k))
    return variables + sorted(after[1] - before[1])

# What a library does when it is imported is its own; what is left over is ours.
for library in {libraries!r}:
    load(library)
print(json.dumps({{name: found for name in {modules!r} if (found := load(name))}}))
"""


def test_importing_a_module_sets_no_variable_and_adds_no_log_handler() -> None:
    ours = [name for name in MODULES if within(name, "forge") and not name.endswith("__main__")]
    libraries = ["torch", "torch._inductor.config", "monarch.actor", "torchstore", "torchtitan.models.qwen3.model"]
    libraries += ["rich.console", "transformers", "datasets"]
    out = run_python(_WATCH.format(source=str(SOURCE), modules=ours, libraries=libraries))
    assert json.loads(out.splitlines()[-1]) == {}
