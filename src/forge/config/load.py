"""A YAML file and a command line → a config, or everything that is wrong with them."""

from __future__ import annotations

import dataclasses
import difflib
import io
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from forge.config.errors import ConfigError, Problem, exit_on_user_error
from forge.config.fields import Hint, Key, Reader, defaults_of, hints_of, is_required, read_hint, shorthand
from forge.config.rules import output_problems

C = TypeVar("C")
_NAME = r"[A-Za-z_][\w-]*(\.[\w-]+)*"
_KEY = re.compile(_NAME)
_ASSIGNMENT = re.compile(rf"({_NAME})=(.*)", re.DOTALL)
_NULLS = {"null", "Null", "NULL", "None", "~"}
_FLAGS = {"help", "print_config", "dry_run"}


@dataclass(kw_only=True, slots=True)
class Invocation(Generic[C]):
    """What a command line asks for."""

    config: C
    config_file: Path
    warnings: list[str]
    """What is allowed but probably not meant, one line each, for the app to show."""
    dry_run: bool = False
    """Check model, data, placement and memory, and start nothing."""


@dataclass(slots=True)
class _CommandLine:
    flags: set[str]
    config_file: str | None
    overrides: list[tuple[str, str]]
    problems: list[Problem]


def parse_args(cls: type[C], argv: Sequence[str] | None = None, *, prog: str) -> Invocation[C]:
    """The command line of an app.

    `--help` and `--print_config` are answered here (exit status 0); what is wrong is told in one message on stderr
    (exit status 2).

    Args:
        cls: the app's config dataclass.
        argv: the arguments after the program's name; None takes those of this process.
        prog: how the app is called, such as "python -m apps.grpo.main".

    Example:
        >>> run = parse_args(GRPOConfig, ["--config", "apps/grpo/toy.yaml", "--trainer.procs", "2"], prog="grpo")
        >>> run.config.services.trainer.procs
        2
    """
    line = _split(sys.argv[1:] if argv is None else argv)
    if "help" in line.flags:
        from forge.config.help import help_text  # reads source files, which no other call needs

        print(help_text(cls, prog=prog))
        raise SystemExit(0)
    with exit_on_user_error():
        if line.config_file is None:
            raise ConfigError(_no_config(prog))
        config = _load(cls, line)
        warnings: list[str] = config.warnings() if hasattr(config, "warnings") else []
        if "print_config" in line.flags:
            for warning in warnings:
                print(f"warning: {warning}", file=sys.stderr)
            print(to_yaml(config), end="")
            raise SystemExit(0)
        problems = list(output_problems(getattr(config, "output_dir", None)))
        if problems:
            raise ConfigError(problems, line.config_file)
    return Invocation(
        config=config, config_file=Path(line.config_file), warnings=warnings, dry_run="dry_run" in line.flags
    )


def load_config(cls: type[C], path: str | Path, overrides: Sequence[str] = ()) -> C:
    """A config from a YAML file and overrides in any of the spellings of the command line.

    Raises:
        ConfigError: with everything that is wrong.

    Example:
        >>> load_config(GRPOConfig, "apps/grpo/toy.yaml", ["training.steps=3"]).training.steps
        3
    """
    line = _split(overrides)
    if line.flags or line.config_file:
        raise TypeError(f"overrides are keys of the config, got {list(overrides)}")
    line.config_file = str(path)
    return _load(cls, line)


def to_yaml(config: Any) -> str:
    """The config, or a mapping made of it, as YAML that loads to the same config again."""
    tree = config if isinstance(config, Mapping) else dataclasses.asdict(config)
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(tree)))


def make_output_dir(output_dir: str | None, *, app: str) -> Path:
    """Makes the run folder; None makes runs/<app>-<time>, numbered if another run took that name in this second.

    Raises:
        ConfigError: the folder cannot be made.
    """
    try:
        if output_dir is not None:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            return Path(output_dir)
        name = f"runs/{app}-{time.strftime('%Y%m%d-%H%M%S')}"
        for number in range(1, 1000):
            folder = Path(name if number == 1 else f"{name}-{number}")
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                continue
            return folder
        raise FileExistsError(f"{name} and 999 more exist")
    except (OSError, ValueError) as error:
        fix = "--output_dir FOLDER, one where you may write"
        problem = Problem(
            key="output_dir", value=output_dir, rule="must be a folder that can be made", why=str(error), fix=fix
        )
        raise ConfigError([problem]) from error


