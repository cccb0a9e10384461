"""Rewards: callables (prompt: str, response: str, target: str) -> float, chosen by import path in the config.

Yours needs no base class and no registration:

    def is_short(prompt: str, response: str, target: str) -> float:
        return 1.0 if len(response) < 100 else 0.0

    rewards: [forge.data.rewards.MathReward, {reward: my_rewards.is_short, weight: 0.1}]

A module of your own is found next to where the program is started, or on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import inspect
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from forge.data.math_answers import MAX_ANSWER, final_answer, normalize, parse_number, same_number
from forge.data.math_judge import MathJudge
from forge.types import UserError

RewardFunction = Callable[[str, str, str], float]

LARGEST = 1e30
"""What a reward, and the weighted sum of all, may be in size: advantages are computed from it in float32, which ends at
3e38, and a group's variance holds its square."""

__all__ = ["MathReward", "NamedReward", "RewardConfigError", "RewardError", "ThinkingReward", "build_rewards", "score"]


class RewardError(Exception):
    """A reward raised, or returned something that is not a finite number, or one beyond `LARGEST`; the message names it
    and the sample."""


class RewardConfigError(UserError):
    """The `rewards` entry of a config is wrong: the user's error, to be told before anything starts."""


class MathReward:
    r"""Is the final answer mathematically equal to the target?

    The final answer is the last one in <answer> tags, in \boxed{} or after ####; a number that stands anywhere else
    counts for nothing. 1,000 = 1000, 1/2 = 0.5 = \frac{1}{2} = 50%; units and currency signs are ignored. What is not
    a plain number is compared by math-verify, in a process with a time limit. A sum that was only copied from the
    question ("4 - 1" for 3) is no answer where the target is a number. The target may be a worked solution that ends
    in one of the three marks, as in gsm8k.

    Args:
        correct: the score of a right answer.
        wrong: the score where there is no final answer.
        format: the score of a final answer that is wrong. 0.1 teaches the form first.
        timeout: CPU seconds that comparing two expressions may take; longer is not equal.

    Example:
        >>> MathReward()("What is 70 + 2?", "That makes <answer>72</answer>", "#### 72")
        1.0
        >>> MathReward(format=0.1)("What is 70 + 2?", "It is 72, so <answer>73</answer>", "72")
        0.1
    """

    def __init__(self, correct: float = 1.0, wrong: float = 0.0, format: float = 0.0, timeout: float = 2.0) -> None:
        if not 0 < timeout <= 60:
            raise ValueError(f"timeout must be over 0 and at most 60 seconds, got {timeout}.")
        self.correct = correct
        self.wrong = wrong
        self.format = format
        self._judge = MathJudge(seconds=timeout)

    def __call__(self, prompt: str, response: str, target: str) -> float:
        answer = final_answer(response)
        if answer is None:
            return self.wrong
        return self.correct if self.is_equal(answer, final_answer(target) or target.strip()) else self.format

    def is_equal(self, answer: str, target: str) -> bool:
        """Whether an answer, already taken out of its marks, equals a target."""
        if not (0 < len(answer) <= MAX_ANSWER and 0 < len(target) <= MAX_ANSWER):
            return False
        number, target_number = parse_number(answer), parse_number(target)
        if number and target_number:
            return same_number(number, target_number)
        if _same_text(answer, target):
            return True
        if target_number and _UNEVALUATED.search(normalize(answer)):
            return False
        return _is_comparable(answer) and _is_comparable(target) and self._judge.is_equal(target, answer)


_UNEVALUATED = re.compile(r"[0-9)}]\s*(?:[-+*×·÷]|\\times|\\cdot|\\div)\s*[0-9({\\.]")
# What math-verify would misread ("72 71" as their sum) or work on for ever (towers of powers, large factorials). The
# worker's time limit stops whatever else is hostile; this saves the common cases that time.
_NOT_COMPARABLE = re.compile(
    r"[0-9]\s+[0-9]|\.\.|dots|[0-9]{40}|[0-9][eE]\+?[0-9]{4}|[0-9]{4}\s*!|!\s*\)?\s*!"
    r"|(?:\^|\*\*)[\s{(-]*[\w.]+[\s})]*(?:\^|\*\*|!)|(?:\^|\*\*)[\s{(-]*[0-9]{4}"
)
_MAX_DEPTH = 12  # of brackets; the parser's time grows exponentially with some of them


