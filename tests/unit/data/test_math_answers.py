from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.data.math_answers import MAX_ANSWER, final_answer, normalize, parse_number, same_number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so <answer>72</answer>.", "72"),
        (r"so $\boxed{72}$.", "72"),
        ("72 in all\n#### 72", "72"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"<answer>\boxed{7}</answer>", "7"),
        ("#### <answer>7</answer>", "7"),
        ("<answer> 3 </answer> no: <answer>4</answer>", "4"),
        (r"\boxed{3} no: \boxed{4}", "4"),
        ("#### 3\n#### 4", "4"),
        (r"<answer>1</answer> \boxed{2}", "2"),
        (r"\boxed{2} <answer>1</answer>", "1"),
        ("<answer>5</answer> then <answer>6", "5"),
        (r"\boxed{5} then \boxed{6", "5"),
        ("<answer></answer>", None),
        (r"\boxed{}", None),
        ("####\n", None),
        ("the answer is 72", None),
        ("##### 72", None),
        ("<answer>72", None),
        ("", None),
    ],
)
def test_the_final_answer_is_the_last_one_in_marks(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_an_answer_longer_than_the_limit_is_none() -> None:
    assert final_answer(f"<answer>{'1' * MAX_ANSWER}</answer>") == "1" * MAX_ANSWER
    assert final_answer(f"<answer>{'1' * (MAX_ANSWER + 1)}</answer>") is None


@pytest.mark.parametrize("piece", ["<answer>", "</answer>", r"\boxed{", "{", "####", "#### \n", "<answer></answer>"])
def test_looking_for_the_answer_takes_time_linear_in_the_text(piece: str) -> None:
    start = time.process_time()
    final_answer(piece * (2_000_000 // len(piece)))
    assert time.process_time() - start < 1.0  # 0.05 s; quadratic time would be hours


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", 72),
        ("-5", -5),
        ("−5", -5),
        ("+5", 5),
        ("007", 7),
        ("72.", 72),
        ("72.50", Fraction(145, 2)),
        (".5", Fraction(1, 2)),
        ("1,000", 1000),
        ("1,234,567.5", Fraction(2469135, 2)),
        (r"1{,}000", 1000),
        (r"1\,000", 1000),
        ("1 000", 1000),
        ("1/2", Fraction(1, 2)),
        ("-3/4", Fraction(-3, 4)),
        ("3/-4", Fraction(-3, 4)),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"\dfrac12", Fraction(1, 2)),
        (r"-\tfrac{3}{4}", Fraction(-3, 4)),
        ("1 1/2", Fraction(3, 2)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        ("1.5e3", 1500),
        (r"3 \times 10^{5}", 300_000),
        ("3*10^-2", Fraction(3, 100)),
        ("$72", 72),
        (r"\$72.00", 72),
        ("$72$", 72),
        ("€72", 72),
        ("72 dollars", 72),
        ("72 USD", 72),
        ("72 apples", 72),
        ("10 miles per hour", 10),
        ("10 m/s", 10),
        ("5cm", 5),
        ("5 m", 5),
        (r"5\text{ cm}^2", 5),
        (r"60^\circ", 60),
        ("60°", 60),
        ("2 million", 2_000_000),
        ("x = 5", 5),
        ("12 + 4 = 16", 16),
        ("(72)", 72),
        (r"\left(72\right)", 72),
        ("**72**", 72),
        (r"\(72\)", 72),
        (r"\text{72}", 72),
    ],
)
def test_a_number_is_understood_in_all_the_ways_it_is_written(text: str, value: int | Fraction) -> None:
    number = parse_number(text)
    assert number is not None
    assert (number.value, number.is_percent) == (value, False)


@pytest.mark.parametrize("text", ["50%", r"50\%", "50 %", "50 percent", r"$50\%$"])
def test_percent_is_kept_apart_from_the_number(text: str) -> None:
    number = parse_number(text)
    assert number is not None
    assert (number.value, number.is_percent) == (50, True)


@pytest.mark.parametrize(
    "text",
    [
        *("", ".", "-", "/", "abc", "five", "5x", "5 x", "5m", "2pi", "2 pi", r"2\pi", "3i", "2 sqrt", "half"),
        *("1,00", "1,0000", "1,2,3", "1, 2", "(1,2)", "71 or 72", "72 73", "72 and 73", "4 - 1", "2^3", "1/0", "1 1/0"),
        *(
            "there are 72",
            "1/2/3",
            "5/",
            "1e999",
            "1..2",
            "1.2.3",
            "\u0665",
            "\uff15",
            "5 apples and 3 pears",
            "3 x 10",
        ),
    ],
)
def test_what_is_not_just_one_number_is_not_a_number(text: str) -> None:
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1,000", "1000", True),
        ("1/2", "0.5", True),
        ("50%", "0.5", True),
        ("50%", "50", True),
        ("50%", "50%", True),
        ("50%", "5000%", False),
        ("50%", "0.5%", False),
        ("1/3", "0.333333", True),
        ("1/3", "0.3333333333", True),
        ("2/3", "0.666667", True),
        ("2/3", "0.666666", False),
        ("1/3", "0.33", False),
        ("33.333333%", "1/3", True),
        ("1", "0.9999999", False),
        ("0.1234567", "0.123457", False),
        ("5", "-5", False),
        ("72", "720", False),
    ],
)
def test_numbers_are_compared_by_value_in_either_order(one: str, other: str, same: bool) -> None:
    first, second = parse_number(one), parse_number(other)
    assert first is not None
    assert second is not None
    assert same_number(first, second) is same
    assert same_number(second, first) is same