def _split(argv: Sequence[str]) -> _CommandLine:
    """Sorts arguments into flags, the config file and overrides: `--key value`, `--key=value`, `key=value`."""
    line = _CommandLine(flags=set(), config_file=None, overrides=[], problems=[])
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        body = argument.removeprefix("--")
        name = body.replace("-", "_")
        if argument == "-h" or (argument != body and name in _FLAGS):
            line.flags.add("help" if argument == "-h" else name)
            continue
        assigned = _ASSIGNMENT.fullmatch(body)
        if assigned:
            key, value = assigned[1], assigned[3]
        elif argument == body or not _KEY.fullmatch(body):
            fix = "write --key value or key=value; --help lists every key"
            line.problems.append(Problem(key=argument, rule="is not an option", fix=fix))
            continue
        elif not rest or rest[0].startswith("--"):
            fix = f"--{body} VALUE"
            line.problems.append(Problem(key=body, rule="needs a value after it", fix=fix))
            continue
        else:
            key, value = body, rest.pop(0)
        if key == "config":
            if line.config_file is not None:
                line.problems.append(Problem(key="--config", rule="may be given once", value=value, fix="drop one"))
            line.config_file = line.config_file or value
        else:
            line.overrides.append((key, value))
    return line


def _no_config(prog: str) -> str:
    own = sorted(Path(path).as_posix() for path in Path().glob(f"{_app_folder(prog)}/*.yaml"))
    examples = "".join(f"\n    {prog} --config {path}" for path in own) or f"\n    {prog} --config FILE"
    return f"no config file was given.\n    Fix: pass one with --config, and see --help for every key:{examples}"


def _app_folder(prog: str) -> str:
    """`python -m apps.grpo.main` → `apps/grpo`."""
    module = re.search(r"-m ([\w.]+)\.\w+$", prog)
    return module[1].replace(".", "/") if module else "config"


def _load(cls: type[C], line: _CommandLine) -> C:
    assert line.config_file is not None
    source = line.config_file
    tree = _read(source)
    reader = Reader(cls)
    reader.problems += line.problems
    for key, text in line.overrides:
        _override(tree, key, text, reader)
    values = reader.section(cls, _resolve(_over_defaults(tree, defaults_of(cls)), source))
    wrong = {problem.key for problem in reader.problems}
    try:
        # Built even if something is wrong, so that the rules between the keys that are right are judged as well.
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # mypy does not see that every config is a dataclass
        placeholders = {field.name: "" for field in fields if is_required(field)}
        config = cls(**{**placeholders, **values})
    except ConfigError as error:
        reader.problems += [p for p in error.problems if not _touches(wrong, (p.key, *p.involves))]
    if reader.problems:
        raise ConfigError(reader.problems, source)
    return config


def _touches(wrong: set[str], keys: tuple[str, ...]) -> bool:
    """Whether one of the keys, or a section or item that it is part of, is among the wrong ones."""
    return any(key == bad or key.startswith(f"{bad}.") or bad.startswith(f"{key}.") for key in keys for bad in wrong)


def _read(source: str) -> dict[Any, Any]:
    """The file as plain data, interpolations still unresolved."""
    path = Path(os.path.expanduser(source))
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"not a text file in UTF-8: {error}.\n    Fix: save it as UTF-8", source) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the config file: {_reason(error)}.{_near(path)}", source) from None
    try:
        tree = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
    except Exception as error:  # whatever a YAML tag or an odd number makes the parser raise, the text is the cause
        raise ConfigError(f"not valid YAML: {_reason(error)}.\n    Fix: correct the file there", source) from None
    if not isinstance(tree, dict):
        raise ConfigError("must hold `key: value` lines, got a list.\n    Fix: start with `model: ...`", source)
    return tree


def _near(path: Path) -> str:
    try:
        beside = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    except (OSError, ValueError):
        return f"\n    Fix: check the path; there is no folder {path.parent}"
    close = difflib.get_close_matches(path.name, beside, n=1) or sorted(beside)[:5]
    found = " or ".join(str(path.parent / name) for name in close)
    return (
        f"\n    Fix: did you mean {found}?" if found else f"\n    Fix: check the path; {path.parent} has no YAML file"
    )


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return " ".join(str(error).split()) or type(error).__name__


