"""The generator in a process of its own, with vLLM on a tiny model; what it says is held against transformers."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from forge.actors.engine_loop import EngineStopped
from forge.actors.generator import Generator
from forge.service import ActorHandle
from forge.testing.tiny_model import EOS, IM_END, make_tiny_model
from forge.types import Completion

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the generator's process cannot import this module

MAX_LEN = 256
PROMPT = "<|im_start|>user\nWrite something, at some length so that the prompt fills some blocks<|im_end|>\n"


class FolderOfVersions:
    """A weight source for tests: version v is the file v.safetensors of a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    async def fetch(self, version: int) -> dict[str, Tensor]:
        return load_file(f"{self.folder}/{version}.safetensors")


class TestGenerator(Generator):
    """A generator that tests can break."""

    __test__ = False  # not a class of tests

    async def break_engine(self) -> None:
        def fail() -> None:
            raise ZeroDivisionError("the GPU fell out")

        await self._loop.call(lambda engine: setattr(engine, "step", fail))

    def cpu_seconds(self) -> float:
        return time.process_time()


@dataclass
class Bench:
    """One generator for all the tests of this module, and the models that its versions 0, 1, 2, ... are."""

    loop: asyncio.AbstractEventLoop
    generator: ActorHandle
    versions: Path
    models: list[torch.nn.Module]

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 120))

    def generate(self, prompt: str | list[int], **sampling: Any) -> list[Completion]:
        return self.run(self.generator.generate.call(prompt, **sampling))

    def update(self, version: int, **how: Any) -> dict[str, float]:
        return self.run(self.generator.update_weights.call(version, **how))

    def version(self) -> int:
        return int(self.run(self.generator.stats.call())["version"])

    async def stats_when(self, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        while not condition(stats := await self.generator.stats.call()):  # noqa: ASYNC110 - it is in another process
            await asyncio.sleep(0.01)
        return dict(stats)

    def publish(self) -> int:
        """Weights that nobody has seen yet; their version."""
        version = len(self.models)
        folder = make_tiny_model(self.versions / "new", seed=version)
        self.models.append(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        shutil.move(folder / "model.safetensors", self.versions / f"{version}.safetensors")
        return version


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("generator")
    model = make_tiny_model(folder / "model", seed=0)
    loop = asyncio.new_event_loop()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # the generator knows how little it needs
        generator = loop.run_until_complete(
            TestGenerator.options(threads=1).as_actor(
                model=str(model),
                dtype="float32",
                max_model_len=MAX_LEN,
                max_num_seqs=32,
                seed=1,
                weights=FolderOfVersions(str(folder)),
            )
        )
    yield Bench(loop, generator, folder, [AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)])
    loop.run_until_complete(generator.shutdown())
    loop.close()


def reference(
    model: torch.nn.Module, prompt: str | list[int], completion: Completion, *, temperature: float
) -> list[float]:
    """What transformers thinks of the sampled tokens."""
    prompt_ids = ids_of(prompt)
    ids = torch.tensor([prompt_ids + completion.token_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt_ids) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt_ids) :, None])[:, 0].tolist()


def ids_of(prompt: str | list[int]) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    text = prompt.replace("<|im_start|>", "\x01").replace("<|im_end|>", "\x02")  # one byte for one special token
    return [{1: 258, 2: 259}.get(byte, byte) for byte in text.encode()]


def difference(completion: Completion, expected: list[float]) -> float:
    """Mean absolute difference of the log-probabilities."""
    assert len(completion.logprobs) == len(completion.token_ids) == len(expected) > 0
    return sum(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)) / len(expected)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("prompt", [PROMPT, [7, 8, 9]], ids=["text", "ids"])
def test_logprobs_are_those_of_transformers_at_the_sampling_temperature(
    bench: Bench, prompt: str | list[int], temperature: float
) -> None:
    model = bench.models[bench.version()]
    for completion in bench.generate(prompt, n=4, temperature=temperature, max_new_tokens=40):
        assert difference(completion, reference(model, prompt, completion, temperature=temperature)) < 1e-5
        assert difference(completion, reference(model, prompt, completion, temperature=0.9)) > 1e-3


