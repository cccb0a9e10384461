"""Whatever a user's reward returns or raises: a number to train on, or an error in words for that episode."""

import asyncio
import decimal
import fractions
import json
import math
import sys
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from forge.actors.reward import RewardActor
from forge.data.rewards import LARGEST, NamedReward, RewardError, score
from forge.observability.rollout_log import RolloutLog
from forge.rollout import FailureBudget, RolloutSettings, Score, TooManyFailures, rollout
from forge.service.wire import decode_reply, encode, encode_call
from forge.service.worker import Worker
from forge.types import Completion

QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=50)


class NoRepr:
    def __repr__(self):
        raise RuntimeError("no words for it")


class NoFloat(float):
    def __float__(self):
        raise ZeroDivisionError


class Exits:
    def __float__(self):
        sys.exit(0)


class NoStr(Exception):
    def __str__(self):
        raise RuntimeError("no words for it")


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
SMALL = st.floats(min_value=-10, max_value=10, width=16)
# What stands for a number, and the number.
FINE = (
    st.booleans().map(lambda b: (b, float(b)))
    | st.integers(-(10**20), 10**20).map(lambda i: (i, float(i)))
    | SMALL.flatmap(
        lambda x: st.sampled_from(
            [
                x,
                np.float32(x),
                np.float64(x),
                np.array(x),
                np.array([[x]]),
                torch.tensor(x),
                torch.tensor([x], requires_grad=True),
                torch.tensor(x, dtype=torch.bfloat16).to(torch.float16) * 0 + x,
                fractions.Fraction(x),
                decimal.Decimal(x),
            ]
        ).map(lambda value: (value, x))
    )
    | st.sampled_from([(np.bool_(True), 1.0), (np.int64(-3), -3.0), (torch.tensor(7), 7.0), (LARGEST, LARGEST)])
)
# What does not.
WRONG = (
    st.none()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.complex_numbers()
    | NUMBERS.map(str)
    | st.lists(NUMBERS, max_size=3)
    | st.dictionaries(st.text(max_size=2), NUMBERS, max_size=2)
    | st.sampled_from(
        [
            *(math.nan, math.inf, -math.inf, np.float32("nan"), torch.tensor(math.inf), decimal.Decimal("sNaN")),
            *(10**400, -(10**5000), 1e31, -sys.float_info.max, fractions.Fraction(10**400)),
            *(np.complex64(1), np.array(1 + 2j), torch.tensor(1j), np.array("1.0"), np.str_("1.0"), bytearray(b"1")),
            *(
                memoryview(b"1"),
                np.array([1.0, 2.0]),
                torch.ones(2),
                torch.ones(0),
                np.array(None),
                torch.ones(1, device="meta"),
            ),
            *(object(), NoFloat(1.0), Exits(), float, iter([]), [[]] * 3, {1.0}, np.datetime64("nat")),
        ]
    )
)
RAISED = st.text(max_size=20).flatmap(
    lambda text: st.sampled_from(
        [
            *(ValueError(text), KeyError(text), StopIteration(text), RecursionError(), MemoryError(), NoStr(text)),
            *(SystemExit(0), SystemExit(text), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(text)),
            *(
                BaseExceptionGroup(text, [SystemExit(1)]),
                UnicodeDecodeError("utf-8", b"\xff", 0, 1, text),
                OSError(2, text),
            ),
        ]
    )
)


@dataclass
class Raises:
    error: BaseException


@pytest.fixture(scope="module", autouse=True)
def fuzzed():
    """A module of rewards whose `mine` does with each response what `fuzzed.does` says."""
    module = types.ModuleType("fuzzed")

    def mine(prompt, response, target):
        outcome = module.does[int(response)]
        if isinstance(outcome, Raises):
            raise outcome.error
        return outcome

    module.mine = mine
    sys.modules["fuzzed"] = module
    yield module
    del sys.modules["fuzzed"]


def judged(responses):
    """[Score] as the controller gets them: through the actor, its thread and the pickles of the wire."""

    async def go():
        worker = Worker(0)
        decode_reply(await worker.start(encode((RewardActor, {"rewards": ["fuzzed.mine"]}))))
        return decode_reply(await worker.handle(encode_call("score", (responses,), {}, every_rank_answers=False)))[1]

    return asyncio.run(asyncio.wait_for(go(), 10))


