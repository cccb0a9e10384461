"""What a user got wrong, and how it is told: one message, no traceback, exit status 2."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from forge.types import UserError

EXIT_WRONG_INPUT = 2
_MAX_SHOWN = 80  # characters of a list or a mapping that are quoted in a message
_MAX_PATH = 4096  # characters of a string: as long as a path can be, since half a path helps nobody

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "ABSENT"})()
"""The value of a key that was not given."""


def show(value: Any) -> str:
    """A value as one would write it in YAML. A string is whole; a list or a mapping is cut after about 80 characters,
    behind a whole word.

    >>> show(None), show(True), show("a"), show([1, 2])
    ('null', 'true', '"a"', '[1, 2]')
    """
    text = json.dumps(value, ensure_ascii=False, default=repr)
    end = text.find(" ", _MAX_PATH if isinstance(value, str) else _MAX_SHOWN)
    return text if end < 0 else f"{text[:end]} …"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong: key, value, rule and fix.

    >>> print(Problem(key="grpo.n_samples", value=1, rule="must be at least 2",
    ...               why="a single sample has no baseline", fix="--grpo.n_samples 8"))
    grpo.n_samples must be at least 2, got 1: a single sample has no baseline.
        Fix: --grpo.n_samples 8
    """

    key: str
    rule: str
    fix: str
    value: Any = ABSENT
    why: str = ""
    involves: tuple[str, ...] = ()
    """Other keys that the rule reads. It cannot be judged while one of them is wrong itself."""

    def __str__(self) -> str:
        got = "" if self.value is ABSENT else f", got {show(self.value)}"
        why = f": {self.why}" if self.why else ""
        return f"{self.key} {self.rule}{got}{why}.\n    Fix: {self.fix}"


class ConfigError(UserError):
    """The user's input is wrong; the run ends before anything is started.

    Args:
        problems: everything that was found, or one sentence.
        source: where it stands, such as the name of the config file.
    """

    def __init__(self, problems: str | Sequence[Problem], source: str = "") -> None:
        super().__init__(problems, source)
        self.problems: list[Problem] = [] if isinstance(problems, str) else list(problems)
        self.source = source

    def __str__(self) -> str:
        start = f"{self.source}: " if self.source else ""
        if not self.problems:
            return f"{start}{self.args[0]}"
        if len(self.problems) == 1:
            return f"{start}{self.problems[0]}"
        return f"{start}{len(self.problems)} problems\n" + "\n".join(f"  * {problem}" for problem in self.problems)


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turns a `UserError` raised inside, such as a `ConfigError`, into one message on stderr and exit status 2."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_WRONG_INPUT) from None