def test_temperature_zero_takes_the_likeliest_token_each_time(bench: Bench) -> None:
    model = bench.models[bench.version()]
    first, second = bench.generate(PROMPT, n=2, temperature=0.0, max_new_tokens=8)
    assert first.token_ids == second.token_ids
    ids = torch.tensor([ids_of(PROMPT) + first.token_ids])
    with torch.no_grad():
        best = model(ids).logits[0, -len(first.token_ids) - 1 : -1].argmax(-1).tolist()
    assert first.token_ids == best
    assert difference(first, reference(model, PROMPT, first, temperature=1.0)) < 1e-5


def test_samples_of_one_prompt_differ_and_their_text_is_that_of_their_tokens(bench: Bench) -> None:
    completions = bench.generate([65, 66], n=8, max_new_tokens=12)
    assert len({tuple(c.token_ids) for c in completions}) == 8
    for completion in completions:
        text = bytes(token for token in completion.token_ids if token < 256).decode(errors="replace")
        assert completion.text == text


def test_the_end_of_turn_token_belongs_to_the_completion_and_ends_it(bench: Bench) -> None:
    """One token in 130 is one of the two, so of 64 completions of up to 200 tokens most end with it."""
    model = bench.models[bench.version()]
    completions = bench.generate([65], n=64, max_new_tokens=200)
    ended = [c for c in completions if c.metadata["finish_reason"] == "stop"]
    assert len(ended) > 20
    assert {c.token_ids[-1] for c in ended} == {EOS, IM_END}  # both are in generation_config.json
    for completion in ended:
        assert not {EOS, IM_END} & set(completion.token_ids[:-1])
        assert "<|" not in completion.text
        assert difference(completion, reference(model, [65], completion, temperature=1.0)) < 1e-5
    for completion in completions:
        if completion not in ended:
            assert len(completion.token_ids) == 200
            assert completion.metadata["finish_reason"] == "length"


@pytest.mark.parametrize("room", [3, 1])
def test_a_completion_that_fills_the_context_is_reported_as_truncated(bench: Bench, room: int) -> None:
    """One token in 65 ends a completion, so of 32 with room for three most are cut."""
    completions = bench.generate([65] * (MAX_LEN - room), n=32, max_new_tokens=50)
    cut = [c for c in completions if c.metadata["finish_reason"] == "length"]
    assert len(cut) > 16
    assert {len(c.token_ids) for c in cut} == {room}
    for completion in completions:
        if completion not in cut:
            assert completion.metadata["finish_reason"] == "stop"
            assert len(completion.token_ids) <= room


def test_a_stop_string_cuts_the_text_but_not_the_tokens(bench: Bench) -> None:
    for completion in bench.generate([65], n=8, stop=["a", "e", "o"], max_new_tokens=240):
        if completion.metadata["stop_reason"] in ("a", "e", "o"):
            stop = completion.metadata["stop_reason"]
            assert completion.metadata["finish_reason"] == "stop"
            assert completion.token_ids[-1] == ord(stop)
            assert stop not in completion.text
            break
    else:
        pytest.fail("no completion met a stop string")


def test_a_stop_token_ends_the_completion_and_is_named(bench: Bench) -> None:
    stops = list(range(97, 123))  # one token in ten
    [completion] = bench.generate([65], stop_token_ids=stops, max_new_tokens=240)
    assert completion.token_ids[-1] in stops
    assert completion.metadata["stop_reason"] == completion.token_ids[-1]
    assert not set(stops) & set(completion.token_ids[:-1])


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([1] * MAX_LEN, {}, r"the prompt has 256 tokens; it must have 1 to 255"),
        ([], {}, r"the prompt has 0 tokens"),
        ([1], {"n": 0}, r"n must be at least 1, got 0"),
        ([1], {"temperature": -1.0}, r"temperature must be 0 \(greedy\) or more, got -1.0"),
        ([1], {"top_p": 0.0}, r"top_p must be above 0 and at most 1, got 0.0"),
        ([1], {"max_new_tokens": 0}, r"max_new_tokens must be at least 1, got 0"),
        ([260], {}, r"(?i)vocab"),
    ],
)
def test_what_cannot_be_generated_is_refused_and_harms_nobody(
    bench: Bench, prompt: list[int], sampling: dict[str, Any], message: str
) -> None:
    async def both() -> tuple[Any, Any]:
        good = bench.generator.generate.call([65], max_new_tokens=3)
        bad = bench.generator.generate.call(prompt, **sampling)
        return await asyncio.gather(good, bad, return_exceptions=True)

    good, bad = bench.run(both())
    assert isinstance(bad, ValueError)
    with pytest.raises(ValueError, match=message):
        raise bad
    assert len(good[0].token_ids) > 0