def judge_one(fuzzed, outcome) -> Score:
    fuzzed.does = [outcome]
    [result] = judged([("the prompt", "0", "the target")])
    return result


@QUIET
@given(pair=FINE)
def test_whatever_stands_for_a_number_becomes_that_float(fuzzed, pair):
    returned, expected = pair
    result = judge_one(fuzzed, returned)
    assert (result.error, result.reward, result.rewards) == (None, expected, {"mine": expected})
    assert type(result.reward) is float


@QUIET
@given(returned=WRONG)
@example(returned=10**5000)
def test_whatever_does_not_is_an_error_that_names_the_reward_and_the_sample(fuzzed, returned):
    result = judge_one(fuzzed, returned)
    assert result.rewards == {}
    assert "Reward mine " in result.error
    assert "'the prompt', response '0', target 'the target'" in result.error


def test_a_value_that_cannot_even_be_shown_is_named_by_its_type(fuzzed):
    result = judge_one(fuzzed, NoRepr())
    assert "must return a finite number, got <NoRepr> on prompt" in result.error


@QUIET
@given(error=RAISED)
@example(error=SystemExit(0))
def test_whatever_it_raises_is_an_error_too(fuzzed, error):
    result = judge_one(fuzzed, Raises(error))
    assert f"Reward mine raised {type(error).__name__}: " in result.error


def test_a_persons_ctrl_c_is_not_taken_for_the_rewards():
    """Which arrives in the main thread, where a program of the user's own may call `score`."""

    def interrupted(prompt, response, target):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score([NamedReward("mine", interrupted, 1.0)], "", "", "")


@QUIET
@given(values=st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=4))
def test_a_weighted_sum_is_within_bounds_or_an_error(values):
    rewards = [NamedReward(f"r{i}", lambda *_, value=value: value, weight) for i, (value, weight) in enumerate(values)]
    problem = None
    try:
        total, each = score(rewards, "p", "r", "t")
    except RewardError as error:
        problem = str(error)
    if problem is not None:
        assert "'p', response 'r', target 't'" in problem
    else:
        assert abs(total) <= LARGEST
        assert each == {f"r{i}": value for i, (value, _) in enumerate(values)}


@QUIET
@given(
    outcomes=st.lists(
        FINE.map(lambda pair: pair[0]) | st.sampled_from([LARGEST, -LARGEST, 1e-300]) | WRONG | RAISED.map(Raises),
        min_size=2,
        max_size=5,
    ),
    kind=st.sampled_from(["grpo", "dr_grpo", "rloo"]),
    error_reward=st.none() | SMALL,
)
def test_a_group_with_any_rewards_has_advantages_that_float32_holds_and_lines_of_strict_json(
    fuzzed, tmp_path_factory, outcomes, kind, error_reward
):
    fuzzed.does = outcomes
    sample = types.SimpleNamespace(id="s", prompt="p", prompt_ids=[1], target="t", epoch=0)
    how = RolloutSettings(n_samples=len(outcomes), seq_len=8, advantage=kind, error_reward=error_reward)

    async def generate(prompt_ids, *, n, **_):
        meta = {"policy_version": 0, "finish_reason": "stop"}
        return [Completion(text=str(i), token_ids=[i], logprobs=[-0.5], metadata=meta) for i in range(n)]

    async def judge(responses):
        return await asyncio.to_thread(judged, responses)

    budget = FailureBudget(max_fraction=1.0, minimum=1)
    run = rollout(sample, group_id=0, settings=how, generate=generate, score=judge, budget=budget)
    try:
        group = asyncio.run(run)
    except TooManyFailures:  # all of them
        assert budget.failed == len(outcomes)
        return
    assert len(group.episodes) == len(outcomes) - (budget.failed if error_reward is None else 0)
    assert torch.tensor([e.advantage for e in group.episodes], dtype=torch.float32).isfinite().all()
    path = tmp_path_factory.getbasetemp() / "rollouts.jsonl"
    log = RolloutLog(path)
    log.write(1, [group])
    log.close()
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
