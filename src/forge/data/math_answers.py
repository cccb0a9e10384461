r"""Where the final answer stands in a text, and what number it is. Plain string work, linear in the text's length.

>>> final_answer("so 70 + 2 = <answer>72</answer>")
'72'
>>> parse_number("$1,000 dollars")
Number(value=Fraction(1000, 1), is_percent=False, places=0)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_ANSWER = 300  # characters; longer is not an answer, and what is shorter is cheap to look at
MAX_EXPONENT = 400  # of ten; what a float64 cannot hold is not an answer either

_OPEN, _CLOSE, _BOXED = "<answer>", "</answer>", "\\boxed"
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*)")
_MAX_CANDIDATES = 8  # unfinished or empty marks that are looked past, from the end

_SPACES = re.compile(r"\\[,;:! ]|\\q?quad\b|[\u00a0\u2009\u202f~]|(?<=[0-9])\{,\}(?=[0-9]{3})")
_SILENT = re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf|operatorname)\s*\{([^{}]*)\}")
_DELIMITERS = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"), ("**", "**"), ("`", "`"))
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")
_CURRENCY = re.compile(r"\\?[$€£¥₹]|\b(?:USD|EUR|GBP|US)\b")
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+(?!\d)|\d+)?(?:\.\d+|\.(?!\d))?"
_TEN = r"(?:\\times|\\cdot|[*x×·])\s*10\s*\^\s*\{?(?P<ten>-?\d{1,3})\}?"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:(?P<whole>\d{{1,9}})\s+(?P<mixed_over>\d+)\s*/\s*(?P<mixed_under>\d+)"
    rf"|(?P<over>{_PLAIN})\s*/\s*(?P<under_sign>-?)\s*(?P<under>{_PLAIN})"
    rf"|(?P<plain>{_PLAIN})(?:[eE](?P<e>[+-]?\d{{1,3}})|\s*{_TEN})?)",
    re.ASCII,
)
_UNIT_WORD = re.compile(r"([A-Za-zµμΩ]{1,20})\.?(?:\^\{?[23]\}?|[²³])?")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\circ\b|°|\\degree\b")
_PERCENT = re.compile(r"\s*(?:\\?%|percent\b|per cent\b)")

_MULTIPLIERS = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
# Letters behind a number that mean something else than a unit. A single letter is a unit only where a space or
# \text{} sets it apart: "5 m" is a length, "5x" and "5m" are products.
_SINGLE_LETTER_UNITS = frozenset("msghLlNJWVAKCFµμΩ")
_MATH_WORDS = frozenset(
    "pi tau phi theta alpha beta gamma delta lambda sigma omega mu nu rho eps epsilon sqrt cbrt root frac sin cos tan "
    "cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp lim max min gcd lcm mod abs floor ceil inf infinity "
    "infty nan and or not to times plus minus over choose cdot pm mp div factorial squared cubed is equals less more "
    "greater than remainder half halves third thirds quarter quarters".split()
)
_GLUED_UNITS = frozenset(
    "km cm mm nm kg mg lb lbs oz ft in yd mi ml mL cl dl kW MW mph kph kmh hr hrs min sec ms am pm AM PM MB GB TB KB "
    "Hz kHz MHz GHz mol cal kcal deg degrees miles meters metres hours minutes seconds days dollars cents "
    "USD EUR GBP".split()
)


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it was written: 50% keeps its sign, since it may be meant as 0.5 or as 50 of a hundred."""

    value: Fraction
    is_percent: bool
    places: int
    """Digits written after the decimal point."""


def final_answer(text: str) -> str | None:
    r"""The last answer in <answer> tags, in \boxed{} or on a line after ####, without its marks; None if there is none.

    An empty one and one longer than 300 characters are none. Marks inside marks are taken off too.

        >>> final_answer(r"<answer>\boxed{\frac{1}{2}}</answer>")
        '\\frac{1}{2}'
        >>> final_answer("It is 72.") is None
        True
    """
    found = max(filter(None, (_last_tagged(text), _last_boxed(text), _last_after_hashes(text))), default=None)
    if found is None:
        return None
    answer = found[1]
    return final_answer(answer) or answer  # each level is shorter than the one around it, and at most 300 characters


def _usable(content: str) -> bool:
    return 0 < len(content) <= MAX_ANSWER


def _last_tagged(text: str) -> tuple[int, str] | None:
    end = len(text)
    for _ in range(_MAX_CANDIDATES):
        close = text.rfind(_CLOSE, 0, end)
        start = text.rfind(_OPEN, 0, close) if close >= 0 else -1
        if start < 0:
            return None
        close = text.find(_CLOSE, start)
        content = text[start + len(_OPEN) : close].strip()
        if _usable(content):
            return close + len(_CLOSE), content
        end = start
    return None


def _last_boxed(text: str) -> tuple[int, str] | None:
    end = len(text)
    for _ in range(_MAX_CANDIDATES):
        end = text.rfind(_BOXED, 0, end)
        if end < 0:
            return None
        start = end + len(_BOXED)
        start += len(text[start : start + 2]) - len(text[start : start + 2].lstrip())
        close = _closing_brace(text, start + 1) if text.startswith("{", start) else None
        if close is not None and _usable(content := text[start + 1 : close].strip()):
            return close + 1, content
    return None


