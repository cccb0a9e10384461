"""From the config's `loss` to a module, and from a module to the arguments that it is given.

Every mistake here is a ValueError with one line that says what there is, before anything is started.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from forge.losses.base import TokenLoss, require, warn
from forge.losses.cispo_loss import CISPOLoss
from forge.losses.dapo_loss import DAPOLoss
from forge.losses.dr_grpo_loss import DrGRPOLoss
from forge.losses.grpo_loss import GRPOLoss
from forge.losses.gspo_loss import GSPOLoss
from forge.losses.reinforce_loss import ReinforceLoss
from forge.losses.sapo_loss import SAPOLoss
from forge.losses.simple_grpo_loss import SimpleGRPOLoss

LOSSES: dict[str, type[TokenLoss]] = {
    "simple_grpo": SimpleGRPOLoss,
    "grpo": GRPOLoss,
    "dr_grpo": DrGRPOLoss,
    "dapo": DAPOLoss,
    "cispo": CISPOLoss,
    "gspo": GSPOLoss,
    "sapo": SAPOLoss,
    "reinforce": ReinforceLoss,
}
"""Config name → class."""

AVAILABLE = ("logprobs", "generator_logprobs", "ref_logprobs", "advantages", "padding_mask")
"""The tensors that the trainer has for a loss."""

_MUST_REACH_THE_LOSS = ("clip_low", "clip_high", "beta")
"""Settings whose being ignored would mislead; others, as max_response_len, are offered to whoever wants them."""


def build_loss(spec: str | Mapping[str, Any] | nn.Module, *, defaults: Mapping[str, Any] | None = None) -> nn.Module:
    """The loss that the config names: "dapo", an import path, or {"name": either, "args": {...}}.

    `defaults` are settings from elsewhere in the config (clip_low, clip_high, beta, max_response_len). One that is not
    None is passed if the constructor names it and `args` do not; a clip or a beta that finds no taker is warned about.
    A module that is already built is checked and returned.

    Raises ValueError for an unknown name, what cannot be imported or is no nn.Module, arguments that the constructor
    does not take or lacks, values it refuses, and a `forward` that asks for a tensor that does not exist.

    Example: `build_loss({"name": "cispo", "args": {"ratio_max": 4.0}}, defaults={"beta": 0.1})`.
    """
    if isinstance(spec, nn.Module):
        loss_arguments(spec)
        return spec
    name, args = _name_and_args(spec)
    cls = _find_class(name)
    named = {
        p.name: p for p in inspect.signature(cls).parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    open_ended = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(cls).parameters.values())
    takes = f"it takes {', '.join(named) or 'none'}."
    for key in args:
        require(open_ended or key in named, f"loss.args.{key}: {name} has no such argument; {takes}{_hint(key, named)}")
    for key, value in (defaults or {}).items():
        if key in named and value is not None:
            args.setdefault(key, value)
        elif value and key in _MUST_REACH_THE_LOSS and key not in args:
            warn(f"grpo.{key}={value} has no effect: the loss {name} has no such argument; {takes}")
    missing = [key for key, p in named.items() if p.default is p.empty and key not in args]
    require(not missing, f"loss {name} needs args: {', '.join(missing)}. Write loss: {{name: {name}, args: {{...}}}}.")
    try:
        loss = cls(**args)
    except (TypeError, ValueError) as error:
        raise ValueError(f"loss {name}: {error}") from error
    loss_arguments(loss)
    return loss


def loss_arguments(loss: nn.Module) -> set[str]:
    """The names among `AVAILABLE` that `loss.forward` takes, to be passed as keywords.

    An argument with a default that the trainer does not have keeps its default; `**kwargs` takes everything.
    Raises ValueError if it needs anything else, or does not take `logprobs`, through which the gradient flows.

    Example: `loss_arguments(CustomLoss())` is {"logprobs", "ref_logprobs", "advantages", "padding_mask"}.
    """
    name = type(loss).__name__
    wanted: set[str] = set()
    for parameter in inspect.signature(loss.forward).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            wanted.update(AVAILABLE)
        elif parameter.name in AVAILABLE and parameter.kind is not parameter.POSITIONAL_ONLY:
            wanted.add(parameter.name)
        elif parameter.kind is not parameter.VAR_POSITIONAL and parameter.default is parameter.empty:
            raise ValueError(
                f"the loss {name} asks for {parameter.name!r}, which does not exist here. A loss may name "
                f"{', '.join(AVAILABLE)}.{_hint(parameter.name, AVAILABLE)}"
            )
    require("logprobs" in wanted, f"the loss {name} does not take 'logprobs': without them it has no gradient.")
    return wanted


def needs_reference(loss: nn.Module) -> bool:
    """Whether `loss` cannot do without `ref_logprobs`: a built-in with beta > 0, or a `forward` that requires them."""
    if isinstance(loss, TokenLoss):
        return loss.beta > 0
    parameter = inspect.signature(loss.forward).parameters.get("ref_logprobs")
    return parameter is not None and parameter.default is parameter.empty


def _name_and_args(spec: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(spec, str):
        return spec, {}
    require(
        isinstance(spec, Mapping) and isinstance(spec.get("name"), str) and set(spec) <= {"name", "args"},
        f"loss must be a name, an import path, or {{name: ..., args: {{...}}}}, got {spec!r}.",
    )
    return spec["name"], dict(spec.get("args") or {})


def _find_class(name: str) -> type[nn.Module]:
    if name in LOSSES:
        return LOSSES[name]
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        raise ValueError(
            f"loss {name!r} is not known. There are {', '.join(LOSSES)}; your own is named by its import path, "
            f"as my_losses.MyLoss.{_hint(name, LOSSES)}"
        )
    try:
        found = getattr(importlib.import_module(module_name), attribute, None)
    except Exception as error:  # a user's module may fail in any way while it is imported
        raise ValueError(
            f"loss {name!r} cannot be imported: {type(error).__name__}: {error}. Start the run in the folder "
            "that holds the file, or put that folder on PYTHONPATH."
        ) from error
    if not (inspect.isclass(found) and issubclass(found, nn.Module)):
        what = "does not exist" if found is None else "is not a class derived from torch.nn.Module"
        raise ValueError(f"loss {name!r}: {attribute!r} in {module_name} {what}.")
    return found


def _hint(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
