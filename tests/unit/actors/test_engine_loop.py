"""The engine's thread: results find their callers, errors reach everyone, nothing polls. The engine is a list."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from forge.actors.engine_loop import Abandoned, EngineLoop, EngineStopped, Finished, Request


class CountingEngine:
    """Each step writes one token, the number of the step, for every request; one is done after `max_new_tokens`."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.running: dict[str, tuple[Request, list[int]]] = {}
        self.asked = 0
        self.steps = 0
        self.most_at_once = 0
        self.closed = 0
        self.fail_at: int | None = None
        self.gate: threading.Event | None = None
        self.keys: list[int] = []

    @property
    def busy(self) -> bool:
        assert threading.get_ident() == self.thread
        self.asked += 1
        return bool(self.running)

    def add(self, request: Request) -> None:
        assert threading.get_ident() == self.thread
        if not request.prompt_ids:
            raise ValueError("an empty prompt")
        self.running[request.id] = (request, [])

    def abort(self, request_id: str) -> None:
        self.running.pop(request_id, None)

    def step(self) -> list[Finished]:
        assert threading.get_ident() == self.thread
        if self.gate is not None:
            assert self.gate.wait(10)
        self.steps += 1
        self.most_at_once = max(self.most_at_once, len(self.running))
        if self.steps == self.fail_at:
            raise ZeroDivisionError("the GPU fell out")
        for _, tokens in self.running.values():
            tokens.append(self.steps)
        done = [request for request, tokens in self.running.values() if len(tokens) == request.max_new_tokens]
        return [_finished(request.id, self.running.pop(request.id)[1]) for request in done]

    def start_afresh(self, key: int) -> None:
        self.keys.append(key)

    def counts(self) -> tuple[int, int]:
        return len(self.running), 0

    def close(self) -> None:
        self.closed += 1


def _finished(request_id: str, tokens: list[int]) -> Finished:
    return Finished(
        id=request_id,
        token_ids=tokens,
        logprobs=[-1.0] * len(tokens),
        text=None,
        finish_reason="length",
        stop_reason=None,
        versions=(0, 0),
    )


def request(name: str, tokens: int = 1) -> Request:
    return Request(id=name, prompt_ids=[1], max_new_tokens=tokens)


@asynccontextmanager
async def running_loop(
    make: Callable[[], CountingEngine] = CountingEngine,
) -> AsyncIterator[tuple[EngineLoop, CountingEngine]]:
    made: list[CountingEngine] = []

    def make_engine() -> CountingEngine:
        made.append(make())
        return made[0]

    loop = EngineLoop(make_engine)
    await loop.start()
    try:
        yield loop, made[0]
    finally:
        await loop.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the engine's thread sets no event for us
            await asyncio.sleep(0.005)


def run(test: Callable[[], object]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))  # type: ignore[arg-type]


def test_results_come_in_the_order_of_the_requests_whichever_is_done_first() -> None:
    async def test() -> None:
        async with running_loop() as (loop, _):
            slow, fast = await loop.generate([request("slow", 3), request("fast", 1)])
            assert (slow.id, slow.token_ids) == ("slow", [1, 2, 3])
            assert (fast.id, fast.token_ids) == ("fast", [1])

    run(test)


def test_three_hundred_callers_are_served_side_by_side() -> None:
    async def test() -> None:
        async with running_loop() as (loop, engine):
            engine.gate = threading.Event()
            calls = [asyncio.create_task(loop.generate([request(str(i), 4)])) for i in range(300)]
            await asyncio.sleep(0)  # every task has posted its request before the first step goes on
            engine.gate.set()
            results = await asyncio.gather(*calls)
            assert [r[0].id for r in results] == [str(i) for i in range(300)]
            assert engine.most_at_once > 250
            assert engine.steps <= 8  # 4, and as many again for those that came during the first step

    run(test)


def test_the_thread_sleeps_while_there_is_nothing_to_do() -> None:
    async def test() -> None:
        async with running_loop() as (loop, engine):
            await loop.generate([request("a", 2)])
            await asyncio.sleep(0.05)
            asked = engine.asked
            await asyncio.sleep(0.3)
            assert engine.asked == asked
            assert engine.steps == 2
            stats = loop.stats()
            assert stats["idle_s"] >= 0.3 > stats["busy_s"]
            assert (stats["running"], stats["waiting"]) == (0, 0)

    run(test)


def test_a_request_that_the_engine_refuses_fails_alone() -> None:
    async def test() -> None:
        async with running_loop() as (loop, engine):
            good = asyncio.create_task(loop.generate([request("good", 3)]))
            with pytest.raises(ValueError, match="an empty prompt"):
                await loop.generate([request("sibling", 10_000), Request(id="bad", prompt_ids=[])])
            assert (await good)[0].token_ids
            await until(lambda: not engine.running)  # the sibling was dropped

    run(test)


