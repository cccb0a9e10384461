"""The text of `--help`: every key with its type, default and meaning, read from the dataclasses."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from forge.config.errors import show
from forge.config.fields import all_keys, default_of, hints_of, is_required, plain, shorthand

_OPTIONS = {
    "--config FILE": "The YAML file with the values; a value may refer to others, ${training.steps}, and to the "
    "environment, ${oc.env:NAME,default}.",
    "--print_config": "Print the resolved config as YAML and start nothing.",
    "--dry_run": "Check the config, model, data, placement and memory, and start nothing.",
    "--help": "Show this text.",
}


@functools.cache
def field_docs(section: type) -> dict[str, str]:
    """The text under each field of a config dataclass, its base classes' fields included."""
    docs: dict[str, str] = {}
    for cls in reversed(section.__mro__):
        if dataclasses.is_dataclass(cls):
            docs.update(_module_docs(cls.__module__).get(cls.__name__, {}))
    return docs


@functools.cache
def _module_docs(module: str) -> dict[str, dict[str, str]]:
    """{class: {field: the string that stands under it}}."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: dict(_strings(node.body)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _strings(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            yield ast.unparse(field.target), " ".join(str(text.value.value).split())


def help_text(cls: type, *, prog: str) -> str:
    """What `--help` prints."""
    width = min(shutil.get_terminal_size((110, 24)).columns, 110)
    lines = [f"usage: {prog} --config FILE [--key.path value ...]", ""]
    for option, meaning in _OPTIONS.items():
        lines += [f"  {option}", *_wrapped(meaning, width)]
    lines += ["", *textwrap.wrap(_introduction(cls), width)]
    heading = ""
    for key, hint, owner in all_keys(cls):
        if hint.section and not shorthand(hint.section) and not hint.nullable:
            continue  # its keys follow
        if key[0] != heading:
            lines.append("")
            heading = key[0]
        field = next(field for field in dataclasses.fields(owner) if field.name == key[-1])
        lines.append(f"  --{'.'.join(key)}  {hint}  ({_default(field)})")
        lines += _wrapped(field_docs(owner).get(field.name, ""), width)
    return "\n".join(lines)


def _introduction(cls: type) -> str:
    text = (
        "Every key of the config, for the file and for the command line. On the command line --training.steps 10, "
        "--training.steps=10 and training.steps=10 are the same, and lists and mappings are written as in YAML. "
        "N stands for the position in a list, from 0."
    )
    services = hints_of(cls)["services"].section if "services" in hints_of(cls) else None
    if services:
        names = ", ".join(f"--{name}.procs" for name in hints_of(services))
        text += f" services. may be left out: {names}."
    return text


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _default(field: dataclasses.Field[Any]) -> str:
    return "required" if is_required(field) else f"default {show(_short(default_of(field)))}"


def _short(value: Any) -> Any:
    """Plain data; a section that a text can stand for is that text, if all else in it has its default."""
    if isinstance(value, list):
        return [_short(item) for item in value]
    name = shorthand(value)
    if name and all(getattr(value, f.name) == default_of(f) for f in dataclasses.fields(value) if f.name != name):
        return getattr(value, name)
    return plain(value)
