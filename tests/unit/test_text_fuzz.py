"""Whatever a model says: rewards judge it, one line of strict JSON holds it, and the console prints it harmlessly."""

import asyncio
import io
import json
import types

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from forge.data.math_judge import MathJudge
from forge.data.rewards import MathReward, ThinkingReward
from forge.observability.console import Console
from forge.observability.metrics import Metrics
from forge.observability.rollout_log import RolloutLog
from forge.observability.sinks import JsonlSink
from forge.rollout import RolloutSettings, Score, rollout
from forge.testing import toy_reward
from forge.testing.tiny_model import make_byte_tokenizer
from forge.types import Completion

QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=100)

CHARACTERS = st.characters(exclude_categories=())  # halves of characters among them
PIECES = [
    *("<answer>", "</answer>", "<think>", "</think>", "\\boxed", "####", "{", "}", "$", "\\frac", "\\text{", "\\left("),
    *(
        "9^9^9",
        "1/0",
        "0.1",
        "-",
        "1e999",
        "%",
        "\ud800",
        "\udfff",
        "\x00",
        "\x1b[2J",
        "\x85",
        "\u2028",
        "\r\n",
        "\u202e",
    ),
    *(
        "__import__('os').system('x')",
        "{{7*7}}",
        "%s%n",
        "[/bold]",
        "../../x",
        "NaN",
        "٣",
        "ﬁ",
        "🙂",
        '"',
        "\\",
        "\\u0000",
    ),
]
TEXTS = (
    st.text(CHARACTERS, max_size=60)
    | st.lists(st.sampled_from(PIECES) | st.text(CHARACTERS, max_size=3), max_size=30).map("".join)
    | st.builds(lambda piece, times: piece * times, st.sampled_from(PIECES), st.integers(1000, 30_000))
)


@pytest.fixture(autouse=True, scope="module")
def no_math_verify():
    """Which has a process and time limits of its own: see integration/test_math_reward.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MathJudge, "is_equal", lambda self, target, answer: False)
        yield


def strict(line):
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def written(text):
    """What a file can hold of it."""
    return text.encode("utf-8", "replace").decode()


@QUIET
@given(prompt=TEXTS, response=TEXTS, target=TEXTS)
@example(prompt="", response="\\boxed{" * 100_000, target="#### " * 50_000)
@example(prompt="<think>", response="<think>" * 100_000 + "</think>" * 100_000, target="")
@example(prompt="", response="<answer>" + "{" * 299 + "</answer>", target="}" * 299)
@example(prompt="", response="#" * 300_000, target="\\text{" * 49)
def test_rewards_judge_any_text(prompt, response, target):
    for text in (response, f"<answer>{response}</answer>", f"\\boxed{{{response}}}", f"#### {response}"):
        assert MathReward(format=0.1)(prompt, text, target) in (0.0, 0.1, 1.0)
        assert ThinkingReward()(prompt, text, target) in (0.0, 1.0)
        for case in ("lower", "upper"):
            assert 0.0 <= toy_reward(prompt, text, case) <= 1.0


@QUIET
@given(
    texts=st.lists(TEXTS, min_size=2, max_size=4),
    ids=st.lists(st.integers(0, 258), min_size=1, max_size=30),
    error=st.none() | TEXTS,
    name=st.text(CHARACTERS, max_size=10),
)
@example(texts=["\ud800", "\u2028\x85{"], ids=[0], error=None, name="\udcff/7")
def test_any_answers_become_a_group_and_lines_of_strict_json(tmp_path_factory, texts, ids, error, name):
    tokenizer = make_byte_tokenizer()
    texts = [*texts, tokenizer.decode(ids, skip_special_tokens=True)]
    sample = types.SimpleNamespace(id=name, prompt=texts[0], prompt_ids=ids, target=texts[1], epoch=0)
    meta = {"policy_version": 0, "finish_reason": "stop"}

    async def generate(prompt_ids, *, n, **_):
        return [Completion(text=text, token_ids=ids, logprobs=[-0.5] * len(ids), metadata=meta) for text in texts]

    async def score(responses):
        judged = [Score(reward=float(i), rewards={name: float("nan")}) for i in range(len(responses) - 1)]
        return [*judged, Score(rewards={}, error=error)]

    how = RolloutSettings(n_samples=len(texts), seq_len=1000, error_reward=-1.0)
    group = asyncio.run(rollout(sample, group_id=0, settings=how, generate=generate, score=score))
    path = tmp_path_factory.getbasetemp() / "rollouts.jsonl"
    log = RolloutLog(path)
    log.write(1, [group])
    log.close()
    lines = [strict(line) for line in path.read_text(encoding="utf-8").splitlines()]  # however lines are told apart
    assert len(lines) == len(texts)
    for line, text in zip(lines, texts, strict=True):
        assert line["sample"] == written(name)
        if len(text) <= 20_000:
            assert line["response"] == written(text)


@QUIET
@given(
    values=st.dictionaries(
        st.text(CHARACTERS, min_size=1, max_size=10), st.floats() | st.integers(-(2**70), 2**70), max_size=5
    )
)
@example(values={"loss\u2028": float("nan"), "\ud800": float("inf")})
def test_any_metrics_are_one_line_of_strict_json(tmp_path_factory, values):
    path = tmp_path_factory.getbasetemp() / "metrics.jsonl"
    metrics = Metrics()
    metrics.update(values)
    sink = JsonlSink(path)
    sink.write(1, metrics.flush(1))
    sink.close()
    [line] = path.read_text(encoding="utf-8").splitlines()
    assert strict(line)["step"] == 1


@QUIET
@given(text=TEXTS, value=st.floats(), encoding=st.sampled_from(["utf-8", "ascii", "latin-1"]), live=st.booleans())
@example(text="\ud800", value=0.0, encoding="utf-8", live=False)
@example(text="\ud800", value=0.0, encoding="utf-8", live=True)
@example(text="x", value=1e51, encoding="ascii", live=True)
@example(text="\x1b]0;title\x07→", value=float("nan"), encoding="ascii", live=False)
def test_the_console_prints_any_text_and_obeys_none(text, value, encoding, live):
    raw = io.BytesIO()
    with Console(steps=2, stream=io.TextIOWrapper(raw, encoding=encoding, newline=""), live=live) as console:
        console.phase(text)
        console.step(1, {"reward/mean": value, "loss": value, "time/step": 1.0})
        console.warn(text)
        console.note(text)
        console.evaluation(1, {"eval/reward": value})
        console.summary({"eval/reward": value}, {"eval/reward": value}, notes={text: text})
    if not live or encoding != "utf-8":  # else the console itself moves the cursor
        assert not set(raw.getvalue().decode(encoding)) & {*map(chr, [*range(9), *range(11, 32), *range(127, 160)])}