def test_a_step_that_raises_fails_what_is_pending_and_everything_later_with_the_cause() -> None:
    async def test() -> None:
        async with running_loop() as (loop, engine):
            engine.fail_at = 3
            results = await asyncio.gather(
                *(loop.generate([request(str(i), 9)]) for i in range(5)), return_exceptions=True
            )
            later: list[BaseException] = []
            for call in (lambda: loop.generate([request("later")]), lambda: loop.call(lambda e: 1)):
                with pytest.raises(EngineStopped) as caught:
                    await call()
                later.append(caught.value)
            for error in [*results, *later]:
                assert isinstance(error, EngineStopped)
                assert isinstance(error.__cause__, ZeroDivisionError)
                assert "the GPU fell out" in str(error)
            with pytest.raises(EngineStopped):
                loop.stats()
            await until(lambda: engine.closed == 1)

    run(test)


def test_an_engine_that_cannot_be_built_raises_its_own_error_at_start() -> None:
    def broken() -> CountingEngine:
        raise ValueError("no such model")

    async def test() -> None:
        with pytest.raises(ValueError, match="no such model"):
            await EngineLoop(broken).start()

    run(test)


def test_calls_run_between_steps_and_an_error_in_one_is_its_callers_alone() -> None:
    async def test() -> None:
        async with running_loop() as (loop, engine):
            pending = asyncio.create_task(loop.generate([request("a", 3)]))
            assert await loop.call(lambda e: threading.get_ident()) == engine.thread
            with pytest.raises(KeyError):
                await loop.call(lambda e: dict[str, int]()["x"])
            assert len((await pending)[0].token_ids) == 3

    run(test)


def test_an_error_in_a_fatal_call_ends_the_loop() -> None:
    async def test() -> None:
        async with running_loop() as (loop, _):
            pending = asyncio.create_task(loop.generate([request("a", 10**9)]))
            await asyncio.sleep(0.01)
            with pytest.raises(EngineStopped, match="half of the weights"):
                await loop.call(_raise_os_error, fatal=True)
            with pytest.raises(EngineStopped, match="half of the weights") as caught:
                await pending
            assert isinstance(caught.value.__cause__, OSError)

    run(test)


def _raise_os_error(engine: CountingEngine) -> None:
    raise OSError("half of the weights")


def test_a_cancelled_caller_takes_its_requests_out_of_the_engine() -> None:
    async def test() -> None:
        async with running_loop() as (loop, engine):
            doomed = asyncio.create_task(loop.generate([request("a", 10**9), request("b", 10**9)]))
            await until(lambda: len(engine.running) == 2)
            doomed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doomed
            await until(lambda: not engine.running)
            assert (await loop.generate([request("c", 1)]))[0].id == "c"

    run(test)


def test_stopping_fails_what_is_in_flight_closes_the_engine_once_and_may_be_repeated() -> None:
    async def test() -> None:
        async with running_loop() as (loop, engine):
            pending = asyncio.create_task(loop.generate([request("a", 10**9)]))
            await until(lambda: bool(engine.running))
            await loop.stop()
            await loop.stop()
            with pytest.raises(EngineStopped, match="shut down"):
                await pending
            with pytest.raises(EngineStopped, match="shut down"):
                await loop.generate([request("b")])
            assert engine.closed == 1
        assert not [t for t in threading.enumerate() if t.name == "forge-engine"]

    run(test)


def test_a_loop_that_was_never_started_can_be_stopped() -> None:
    run(EngineLoop(CountingEngine).stop)


def test_time_without_requests_is_idle_time_and_time_in_steps_is_not() -> None:
    async def test() -> None:
        async with running_loop() as (loop, engine):
            await asyncio.sleep(0.1)
            idle = loop.stats()["idle_s"]
            assert idle >= 0.1  # counted while it lasts
            engine.gate = threading.Event()
            generating = asyncio.ensure_future(loop.generate([request("a")]))
            await until(lambda: len(engine.running) == 1)
            since = loop.stats()["idle_s"]
            await asyncio.sleep(0.1)
            engine.gate.set()
            await generating
            assert loop.stats()["busy_s"] >= 0.1
            assert loop.stats()["idle_s"] - since < 0.1

    run(test)


def test_requests_that_come_while_it_is_held_begin_together_in_their_order() -> None:
    async def test() -> None:
        async with running_loop() as (loop, engine):
            await loop.hold(7)
            calls = [asyncio.create_task(loop.generate([request(name, 2)])) for name in ("a", "b", "c")]
            await asyncio.sleep(0.05)
            assert engine.steps == 0
            assert list(engine.running) == ["a", "b", "c"]
            await loop.release()
            results = await asyncio.gather(*calls)
            assert [r.token_ids for (r,) in results] == [[1, 2]] * 3  # the same two steps did all three
            assert engine.keys == [7]

    run(test)


def test_holding_gives_up_what_is_in_flight() -> None:
    async def test() -> None:
        async with running_loop() as (loop, engine):
            old = asyncio.create_task(loop.generate([request("old", 10**9)]))
            await until(lambda: engine.steps > 0)
            await loop.hold(1)
            with pytest.raises(Abandoned):
                await old
            assert engine.running == {}
            await loop.release()
            assert len(await loop.generate([request("new")])) == 1

    run(test)


def test_a_held_engine_can_be_stopped() -> None:
    async def test() -> None:
        async with running_loop() as (loop, _):
            await loop.hold(1)
            waiting = asyncio.create_task(loop.generate([request("a")]))
            await asyncio.sleep(0.02)
            await loop.stop()
            with pytest.raises(EngineStopped):
                await waiting

    run(test)
