"""Values against type hints: what a field takes, in words and as a check; which keys there are."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from forge.config.errors import Problem, show

MISSING_MARK = "???"  # OmegaConf's mark of a value that the user still has to give


@dataclass(frozen=True, slots=True)
class Range:
    """The bounds of a number, for `Annotated[int, Range(least=1)]`."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    why: str = ""

    def __str__(self) -> str:
        words = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{word} {bound:g}" for word, bound in words.items() if bound is not None)

    def holds(self, value: float) -> bool:
        """Whether the value is inside."""
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


PositiveInt = Annotated[int, Range(least=1)]
Count = Annotated[int, Range(least=0)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(least=0)]
Fraction = Annotated[float, Range(above=0, most=1)]
Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hint:
    """A type hint taken apart: `Annotated[int, Range(least=1)] | None` is one option, a range, and nullable."""

    options: tuple[Any, ...]
    nullable: bool
    range: Range | None

    @property
    def section(self) -> type | None:
        """The dataclass among the options."""
        return next((o for o in self.options if isinstance(o, type) and dataclasses.is_dataclass(o)), None)

    def __str__(self) -> str:
        words = [_in_words(option) for option in self.options]
        if self.range:
            words[-1] += f" {self.range}"
        return " or ".join(words + ["null"] * self.nullable)


def read_hint(hint: Any) -> Hint:
    """Takes a hint apart."""
    if get_origin(hint) in (Union, types.UnionType):
        parts = [read_hint(arg) for arg in get_args(hint) if arg is not type(None)]
        return Hint(
            options=tuple(option for part in parts for option in part.options),
            nullable=type(None) in get_args(hint),
            range=next((part.range for part in parts if part.range), None),
        )
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        return Hint((inner,), False, next((mark for mark in marks if isinstance(mark, Range)), None))
    return Hint((hint,), False, None)


@functools.cache
def hints_of(section: type) -> dict[str, Hint]:
    """The fields of a config dataclass, in order."""
    hints = get_type_hints(section, include_extras=True)
    return {field.name: read_hint(hints[field.name]) for field in dataclasses.fields(section)}


def _in_words(option: Any) -> str:
    if dataclasses.is_dataclass(option):
        names = "{" + ", ".join(field.name for field in dataclasses.fields(option)) + "}"
        return f"str or {names}" if shorthand(option) else names
    if get_origin(option) is Literal:
        return "|".join(str(choice) for choice in get_args(option))
    if get_origin(option) is list:
        return f"list of {read_hint(get_args(option)[0])}"
    return "mapping" if get_origin(option) is dict else option.__name__


def shorthand(section: Any) -> str | None:
    """The field that a plain string stands for where a section is expected: `loss: dapo` is `loss: {name: dapo}`."""
    return getattr(section, "SHORTHAND", None)