def _is_comparable(text: str) -> bool:
    depth = deepest = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, abs(depth))
    return deepest <= _MAX_DEPTH and not _NOT_COMPARABLE.search(normalize(text))


def _same_text(answer: str, target: str) -> bool:
    """Equal but for decoration; words and choices (A, (a)) in either case."""
    one, other = (re.sub(r"^\(([A-Za-z])\)$", r"\1", normalize(text)) for text in (answer, target))
    if one == other:
        return one != ""
    return re.fullmatch(r"[A-Za-z ]+", one) is not None and one.lower() == other.lower()


class ThinkingReward:
    """Does one well-formed, non-empty <think>...</think> block come first, and an answer after it?

    Where the chat template ended the prompt with <think>, the response starts inside the block.

    Args:
        correct: the score if so.
        wrong: the score if not.

    Example:
        >>> ThinkingReward()("2 + 2?", "<think>Two and two make four.</think> <answer>4</answer>", "4")
        1.0
        >>> ThinkingReward()("2 + 2?", "<think> </think> 4", "4")
        0.0
    """

    def __init__(self, correct: float = 1.0, wrong: float = 0.0) -> None:
        self.correct = correct
        self.wrong = wrong

    def __call__(self, prompt: str, response: str, target: str) -> float:
        text = "<think>" + response if prompt.rstrip().endswith("<think>") else response
        text = text.strip()
        if not text.startswith("<think>") or text.count("<think>") != 1 or text.count("</think>") != 1:
            return self.wrong
        thought, _, answer = text.removeprefix("<think>").partition("</think>")
        return self.correct if thought.strip() and answer.strip() else self.wrong


class NamedReward(NamedTuple):
    """A reward of the config, ready to be called."""

    name: str
    function: RewardFunction
    weight: float


def score(rewards: Sequence[NamedReward], prompt: str, response: str, target: str) -> tuple[float, dict[str, float]]:
    """(weighted sum, each reward's own value by name).

    Raises:
        RewardError: a reward raised, or returned something that is not a finite number, or one beyond `LARGEST`.

    Example:
        >>> score(build_rewards([{"reward": "forge.data.rewards.MathReward", "weight": 2.0}]), "", "#### 1", "1")
        (2.0, {'MathReward': 1.0})
    """
    values = {reward.name: _call(reward, prompt, response, target) for reward in rewards}
    total = sum(reward.weight * values[reward.name] for reward in rewards)
    if not abs(total) <= LARGEST:
        raise RewardError(
            f"The weighted sum of the rewards must be within ±{LARGEST:g}, got {total:g} from {values} "
            f"{_sample(prompt, response, target)}."
        )
    return total, values


def _call(reward: NamedReward, prompt: str, response: str, target: str) -> float:
    try:
        returned = reward.function(prompt, response, target)
        value = _number(returned)
    except BaseException as error:  # sys.exit() in a reward, or a panic of a Rust library, ends no run either
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # a person's, not the reward's
        raise RewardError(
            f"Reward {reward.name} raised {type(error).__name__}: {_clip(error, str)} "
            f"{_sample(prompt, response, target)}."
        ) from error
    if not abs(value) <= LARGEST:
        size = f", at most {LARGEST:g} in size" if math.isfinite(value) else ""
        raise RewardError(
            f"Reward {reward.name} must return a finite number{size}, got {_clip(returned)} "
            f"{_sample(prompt, response, target)}."
        )
    return value


def _number(returned: Any) -> float:
    """What a reward returned, as a float; NaN where it is no number, infinity where no float can hold it."""
    scalar = getattr(returned, "item", None)  # NumPy's and torch's scalars are numbers too, a vector of two is not
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        value = scalar() if callable(scalar) else returned
        if not isinstance(value, str | bytes | bytearray | memoryview | complex):
            with contextlib.suppress(OverflowError):
                return float(value)
            return math.inf
    return math.nan


def _sample(prompt: str, response: str, target: str) -> str:
    return f"on prompt {_clip(prompt)}, response {_clip(response)}, target {_clip(target)}"