def _spellings(value: Fraction) -> list[str]:
    over, under = value.numerator, value.denominator
    sign, size = ("-" if over < 0 else ""), abs(over)
    spelt = [
        f"{over}/{under}",
        rf"{sign}\frac{{{size}}}{{{under}}}",
        rf"${sign}\dfrac{{{size:,}}}{{{under}}}$",
        f"x = {over}/{under}",
        f"{over}/{under} apples",
    ]
    if under == 1:
        spelt += [
            f"{over}",
            f"{over:,}",
            f"{over}.0",
            f"{sign}${size:,}",
            f"{over} cm",
            f"{over * 100}%",
            f"{over:.2e}",
        ]
        spelt = spelt if float(f"{over:.2e}") == over else spelt[:-1]
    if 10**4 % under == 0:
        spelt += [f"{over * (10**4 // under) / 10**4:.4f}"]
    return spelt


fractions = st.builds(Fraction, st.integers(-(10**9), 10**9), st.sampled_from([1, 1, 2, 3, 4, 7, 8, 625]))


@given(fractions, fractions, st.data())
def test_all_spellings_of_a_number_are_equal_and_none_of_another(
    value: Fraction, other: Fraction, data: st.DataObject
) -> None:
    one, two = (parse_number(data.draw(st.sampled_from(_spellings(value)))) for _ in range(2))
    assert one is not None
    assert two is not None
    assert same_number(one, two)
    assert same_number(two, one)
    plain = parse_number(f"{other.numerator}/{other.denominator}")
    assert plain is not None
    expected = other in ({value, value * 100} if one.is_percent else {value})
    assert same_number(one, plain) == same_number(plain, one) == expected


@given(st.text(max_size=MAX_ANSWER) | st.text("0123456789.,/%$ \\{}()-+e^frac", max_size=MAX_ANSWER))
def test_no_text_makes_the_parser_fail(text: str) -> None:
    normalize(text)
    number = parse_number(text)
    assert number is None or isinstance(number.value, Fraction)


@pytest.mark.parametrize(
    "piece", ["1 ", "1,", "1,000", "9", "/", "(", " ", "\\frac", "-", "a ", "\\text{", "1 000 ", "e9"]
)
def test_no_repetition_makes_the_parser_slow(piece: str) -> None:
    text = (piece * MAX_ANSWER)[:MAX_ANSWER]
    start = time.process_time()
    for _ in range(10):
        parse_number(text)
    assert time.process_time() - start < 0.5  # 5 ms


def test_normalizing_takes_off_decoration_alone() -> None:
    assert normalize(r" $\left( 1{,}000 \right)$. ") == "( 1000 )"
    assert normalize(r"x^2 + 1") == "x^2 + 1"