class Reader:
    """Turns plain data into config dataclasses; what does not fit is noted in `problems`, all of it.

    Args:
        root: the dataclass of the whole config, for suggestions.
        built: what is read was made in code: its sections must be instances already, and are judged as they are.
    """

    def __init__(self, root: type, *, built: bool = False) -> None:
        self.root = root
        self._built = built
        self.problems: list[Problem] = []

    def section(self, cls: type, raw: dict[Any, Any], key: Key = ()) -> dict[str, Any]:
        """The keyword arguments for `cls`; fields that are absent or wrong are left out."""
        hints = hints_of(cls)
        paths = {field.name for field in dataclasses.fields(cls) if field.metadata.get("path")}
        values = {}
        for field, value in raw.items():
            if field not in hints:
                self.unknown((*key, str(field)), value)
                continue
            found, read = self.value(hints[field], value, (*key, field))
            if found:
                values[field] = os.path.expanduser(read) if field in paths and isinstance(read, str) else read
        for field in dataclasses.fields(cls):
            if field.name not in raw and is_required(field):
                path = ".".join((*key, field.name))
                self._note(key=path, rule="is missing and has no default", fix=_how_to_give((*key, field.name)))
        return values

    def value(self, hint: Hint, raw: Any, key: Key) -> tuple[bool, Any]:
        """(whether it fits, the value as the hint wants it)."""
        if raw is None and hint.nullable:
            return True, None
        if raw == MISSING_MARK:
            return self._note(key=".".join(key), rule=f"is still marked {MISSING_MARK}", fix=_how_to_give(key))
        for option in hint.options:
            if raw is None and not self._built and get_origin(option) in (dict, list):
                return True, get_origin(option)()  # as with a section whose lines are all commented out
            if option is dict or get_origin(option) is dict:
                if isinstance(raw, dict):
                    return self._mapping(raw, key)
            elif get_origin(option) is list:
                if isinstance(raw, list):
                    return self._list(read_hint(get_args(option)[0]), raw, key)
            elif dataclasses.is_dataclass(option):
                return self._instance(option, raw, key, hint)  # type: ignore[arg-type]  # a class, as all options are
            elif fits(option, raw):
                return self._number(hint, float(raw) if option is float else raw, key)
        return self._wrong_type(key, raw, hint)

    def unknown(self, key: Key, value: Any) -> None:
        """Notes a key that does not exist."""
        close = suggestions(self.root, key)
        fix = f"did you mean {' or '.join(close)}?" if close else "--help lists every key"
        self._note(key=".".join(key), value=value, rule="is not a key of the config", fix=fix)

    def instance(self, section: Any, key: Key = ()) -> None:
        """Judges the fields of a section that was built in code."""
        raw = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
        self.section(type(section), raw, key)

    def _instance(self, cls: type, raw: Any, key: Key, hint: Hint) -> tuple[bool, Any]:
        if self._built:
            if not isinstance(raw, cls):
                rule = f"must be a {cls.__name__}"
                return self._note(key=".".join(key), value=raw, rule=rule, fix=f"{key[-1]}={cls.__name__}(...)")
            self.instance(raw, key)
            return True, raw
        name = shorthand(cls)
        if name and isinstance(raw, str):
            raw = {name: raw}
        if raw is None:  # `training:` with every line below it commented out
            raw = {}
        if not isinstance(raw, dict):
            return self._wrong_type(key, raw, hint)
        values = self.section(cls, raw, key)
        if any(is_required(field) and field.name not in values for field in dataclasses.fields(cls)):
            return False, None
        return True, cls(**values)

    def _list(self, item: Hint, raw: list[Any], key: Key) -> tuple[bool, Any]:
        read = [self.value(item, value, (*key, str(i))) for i, value in enumerate(raw)]
        return all(found for found, _ in read), [value for _, value in read]

    def _mapping(self, raw: dict[Any, Any], key: Key) -> tuple[bool, Any]:
        for name, value in _leaves(raw, key):
            if not all(isinstance(part, str) for part in name):
                fix = "put it in quotes"
                return self._note(key=".".join(map(str, name)), rule="must have a name that is text", fix=fix)
            if value == MISSING_MARK:
                return self._note(key=".".join(name), rule=f"is still marked {MISSING_MARK}", fix=_how_to_give(name))
            if not isinstance(value, str | int | float | bool | None):
                return self._note(
                    key=".".join(name), value=value, rule="must be a number, text, true, false or null", fix="change it"
                )
        return True, raw

    def _number(self, hint: Hint, value: Any, key: Key) -> tuple[bool, Any]:
        if isinstance(value, float) and not math.isfinite(value):
            rule = "must be a finite number"
        elif hint.range and isinstance(value, int | float) and not hint.range.holds(value):
            rule = f"must be {hint.range}"
        else:
            return True, value
        name = ".".join(key)
        fix = f"set {name} to {hint.range or 'a number'}"
        return self._note(key=name, value=value, rule=rule, why=hint.range.why if hint.range else "", fix=fix)

    def _wrong_type(self, key: Key, raw: Any, hint: Hint) -> tuple[bool, None]:
        return self._note(key=".".join(key), value=raw, rule=f"must be {hint}", fix=_type_fix(key, raw, hint))

    def _note(self, **problem: Any) -> tuple[bool, None]:
        self.problems.append(Problem(**problem))
        return False, None


def is_required(field: dataclasses.Field[Any]) -> bool:
    """Whether a field has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def default_of(field: dataclasses.Field[Any]) -> Any:
    """A field's default, made anew."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def defaults_of(section: type) -> dict[str, Any]:
    """The defaults of a config dataclass and of the sections below it, as plain data."""
    return {field.name: plain(default_of(field)) for field in dataclasses.fields(section) if not is_required(field)}