def _clip(value: Any, show: Callable[[Any], str] = repr) -> str:
    try:
        text = show(value)
    except Exception:  # an integer of too many digits, or somebody's own __repr__
        return f"<{type(value).__name__}>"
    return text if len(text) <= 200 else f"{text[:100]} ... {text[-95:]}"


def build_rewards(entries: Iterable[Any]) -> list[NamedReward]:
    """Rewards from the config's entries, in their order.

    entries: import paths, or {reward, weight, args} as mappings or objects. A class is instantiated with `args`; a
        function gets them as further keyword arguments. The second reward of one name is called Name_2.

    Raises:
        RewardConfigError: no such module or name, arguments that do not fit, not callable, no entry at all.
    """
    built: list[NamedReward] = []
    for entry in entries:
        path, weight, args = _parts(entry)
        function = _instantiate(path, _load(path), args)
        name = path.rpartition(".")[2]
        taken = {reward.name for reward in built}
        names = [name, *(f"{name}_{number}" for number in range(2, len(taken) + 2))]
        built.append(NamedReward(next(free for free in names if free not in taken), function, weight))
    if not built:
        raise RewardConfigError("rewards must name at least one reward, got none: add forge.data.rewards.MathReward.")
    return built


def _parts(entry: Any) -> tuple[str, float, dict[str, Any]]:
    if isinstance(entry, str):
        return entry, 1.0, {}
    if isinstance(entry, Mapping):
        unknown = sorted(set(entry) - {"reward", "weight", "args"})
        if unknown or "reward" not in entry:
            raise RewardConfigError(f"rewards takes entries with reward, weight and args, got {dict(entry)!r}.")
        path, weight, args = entry["reward"], entry.get("weight"), entry.get("args")
    else:
        path, weight, args = entry.reward, entry.weight, entry.args
    weight = 1.0 if weight is None else weight
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise RewardConfigError(f"rewards: the weight of {path} must be a finite number, got {weight!r}.")
    return path, float(weight), dict(args or {})


def _load(path: Any) -> Any:
    """What an import path names."""
    module_name, _, name = str(path).rpartition(".")
    if not module_name:
        raise RewardConfigError(_unknown(path, "must be an import path, module.name"))
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that a user's file hides no installed package
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise RewardConfigError(_unknown(path, f"there is no module {module_name}")) from error
        raise RewardConfigError(f"rewards: {module_name} cannot be imported: {error}.") from error
    except Exception as error:
        raise RewardConfigError(
            f"rewards: {module_name} cannot be imported: {type(error).__name__}: {error}."
        ) from error
    if not hasattr(module, name):
        raise RewardConfigError(_unknown(path, f"{module_name} has no {name}", module=module))
    return getattr(module, name)


def _unknown(path: Any, rule: str, *, module: Any = None) -> str:
    known = [f"{__name__}.{name}" for name in ("MathReward", "ThinkingReward")]
    if module is not None and module.__name__ != __name__:
        known += [f"{module.__name__}.{name}" for name, value in vars(module).items() if callable(value)]
    by_name = {candidate.rpartition(".")[2].lower(): candidate for candidate in known}
    close = difflib.get_close_matches(str(path).rpartition(".")[2].lower(), by_name, n=1)
    hint = f"did you mean {by_name[close[0]]}?" if close else f"built in are {', '.join(known[:2])}."
    return f"rewards: {path!r} is not a reward: {rule}; {hint}"


def _instantiate(path: str, found: Any, args: dict[str, Any]) -> RewardFunction:
    if not callable(found):
        raise RewardConfigError(f"rewards: {path} must be a class or a function, got {type(found).__name__}.")
    make: Callable[..., Any] = found if inspect.isclass(found) else functools.partial(functools.partial, found)
    try:
        function: RewardFunction = make(**args) if args or inspect.isclass(found) else found
    except Exception as error:
        raise RewardConfigError(f"rewards: {path} cannot be made with args {args!r}: {error}") from error
    try:
        inspect.signature(function).bind("prompt", "response", "target")
    except TypeError as error:
        raise RewardConfigError(f"rewards: {path} must take (prompt, response, target): {error}.") from error
    except ValueError:  # built in, with no signature to look at
        pass
    return function