def _closing_brace(text: str, start: int) -> int | None:
    """Where the brace opened just before `start` closes, if within the length of an answer."""
    depth = 1
    for position in range(start, min(len(text), start + MAX_ANSWER + 2)):
        if text[position] in "{}" and text[position - 1] != "\\":
            depth += 1 if text[position] == "{" else -1
            if depth == 0:
                return position
    return None


def _last_after_hashes(text: str) -> tuple[int, str] | None:
    end = len(text)
    for _ in range(_MAX_CANDIDATES):
        start = text.rfind("####", 0, end)
        if start < 0:
            return None
        end = start
        match = _HASHES.match(text, start)
        if match and _usable(content := match.group(1).strip()):
            return match.end(), content
    return None


def normalize(answer: str) -> str:
    r"""The answer without decoration: math delimiters, spacing commands, \text, \left, a full stop at the end.

    >>> normalize(r"$\left( 1{,}000 \right)$.")
    '( 1000 )'
    """
    text = answer.strip()
    for opening, closing in _DELIMITERS:
        bare = text.rstrip(".")
        if len(bare) > len(opening + closing) and bare.startswith(opening) and bare.endswith(closing):
            text = bare[len(opening) : -len(closing)].strip()
    text = _SILENT.sub("", text.replace("−", "-").replace("–", "-"))
    text = _SPACES.sub(lambda match: "" if match.group() in ("{,}", "\\!") else " ", text)
    text = _TEXT.sub(lambda match: f" {match[1].strip()}", text).strip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1]
    return " ".join(text.split())


def parse_number(answer: str) -> Number | None:
    r"""The number that the answer is, or None if it is not just one number with, at most, a unit.

    Understood: signs, thousands in groups, decimals, exponents, a/b, \frac, mixed numbers, %, currency signs, units in
    letters, million and its like, and "x = " or "12 + 4 = " in front.

        >>> parse_number("3/4 cup").value, parse_number("50%").is_percent, parse_number("5x")
        (Fraction(3, 4), True, None)
    """
    text = _CURRENCY.sub(" ", normalize(answer)).rpartition("=")[2]
    text = _FRACTION.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]} ", text).strip()
    if text.startswith("(") and text.endswith(")") and text.count("(") == 1:
        text = text[1:-1].strip()
    match = _NUMBER.match(text)
    value = _value(match) if match else None
    if match is None or value is None:
        return None
    rest = _DEGREES.sub(" degrees ", text[match.end() :])
    percent = _PERCENT.match(rest)
    factor = _unit_factor(rest[percent.end() :] if percent else rest)
    if factor is None:
        return None
    places = len((match["plain"] or "").partition(".")[2])
    return Number(value=value * factor, is_percent=percent is not None, places=places)


def _value(match: re.Match[str]) -> Fraction | None:
    sign = -1 if match["sign"] == "-" else 1
    if match["mixed_under"]:
        under = int(match["mixed_under"])
        return sign * (int(match["whole"]) + Fraction(int(match["mixed_over"]), under)) if under else None
    if match["under"] is not None:
        over, below = _plain(match["over"]), _plain(match["under"])
        if over is None or not below:
            return None
        return sign * over / below * (-1 if match["under_sign"] else 1)
    plain, exponent = _plain(match["plain"]), int(match["e"] or match["ten"] or 0)
    if plain is None or abs(exponent) > MAX_EXPONENT:
        return None
    return sign * plain * Fraction(10) ** exponent


def _plain(digits: str) -> Fraction | None:
    digits = digits.replace(",", "").replace(" ", "").rstrip(".")
    return Fraction(digits) if digits else None


def _unit_factor(rest: str) -> int | None:
    """What the text behind a number multiplies it by: 1 for a unit, 10**6 for million, None if it is something else."""
    words = [word for word in re.split(r"[\s/·*()-]+", rest) if word]
    if not words:
        return 1 if not rest.strip() else None
    is_glued, factor = not rest[0].isspace(), 1
    if not is_glued and words[0].lower() in _MULTIPLIERS:
        factor = _MULTIPLIERS[words.pop(0).lower()]
    matches = [_UNIT_WORD.fullmatch(word) for word in words]
    names = [match[1] for match in matches if match]
    if len(names) < len(words) or len(names) > 6 or (is_glued and names[0] not in _GLUED_UNITS):
        return None
    if any(name.lower() in _MATH_WORDS or (len(name) == 1 and name not in _SINGLE_LETTER_UNITS) for name in names):
        return None
    return factor


def same_number(one: Number, other: Number) -> bool:
    """Whether two written numbers are equal; symmetric.

    50% equals 0.5, and 50 where the percent sign was left off as a unit. A decimal of six or more places equals the
    fraction that it is the rounding of, as in math-verify.

        >>> same_number(parse_number("1/3"), parse_number("0.333333"))
        True
        >>> same_number(parse_number("50%"), parse_number("0.5%"))
        False
    """
    if one.is_percent == other.is_percent:
        return _equal(one, other)
    percent, plain = (one, other) if one.is_percent else (other, one)
    hundredth = Number(value=percent.value / 100, is_percent=False, places=percent.places and percent.places + 2)
    return _equal(percent, plain) or _equal(hundredth, plain)


def _equal(one: Number, other: Number) -> bool:
    if one.value == other.value:
        return True
    rounded, exact = (one, other) if one.places else (other, one)
    return exact.places == 0 and rounded.places >= 6 and round(exact.value, rounded.places) == rounded.value
