from __future__ import annotations

import math
import pickle
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.data.math_judge import MathJudge
from forge.data.rewards import (
    MathReward,
    NamedReward,
    RewardConfigError,
    RewardError,
    ThinkingReward,
    build_rewards,
    score,
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What math-verify is asked to compare; its answer here is always no."""
    pairs: list[tuple[str, str]] = []

    def is_equal(self: MathJudge, target: str, answer: str) -> bool:
        pairs.append((target, answer))
        return False

    monkeypatch.setattr(MathJudge, "is_equal", is_equal)
    return pairs


@pytest.mark.parametrize(
    ("answer", "target", "expected"),
    [
        ("72", "72", 1.0),
        ("1,000", "1000", 1.0),
        ("1/2", "0.5", 1.0),
        ("50%", "0.5", 1.0),
        (r"\frac{1}{2}", "0.5", 1.0),
        ("$72", "72", 1.0),
        ("72 apples", "72", 1.0),
        ("A", "(a)", 1.0),
        ("yes", "Yes", 1.0),
        ("73", "72", 0.0),
        ("72", "7", 0.0),
        ("172", "72", 0.0),
        ("1 72", "72", 0.0),
        ("72 73", "72", 0.0),
        ("x", "X+1", 0.0),
    ],
)
def test_math_reward_compares_the_final_answer_by_value(
    answer: str, target: str, expected: float, asked: list[tuple[str, str]]
) -> None:
    assert MathReward()("", f"so <answer>{answer}</answer>", target) == expected


def test_a_digit_string_outside_the_marks_earns_nothing(asked: list[tuple[str, str]]) -> None:
    reward = MathReward()
    assert reward("", "72", "72") == 0.0
    assert reward("", "It is 72.", "72") == 0.0
    assert reward("", "72 or <answer>71</answer>", "72") == 0.0
    assert reward("", "<answer>there are 72</answer>", "72") == 0.0
    assert reward("", "<answer>70, 71, 72, 73</answer>", "72") == 0.0


def test_the_target_may_be_a_worked_solution(asked: list[tuple[str, str]]) -> None:
    solution = "She has 40 + 32 = <<40+32=72>>72 clips.\n#### 72"
    assert MathReward()("", r"\boxed{72}", solution) == 1.0
    assert MathReward()("", r"\boxed{40}", solution) == 0.0
    assert MathReward()("", "#### 1/2", r"Thus $\boxed{\frac{1}{2}}$.") == 1.0


def test_the_three_scores_are_for_right_wrong_but_well_formed_and_no_answer(asked: list[tuple[str, str]]) -> None:
    reward = MathReward(correct=2.0, wrong=-1.0, format=0.1)
    assert [reward("", text, "4") for text in ("#### 4", "#### 5", "4")] == [2.0, 0.1, -1.0]


def test_a_sum_copied_from_the_question_is_no_answer(asked: list[tuple[str, str]]) -> None:
    for copied in ("4 - 1", "1+2", r"1 \cdot 3", "(4) - (1)", "6 ÷ 2"):
        assert MathReward()("4 - 1 =", f"<answer>{copied}</answer>", "3") == 0.0
    assert MathReward()("4 - 1 =", "<answer>4 - 1 = 3</answer>", "3") == 1.0
    assert asked == []


def test_numbers_are_compared_without_math_verify_and_expressions_with_it(asked: list[tuple[str, str]]) -> None:
    reward = MathReward()
    reward("", "#### 1/2", "0.5")
    reward("", "#### 5", "6")
    assert asked == []
    reward("", r"#### \sqrt{4}", "2")
    reward("", "#### (x-1)(x+1)", "x^2-1")
    assert asked == [("2", r"\sqrt{4}"), ("x^2-1", "(x-1)(x+1)")]


@pytest.mark.parametrize(
    "hostile",
    [
        *("9^9^9^9", "9^{9^{9}}", "9**9**9", "2^{99999}", "99999!", "3!!!", "((3!)!)!", "1" * 200, "1" * 301),
        *("(" * 100 + "1" + ")" * 100, r"\frac{" * 40 + "1" + "}" * 40, "}" * 50, "1e999999999"),
        *("72 71", "1 ... 9", r"72\ldots 71"),
    ],
)
def test_hostile_answers_earn_nothing_and_do_not_reach_math_verify(hostile: str, asked: list[tuple[str, str]]) -> None:
    assert MathReward()("", f"<answer>{hostile}</answer>", "143") == 0.0
    assert asked == []


@pytest.mark.parametrize("odd", ["", " ", "\x00", "\ud800", "٣", "{", "<answer>" * 20, "$" * 299, "<answer>" * 10**5])
def test_odd_answers_earn_nothing_in_any_marks(odd: str, asked: list[tuple[str, str]]) -> None:
    for response in (f"<answer>{odd}</answer>", rf"\boxed{{{odd}}}", f"#### {odd}"):
        assert MathReward()("", response, "143") == 0.0


@given(st.text(), st.text(max_size=50))
def test_math_reward_gives_a_finite_number_for_any_text(response: str, target: str) -> None:
    reward = MathReward()
    reward._judge.is_equal = lambda target, answer: False  # type: ignore[method-assign]
    for text in (response, f"<answer>{response}</answer>", f"#### {response}", rf"\boxed{{{response}}}"):
        assert reward("", text, target) in (0.0, 1.0)


def test_math_reward_travels_to_another_process_by_pickling(asked: list[tuple[str, str]]) -> None:
    copy = pickle.loads(pickle.dumps(MathReward(format=0.1)))
    assert copy("", "#### 5", "4") == 0.1


def test_a_time_limit_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="timeout must be over 0"):
        MathReward(timeout=0)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>Two and two.</think> 4", 1.0),
        ("  <think>\nTwo\n</think>\n<answer>4</answer>", 1.0),
        ("<think></think> 4", 0.0),
        ("<think> \n </think> 4", 0.0),
        ("<think>Two and two.</think>", 0.0),
        ("<think>Two and two.</think>  \n", 0.0),
        ("<think>Two and two. 4", 0.0),
        ("Two and two.</think> 4", 0.0),
        ("</think>x<think> 4", 0.0),
        ("<think>a</think><think>b</think> 4", 0.0),
        ("<think><think>a</think></think> 4", 0.0),
        ("4 <think>Two and two.</think> 4", 0.0),
        ("4", 0.0),
        ("", 0.0),
    ],
)
def test_thinking_reward_wants_one_thought_before_the_answer(response: str, expected: float) -> None:
    assert ThinkingReward()("2 + 2?", response, "4") == expected


def test_a_thought_that_the_template_opened_counts() -> None:
    reward = ThinkingReward()
    assert reward("2 + 2?<|assistant|><think>\n", "Two and two.</think> 4", "4") == 1.0
    assert reward("2 + 2?<|assistant|><think>\n", "</think> 4", "4") == 0.0
    assert reward("2 + 2?<|assistant|><think>\n", "<think>again</think> 4", "4") == 0.0
    assert reward("Use <think>. 2 + 2?", "Two and two.</think> 4", "4") == 0.0


# --- rewards from the config

MATH = "forge.data.rewards.MathReward"


def test_entries_are_paths_mappings_or_objects() -> None:
    entries = [
        MATH,
        {"reward": "forge.data.rewards.ThinkingReward", "weight": 0.5},
        SimpleNamespace(reward="forge.testing.toy_reward", weight=2, args={}),
    ]
    built = build_rewards(entries)
    assert [(reward.name, reward.weight) for reward in built] == [
        ("MathReward", 1.0),
        ("ThinkingReward", 0.5),
        ("toy_reward", 2.0),
    ]
    assert built[2].function("", "abcd", "lower") == 1.0


def test_arguments_go_to_the_class_or_the_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shaped_rewards.py").write_text(
        "def short(prompt, response, target, limit):\n    return len(response) / limit\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    built = build_rewards(
        [{"reward": MATH, "args": {"format": 0.25}}, {"reward": "shaped_rewards.short", "args": {"limit": 10}}]
    )
    assert [reward.function("", "#### 5", "4") for reward in built] == [0.25, 0.6]


def test_two_rewards_of_one_name_are_told_apart() -> None:
    assert [reward.name for reward in build_rewards([MATH, MATH, MATH])] == [
        "MathReward",
        "MathReward_2",
        "MathReward_3",
    ]


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_rewards.py").write_text(
        "class Nice:\n    def __call__(self, prompt, response, target):\n        return 1\n"
    )
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    (reward,) = build_rewards(["my_own_rewards.Nice"])
    assert reward.function("", "", "") == 1


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("MathReward", "must be an import path.*did you mean forge.data.rewards.MathReward"),
        ("forge.data.rewards.MathRewrad", "has no MathRewrad; did you mean forge.data.rewards.MathReward"),
        ("forge.data.reward.MathReward", "no module forge.data.reward; did you mean forge.data.rewards.MathReward"),
        ("no_such_package.Reward", "no module no_such_package"),
        ("forge.testing.toy_task.toy_rewrad", "did you mean forge.testing.toy_task.toy_reward"),
        ("forge.testing.toy_task.LENGTH", "must be a class or a function, got int"),
        ({"reward": MATH, "args": {"colour": 1}}, r"MathReward cannot be made with args \{'colour': 1\}"),
        ({"reward": MATH, "args": {"timeout": -1}}, "timeout must be over 0"),
        ({"reward": MATH, "weight": "2"}, "weight of forge.data.rewards.MathReward must be a finite number, got '2'"),
        ({"reward": MATH, "weight": math.nan}, "must be a finite number, got nan"),
        ({"reward": MATH, "wieght": 1}, "entries with reward, weight and args"),
        ("forge.testing.toy_task.problem", r"problem must take \(prompt, response, target\)"),
    ],
)
def test_a_wrong_entry_is_refused_with_value_rule_and_fix(entry: Any, message: str) -> None:
    with pytest.raises(RewardConfigError, match=message):
        build_rewards([entry])


def test_a_module_that_fails_to_import_is_told_apart_from_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_rewards.py").write_text("import not_installed_here\n")
    (tmp_path / "failing_rewards.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RewardConfigError, match="cannot be imported: No module named 'not_installed_here'"):
        build_rewards(["broken_rewards.Nice"])
    with pytest.raises(RewardConfigError, match="cannot be imported: ZeroDivisionError"):
        build_rewards(["failing_rewards.Nice"])


def test_no_reward_at_all_is_refused() -> None:
    with pytest.raises(RewardConfigError, match="at least one reward"):
        build_rewards([])


# --- the total


def _returning(value: Any, name: str = "mine", weight: float = 1.0) -> NamedReward:
    return NamedReward(name, lambda prompt, response, target: value, weight)


def test_the_total_is_the_weighted_sum() -> None:
    total, each = score([_returning(1.0, "a", 2.0), _returning(0.5, "b", -1.0)], "p", "r", "t")
    assert total == 1.5
    assert each == {"a": 1.0, "b": 0.5}


def test_anything_that_is_a_number_will_do() -> None:
    for value in (1, True, np.float32(1.0), Fraction(1)):
        total, each = score([_returning(value)], "", "", "")
        assert (total, type(each["mine"])) == (1.0, float)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "1.0", [1.0], object()])
def test_what_is_no_finite_number_is_an_error_that_names_reward_value_and_sample(value: Any) -> None:
    with pytest.raises(RewardError) as caught:
        score([_returning(value)], "the prompt", "the response", "the target")
    for part in ("mine", repr(value)[:20], "'the prompt'", "'the response'", "'the target'"):
        assert part in str(caught.value)


def test_a_reward_that_raises_is_an_error_with_its_cause() -> None:
    def raises(prompt: str, response: str, target: str) -> float:
        raise KeyError("colour")

    with pytest.raises(RewardError, match="Reward mine raised KeyError: 'colour' on prompt 'p'") as caught:
        score([NamedReward("mine", raises, 1.0)], "p", "r", "t")
    assert isinstance(caught.value.__cause__, KeyError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_long_sample_is_shortened_in_the_message() -> None:
    with pytest.raises(RewardError) as caught:
        score([_returning(math.nan)], "x" * 10_000, "y" * 10_000, "t")
    assert len(str(caught.value)) < 1000


def test_importing_the_rewards_imports_neither_torch_nor_sympy() -> None:
    source = Path(__file__).parents[3] / "src"
    code = (
        f"import sys; sys.path.insert(0, {str(source)!r}); import forge.data.rewards; "
        "print([name for name in ('torch', 'sympy', 'math_verify', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
