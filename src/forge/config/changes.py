"""What a resumed run's config changes, and which changes would make it another run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from forge.config.errors import ConfigError, Problem, show

_POSITION = "the data position of the checkpoint would mean other problems"
_HELD_OUT = "problems that were held out would be trained on, or the other way round"
FROZEN = {
    "model": "the checkpoint's weights are of the other model",
    "dataset.path": _POSITION,
    "dataset.name": _POSITION,
    "dataset.split": _POSITION,
    "dataset.streaming": _POSITION,
    "dataset.parameters": _POSITION,
    "dataset.size": _POSITION,
    "dataset.shuffle": _POSITION,
    "dataset.mix": _POSITION,
    "training.seed": _POSITION,
    "eval.split": _HELD_OUT,
    "eval.samples": _HELD_OUT,
}
"""Keys that cannot change within a run, with all below them, and the reason."""
MAY_GROW = {"training.seq_len": "groups that were finished before the resume may be longer than it allows"}
"""Keys that cannot become smaller."""
_NO_CHANGE = {"output_dir"}  # another spelling of the same folder


@dataclass(frozen=True, slots=True)
class Change:
    """One key that is not as it was."""

    key: str
    before: Any
    now: Any

    @property
    def refusal(self) -> str | None:
        """Why a run cannot go on with it; None if it can."""
        for key, reason in FROZEN.items():
            if self.key == key or self.key.startswith(f"{key}."):
                return reason
        if self.key in MAY_GROW and self.now < self.before:
            return MAY_GROW[self.key]
        return None

    def __str__(self) -> str:
        return f"{self.key} {show(self.before)} → {show(self.now)}"


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The keys that differ. Those that one of them does not have are new or gone, and no change.

    >>> [str(c) for c in changes({"training": {"steps": 5}}, {"training": {"steps": 9, "seed": 1}})]
    ['training.steps 5 → 9']
    """
    old, new = _flat(before), _flat(now)
    return [Change(k, old[k], new[k]) for k in old if k in new and old[k] != new[k] and k not in _NO_CHANGE]


def refuse(found: list[Change], folder: Path) -> None:
    """Ends with everything that a run cannot go on with.

    Raises:
        ConfigError: naming the keys, both values and the reason.
    """
    problems = [
        Problem(
            key=c.key,
            value=c.now,
            rule=f"must stay {show(c.before)} for the run in {folder} to be resumed",
            why=reason,
            fix=f"--{c.key} {show(c.before)}, or another output_dir",
        )
        for c in found
        if (reason := c.refusal) is not None
    ]
    if problems:
        raise ConfigError(problems)


def write_config(folder: Path, text: str, *, resume_step: int | None) -> list[Change]:
    """Writes `config.yaml`; what a resumed run changes in it is returned, and the old file kept beside it, as
    `config.until-step-<N>.yaml`.

    Raises:
        ConfigError: the run cannot be resumed with these changes. Nothing was written.
    """
    path = folder / "config.yaml"
    found: list[Change] = []
    if resume_step is not None and path.exists():
        found = changes(_parsed(path.read_text()), _parsed(text))
        refuse(found, folder)
        if found:
            os.replace(path, folder / f"config.until-step-{resume_step}.yaml")
    aside = path.with_name(path.name + ".partial")
    aside.write_text(text)
    os.replace(aside, path)
    return found


def _parsed(text: str) -> dict[str, Any]:
    """The keys of a config.yaml; none where somebody has spoiled the file."""
    try:
        parsed = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (OmegaConfBaseException, YAMLError):
        return {}
    return {str(k): v for k, v in parsed.items()} if isinstance(parsed, dict) else {}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} → {"a.b": 1}; a list stays one value, and so does an empty section."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat
