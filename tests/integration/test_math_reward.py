"""MathReward with math-verify in its real worker process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from forge.data.math_judge import MathJudge
from forge.data.rewards import MathReward

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def shared() -> Iterator[MathReward]:
    reward = MathReward(timeout=5.0)
    yield reward
    reward._judge.close()


@pytest.fixture
def judge() -> Iterator[MathJudge]:
    judge = MathJudge(seconds=0.5)
    yield judge
    judge.close()


def worker_of(judge: MathJudge) -> psutil.Process:
    assert judge._process is not None
    return psutil.Process(judge._process.pid)


@pytest.mark.parametrize(
    ("answer", "target", "expected"),
    [
        (r"\sqrt{4}", "2", 1.0),
        ("2^3", "8", 1.0),
        ("(x-1)(x+1)", "x^2-1", 1.0),
        ("(1, 2)", "(1,2)", 1.0),
        (r"\{1,2\}", r"\{2,1\}", 1.0),
        (r"2\pi", r"\pi \cdot 2", 1.0),
        ("x > 3", "3 < x", 1.0),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", 1.0),
        (r"\sqrt{5}", "2", 0.0),
        ("5x", "5", 0.0),
        (r"2\pi", "2", 0.0),
        ("there are 72 of them", "72", 0.0),
        ("1, 2, 3", "3", 0.0),
        ("(1, 3)", "(1,2)", 0.0),
        (r"\frac{1", "1", 0.0),
    ],
)
def test_expressions_are_compared_mathematically(answer: str, target: str, expected: float, shared: MathReward) -> None:
    assert shared("", f"<answer>{answer}</answer>", target) == expected


def test_the_worker_imports_no_torch(shared: MathReward) -> None:
    shared("", r"#### \sqrt{4}", "2")
    worker = worker_of(shared._judge)
    assert not [entry.path for entry in worker.memory_maps() if "libtorch" in entry.path]


@pytest.mark.parametrize(
    "hostile",
    [
        "(1+x)^{9000}(1-x)^{9000}",  # the algebra takes too long
        r"\sin(" * 60 + "x" + ")" * 60,  # the parser does
        "(2^{9999999})^{9999999}",  # one operation of the interpreter does, or fills the memory
        "(" * 150,
    ],
)
def test_a_hostile_comparison_ends_in_time_and_the_next_one_is_right(hostile: str, judge: MathJudge) -> None:
    judge.is_equal("1", "1")  # starts the worker
    start = time.monotonic()
    assert judge.is_equal("7", hostile) is False
    assert time.monotonic() - start < 4 * judge.seconds + 1.0  # seconds of CPU, four times that on the clock
    assert judge.is_equal("8", "2^3") is True


def test_a_worker_that_was_killed_is_replaced(judge: MathJudge) -> None:
    assert judge.is_equal("8", "2^3") is True
    worker = worker_of(judge)
    worker.send_signal(signal.SIGKILL)
    worker.wait(timeout=10)
    assert judge.is_equal("8", "2^3") is True


def test_a_stopped_worker_is_given_up_and_replaced(judge: MathJudge) -> None:
    assert judge.is_equal("8", "2^3") is True
    worker = worker_of(judge)
    worker.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    assert judge.is_equal("8", "2^3") is False
    assert time.monotonic() - start < 4 * judge.seconds + 1.0
    assert judge.is_equal("8", "2^3") is True


def test_threads_share_one_worker_and_get_their_own_answers() -> None:
    reward = MathReward(timeout=10.0)
    pairs = [(f"{n}^2", str(n * n), 1.0) for n in range(2, 10)] + [(f"{n}^2", str(n), 0.0) for n in range(2, 10)]
    results: dict[int, float] = {}

    def ask(index: int) -> None:
        results[index] = reward("", f"#### {pairs[index][0]}", pairs[index][1])

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(pairs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    reward._judge.close()
    assert [results[index] for index in range(len(pairs))] == [expected for _, _, expected in pairs]


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_worker_ends_with_its_parent_however_that_died(is_busy: bool) -> None:
    code = f"""
        import sys, threading
        sys.path.insert(0, {str(SOURCE)!r})
        from forge.data.math_judge import MathJudge
        judge = MathJudge(seconds=1.0)
        judge.is_equal("8", "2^3")
        print("ready", flush=True)
        if {is_busy}:
            judge.is_equal("7", "(1+x)^{{9000}}(1-x)^{{9000}}")
        sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        time.sleep(0.3)
        (worker,) = psutil.Process(parent.pid).children()
        parent.kill()
    worker.wait(timeout=20)  # at once if idle, after its CPU second if busy


def test_a_forked_child_uses_a_worker_of_its_own(judge: MathJudge) -> None:
    assert judge.is_equal("8", "2^3") is True
    worker = worker_of(judge)
    child = os.fork()
    if child == 0:
        ok = judge.is_equal("8", "2^3")
        judge.close()
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert worker.is_running()
    assert judge.is_equal("9", "3^2") is True


def test_a_worker_that_cannot_start_says_what_to_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"did not start \(exit status 1\).*install math-verify"):
        MathJudge(seconds=1.0).is_equal("8", "2^3")
