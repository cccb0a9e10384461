"""A task that a tiny random model learns in a few dozen steps: write letters, in the case that the prompt is in.

A random byte is right one time in ten, so the first answers are scored about 0.1, and differ enough to learn from.
Both cases come up equally often: a model that ignores the prompt stays at 0.5.
"""

from __future__ import annotations

import string

LENGTH = 4  # letters of a full answer; `grpo.max_new_tokens` should be the same

_ALPHABETS = {"lower": string.ascii_lowercase, "upper": string.ascii_uppercase}
_QUESTIONS = {"lower": "letters", "upper": "LETTERS"}


def problem(index: int) -> tuple[str, str]:
    """Question and target of problem `index`, counted from 0. Each index has a question of its own.

    >>> problem(3)
    ('LETTERS 3', 'upper')
    """
    case = ("lower", "upper")[index % 2]
    return f"{_QUESTIONS[case]} {index}", case


def solution(target: str) -> str:
    """An answer that scores 1: the first letters of the alphabet.

    >>> solution("upper")
    'ABCD'
    """
    return _ALPHABETS[target][:LENGTH]


def toy_reward(prompt: str, response: str, target: str) -> float:
    """The part of the four letters asked for that the response has; what is written beyond four counts against it.

    >>> toy_reward("", "abCd", "lower"), toy_reward("", "ab", "lower"), toy_reward("", "abcdefgh", "lower")
    (0.75, 0.5, 1.0)
    """
    alphabet = _ALPHABETS[target]
    return sum(character in alphabet for character in response) / max(len(response), LENGTH)