def test_samples_of_one_prompt_compute_it_once(bench: Bench) -> None:
    """Of 100 prompt tokens, 96 are whole blocks of 16: seven of eight samples find those in the prefix cache."""
    before = bench.run(bench.generator.stats.call())
    bench.generate([11] * 50 + [12] * 50, n=8, max_new_tokens=2)
    after = bench.run(bench.generator.stats.call())
    assert after["prompt_tokens"] - before["prompt_tokens"] == 800
    assert after["cached_prompt_tokens"] - before["cached_prompt_tokens"] == 7 * 96
    assert after["generated_tokens"] - before["generated_tokens"] == 16
    assert after["busy_s"] > before["busy_s"]


def test_hundreds_of_requests_are_in_flight_together(bench: Bench) -> None:
    async def crowd() -> tuple[list[list[Completion]], dict[str, float]]:
        calls = [
            asyncio.ensure_future(bench.generator.generate.call([65, i % 256], n=2, max_new_tokens=30 + i % 7))
            for i in range(150)
        ]
        stats = await bench.stats_when(lambda now: now["running"] + now["waiting"] >= 200)
        return await asyncio.gather(*calls), stats

    results, stats = bench.run(crowd())
    assert stats["running"] <= 32  # max_num_seqs
    for i, completions in enumerate(results):
        assert len(completions) == 2
        assert all(1 <= len(c.token_ids) <= 30 + i % 7 for c in completions)


def test_after_an_update_the_logprobs_are_those_of_the_new_weights(bench: Bench) -> None:
    """Fails where the weights are not loaded, and where the prompt is found in the old weights' prefix cache."""
    old = bench.version()
    bench.generate(PROMPT, n=2, max_new_tokens=4)
    new = bench.publish()
    seconds = bench.update(new)
    assert seconds["fetch"] > 0
    assert seconds["swap"] > 0
    for completion in bench.generate(PROMPT, n=4, max_new_tokens=30):
        assert completion.metadata["policy_version"] == completion.metadata["policy_version_max"] == new
        assert difference(completion, reference(bench.models[new], PROMPT, completion, temperature=1.0)) < 1e-5
        assert difference(completion, reference(bench.models[old], PROMPT, completion, temperature=1.0)) > 1e-2


def test_requests_in_flight_keep_their_tokens_and_go_on_under_the_new_weights(bench: Bench) -> None:
    old, new = bench.version(), bench.publish()
    prompt = [70, 71] * 30

    async def scenario() -> tuple[list[Completion], list[Completion]]:
        flying = asyncio.ensure_future(bench.generator.generate.call(prompt, n=48, max_new_tokens=150))
        before = (await bench.generator.stats.call())["busy_s"]
        await bench.stats_when(lambda now: now["busy_s"] >= before + 0.2)  # some steps were taken
        await bench.generator.update_weights.call(new)
        # The old weights' keys and values of this very prompt are in use at this moment.
        fresh = await bench.generator.generate.call(prompt, n=4, max_new_tokens=20)
        return await flying, fresh

    flying, fresh = bench.run(scenario())
    mixed = [c for c in flying if (c.metadata["policy_version"], c.metadata["policy_version_max"]) == (old, new)]
    assert mixed, "no completion was in flight during the update"
    for completion in mixed:
        was = reference(bench.models[old], prompt, completion, temperature=1.0)
        gaps = [abs(a - b) for a, b in zip(completion.logprobs, was, strict=True)]
        assert gaps[0] < 1e-4 < max(gaps)  # it began with the old weights, and did not stay with them
    started_late = [c for c in flying if c.metadata["policy_version"] == new]
    assert started_late, "with 32 places, some of 48 had to wait for the new weights"
    for completion in fresh + started_late:
        assert completion.metadata["policy_version"] == new
        assert difference(completion, reference(bench.models[new], prompt, completion, temperature=1.0)) < 1e-5