def _over_defaults(tree: dict[Any, Any], defaults: dict[str, Any]) -> dict[Any, Any]:
    """The tree with defaults filled in, so that an interpolation may refer to a key that has its default."""
    full = dict(tree)
    for key, default in defaults.items():
        given = tree.get(key)
        if isinstance(default, dict) and isinstance(given, dict):
            full[key] = _over_defaults(given, default)
        elif key not in tree or (given is None and isinstance(default, dict)):
            full[key] = default
    return full


def _resolve(tree: dict[Any, Any], source: str) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except (OmegaConfBaseException, ValueError, RecursionError) as error:
        key = getattr(error, "full_key", None) or "an interpolation"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        fix = "correct the ${...}; a literal one is written \\${...}, a default ${oc.env:NAME,default}"
        raise ConfigError([Problem(key=str(key), rule="cannot be resolved", why=reason, fix=fix)], source) from None


def _override(tree: dict[Any, Any], key: str, text: str, reader: Reader) -> None:
    """Puts one override from the command line into the tree."""
    parts = tuple(key.split("."))
    parts = _long_name(reader.root, parts)
    hint = _hint_at(reader.root, parts)
    if hint is None:
        reader.unknown(parts, text)
        return
    try:
        value = _parse(text, hint)
    except Exception as error:  # as in a file: the text is the cause
        fix = "write a value as in YAML, in quotes if it holds special characters"
        reader.problems.append(Problem(key=key, value=text, rule="is not valid YAML", why=_reason(error), fix=fix))
        return
    _put(tree, parts, value, reader)


def _long_name(root: type, parts: Key) -> Key:
    """`trainer.procs` → `services.trainer.procs`."""
    hints = hints_of(root)
    services = hints["services"].section if "services" in hints else None
    if services and parts[0] not in hints and parts[0] in hints_of(services):
        return ("services", *parts)
    return parts


def _hint_at(section: type, parts: Key) -> Hint | None:
    """The hint of the key at `parts`; anything goes below an open mapping, such as `loss.args`."""
    hint = Hint((section,), False, None)
    for part in parts:
        items = [read_hint(option.__args__[0]) for option in hint.options if get_origin(option) is list]
        if hint.section:
            below = hints_of(hint.section).get(part)
        elif items:
            below = items[0] if part.isdecimal() else None
        else:
            open_ = any(option in (dict, Any) or get_origin(option) is dict for option in hint.options)
            below = Hint((Any,), True, None) if open_ else None
        if below is None:
            return None
        hint = below
    return hint


def _parse(text: str, hint: Hint) -> Any:
    """A value as YAML; where text is expected it is taken as it stands, unless it is null or in quotes."""
    if text in _NULLS:
        return None
    texts = all(option is str for option in hint.options)
    if texts and not (len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"):
        return text
    parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    return parsed["value"]


def _put(tree: dict[Any, Any], parts: Key, value: Any, reader: Reader) -> None:
    """Sets a value, making the sections on the way; a mapping is merged into one that is there."""
    node: Any = tree
    for depth, part in enumerate(parts, start=1):
        hint = _hint_at(reader.root, parts[:depth])
        key = ".".join(parts[:depth])
        index: Any = part
        if isinstance(node, list):
            index = int(part)
            if index > len(node):
                rule, fix = f"is beyond the list, which has {len(node)}", f"start with number {len(node)}"
                reader.problems.append(Problem(key=key, rule=rule, fix=fix))
                return
            if index == len(node):
                node.append(None)
        here = node[index] if isinstance(node, list) else node.get(part)
        name = shorthand(hint.section) if hint and hint.section else None
        if name and isinstance(here, str):
            here = {name: here}
        if depth == len(parts):
            merged = isinstance(here, dict) and isinstance(value, dict)
            node[index] = {**here, **value} if merged else value
            return
        if here is None:
            here = [] if hint and any(get_origin(option) is list for option in hint.options) else {}
        elif not isinstance(here, dict | list):
            rule, fix = f"cannot take {'.'.join(parts)} from the command line", f"give {key} as a whole"
            reader.problems.append(Problem(key=key, value=here, rule=rule, fix=fix))
            return
        node[index] = here
        node = here


def _escaped(value: Any) -> Any:
    """Text that holds ${ is not an interpolation the next time; OmegaConf halves the backslashes before it."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: f"{match[1]}{match[1]}\\${{", value)
    if isinstance(value, dict):
        return {name: _escaped(inner) for name, inner in value.items()}
    return [_escaped(inner) for inner in value] if isinstance(value, list) else value