def plain(value: Any) -> Any:
    """Config dataclasses as mappings."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def fits(option: Any, raw: Any) -> bool:
    """Whether a scalar is of a type; a whole number is a float too, true and false are no numbers."""
    if get_origin(option) is Literal:
        return isinstance(raw, str) and raw in get_args(option)
    if option is bool or isinstance(raw, bool):
        return option is bool and isinstance(raw, bool)
    if option is float:
        return isinstance(raw, float) or (isinstance(raw, int) and abs(raw) < 2**1023)
    return isinstance(raw, option)


def all_keys(section: type, key: Key = ()) -> Iterator[tuple[Key, Hint, type]]:
    """(key, its hint, the dataclass that it stands in) of a section and of those below it; list items are `N`."""
    for name, hint in hints_of(section).items():
        path = (*key, name)
        yield path, hint, section
        if hint.section:
            yield from all_keys(hint.section, path)
        for option in hint.options:
            inner = read_hint(get_args(option)[0]).section if get_origin(option) is list else None
            if inner:
                yield from all_keys(inner, (*path, "N"))


# What the same thing is called elsewhere, and parts of names that spelling distance does not find.
_SYNONYMS = {
    "lr": "training.learning_rate",
    "max_steps": "training.steps",
    "num_generations": "grpo.n_samples",
    "group_size": "grpo.n_samples",
    "num_samples": "grpo.n_samples",
    "kl_coef": "grpo.beta",
    "max_grad_norm": "training.max_norm",
    "max_tokens": "grpo.max_new_tokens",
    "max_completion_length": "grpo.max_new_tokens",
    "off_policy_steps": "training.max_staleness",
    "tp": "parallelism.tensor_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "cp": "parallelism.context_parallel_degree",
}


def suggestions(root: type, key: Key) -> list[str]:
    """Up to three keys that may have been meant, best first.

    >>> suggestions(GRPOConfig, ("n_samples",))
    ['grpo.n_samples']
    """
    known = [".".join(path) for path, _, _ in all_keys(root) if "N" not in path]
    last = key[-1]
    found = [_SYNONYMS[last]] if _SYNONYMS.get(last) in known else []
    found += [name for name in known if name.rsplit(".", 1)[-1] == last]
    if not found:
        found = difflib.get_close_matches(".".join(key), known, n=3, cutoff=0.8)
    if not found:
        by_last: dict[str, list[str]] = {}
        for name in known:
            by_last.setdefault(name.rsplit(".", 1)[-1], []).append(name)
        for match in difflib.get_close_matches(last, by_last, n=2, cutoff=0.7):
            found += by_last[match]
    if not found:
        found = difflib.get_close_matches(".".join(key), known, n=2, cutoff=0.6)
    # Of several of the same name (every service has `procs`), the nearest as a whole.
    found.sort(key=lambda name: -difflib.SequenceMatcher(None, name, ".".join(key)).ratio())
    return list(dict.fromkeys(found))[:3]


def _leaves(raw: Any, key: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(key, value) of every scalar; of a mapping or list that is empty, (key, None)."""
    if isinstance(raw, dict | list) and raw:
        for name, value in raw.items() if isinstance(raw, dict) else ((str(i), v) for i, v in enumerate(raw)):
            yield from _leaves(value, (*key, name))
    else:
        yield key, None if isinstance(raw, dict | list) else raw


def _how_to_give(key: Key) -> str:
    return f"add it to the config file, or --{'.'.join(key)} VALUE"


def _type_fix(key: Key, raw: Any, hint: Hint) -> str:
    name = ".".join(key)
    choices = [str(choice) for option in hint.options if get_origin(option) is Literal for choice in get_args(option)]
    if choices and isinstance(raw, str):
        close = difflib.get_close_matches(raw, choices, n=1, cutoff=0.5)
        return f"did you mean {close[0]}?" if close else f"--{name} {choices[0]}"
    if int in hint.options and isinstance(raw, float) and math.isfinite(raw):
        return f"write a whole number, such as {round(raw)}"
    if str in hint.options and isinstance(raw, int | float):
        return f'put it in quotes: "{show(raw)}"'
    if isinstance(raw, str) and any(option in (int, float) for option in hint.options):
        return "write a number, without quotes and units"
    if bool in hint.options:
        return "write true or false"
    if hint.section:
        return f"write the keys below it, such as {name}.{next(iter(hints_of(hint.section)))}"
    return f"write {hint}" if key else "write `key: value` lines"