def test_an_older_version_is_taken_only_as_a_rollback(bench: Bench) -> None:
    now = bench.version()
    older = now - 1
    save_file(bench.models[older].state_dict(), bench.versions / f"{older}.safetensors")
    for version in (now, older):
        assert bench.update(version) == {"fetch": 0.0, "swap": 0.0}
        assert bench.version() == now
    bench.update(older, rollback=True)
    [completion] = bench.generate(PROMPT)
    assert completion.metadata["policy_version"] == older
    assert difference(completion, reference(bench.models[older], PROMPT, completion, temperature=1.0)) < 1e-5


def test_updates_that_overlap_leave_the_newest(bench: Bench) -> None:
    versions = [bench.publish() for _ in range(3)]

    async def all_at_once() -> None:
        await asyncio.gather(*(bench.generator.update_weights.call(v) for v in (versions[2], versions[0], versions[1])))

    bench.run(all_at_once())
    [completion] = bench.generate(PROMPT)
    assert completion.metadata["policy_version"] == versions[2]
    assert difference(completion, reference(bench.models[versions[2]], PROMPT, completion, temperature=1.0)) < 1e-5


def test_weights_of_another_model_are_refused_and_the_present_ones_stay(bench: Bench) -> None:
    now = bench.version()
    good = dict(bench.models[now].state_dict())
    missing = {name: tensor for name, tensor in good.items() if "layers.1" not in name}
    reshaped = good | {"model.norm.weight": torch.ones(64)}
    for weights, message in ((missing, "tensors are missing"), (reshaped, r"model.norm.weight has the shape \(64,\)")):
        save_file(weights, bench.versions / "999.safetensors")
        with pytest.raises(ValueError, match=message):
            bench.update(999)
    [completion] = bench.generate(PROMPT)
    assert completion.metadata["policy_version"] == now
    assert difference(completion, reference(bench.models[now], PROMPT, completion, temperature=1.0)) < 1e-5


def test_asleep_it_takes_no_core_and_answers_once_it_has_new_weights(bench: Bench) -> None:
    version = bench.publish()

    async def scenario() -> tuple[list[Completion], list[Completion], float]:
        generator = bench.generator
        running = asyncio.create_task(generator.generate.call(PROMPT, n=4, max_new_tokens=100))
        await bench.stats_when(lambda stats: stats["running"] > 0)
        await generator.sleep.call()
        assert running.done()  # what ran was finished, not dropped
        late = asyncio.create_task(generator.generate.call(PROMPT, n=4, max_new_tokens=20))
        before = await generator.cpu_seconds.call()
        await asyncio.sleep(1.0)
        busy = await generator.cpu_seconds.call() - before
        assert not late.done()
        await generator.update_weights.call(version)
        return await running, await late, busy

    running, late, busy = bench.run(scenario())
    assert {completion.metadata["finish_reason"] for completion in running} <= {"length", "stop"}
    assert busy < 0.2  # of one second
    assert {completion.metadata["policy_version"] for completion in late} == {version}
    for completion in late:
        assert difference(completion, reference(bench.models[version], PROMPT, completion, temperature=1.0)) < 1e-5


def test_the_version_it_had_wakes_it_as_well(bench: Bench) -> None:
    version = bench.version()
    bench.run(bench.generator.sleep.call())
    assert bench.update(version, rollback=True) == {"fetch": 0.0, "swap": 0.0}  # no weights were lost
    assert bench.generate([1, 2, 3], max_new_tokens=1)


def test_zz_a_failing_engine_fails_every_request_with_the_cause(bench: Bench) -> None:
    """The last test, for it leaves nothing to work with."""

    async def scenario() -> list[Any]:
        calls = [asyncio.ensure_future(bench.generator.generate.call([65], max_new_tokens=200)) for _ in range(5)]
        await bench.generator.break_engine.call()
        return await asyncio.gather(*calls, return_exceptions=True)

    errors = bench.run(scenario())
    with pytest.raises(EngineStopped) as later:
        bench.generate([65])
    with pytest.raises(EngineStopped):
        bench.version()
    for error in [*errors, later.value]:
        assert isinstance(error, EngineStopped)
        assert "the GPU fell out" in str(error)
