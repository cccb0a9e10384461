"""The buffer: order, look-ahead, staleness, and who waits for whom. No processes, no clocks."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.replay_buffer import ReplayBuffer
from forge.types import Episode, Group


def group(group_id: int, *, version: int = 0) -> Group:
    episode = Episode(
        prompt="p",
        response="r",
        target="t",
        prompt_ids=[1],
        response_ids=[2],
        generator_logprobs=[-0.5],
        response_mask=[True],
        policy_version=version,
        advantage=1.0,
    )
    return Group(id=group_id, sample_id=f"s{group_id}", episodes=[episode])


async def is_waiting(task: asyncio.Task) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


async def admit_all(buffer: ReplayBuffer) -> list[int]:
    """Starts groups until one has to wait."""
    ids = []
    while True:
        task = asyncio.create_task(buffer.admit())
        if await is_waiting(task):
            task.cancel()
            return ids
        ids.append(task.result())


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, timeout=5))


@pytest.mark.parametrize(("staleness", "started"), [(0, 2), (1, 4), (3, 8)])
def test_at_most_s_plus_one_steps_of_groups_are_started(staleness, started):
    async def scenario():
        buffer = ReplayBuffer(groups_per_step=2, max_staleness=staleness, steps=100)
        assert await admit_all(buffer) == list(range(started))

    run(scenario())


def test_on_policy_starts_nothing_until_the_weights_of_the_step_are_published():
    async def scenario():
        buffer = ReplayBuffer(groups_per_step=1, max_staleness=0, steps=5)
        await buffer.add(group(await buffer.admit()))
        assert [g.id for g in await buffer.take(step=0)] == [0]
        assert await admit_all(buffer) == []
        await buffer.advance(version=1)
        assert await admit_all(buffer) == [1]

    run(scenario())


def test_no_group_is_started_that_no_step_will_take():
    async def scenario():
        buffer = ReplayBuffer(groups_per_step=2, max_staleness=9, steps=3)
        assert len(await admit_all(buffer)) == 6

    run(scenario())


def test_groups_are_taken_in_the_order_in_which_they_started():
    async def scenario():
        buffer = ReplayBuffer(groups_per_step=2, max_staleness=2, steps=10)
        await admit_all(buffer)
        for i in (3, 1, 0, 2):
            await buffer.add(group(i))
        assert [g.id for g in await buffer.take(step=0)] == [0, 1]
        assert [g.id for g in await buffer.take(step=1)] == [2, 3]

    run(scenario())


def test_a_slow_group_is_overtaken_while_it_has_slack():
    async def scenario():
        buffer = ReplayBuffer(groups_per_step=2, max_staleness=2, steps=10, window=1)
        await admit_all(buffer)
        await buffer.add(group(1))
        await buffer.add(group(2))
        assert [g.id for g in await buffer.take(step=0)] == [1, 2]

    run(scenario())


def test_a_slow_group_is_waited_for_when_the_window_or_its_slack_is_used_up():
    async def scenario():
        narrow = ReplayBuffer(groups_per_step=2, max_staleness=2, steps=10, window=1)
        await admit_all(narrow)
        for i in (2, 3):
            await narrow.add(group(i))
        two_overtaken = asyncio.create_task(narrow.take(step=0))
        assert await is_waiting(two_overtaken)
        await narrow.add(group(0))
        assert [g.id for g in await two_overtaken] == [0, 2]

        strict = ReplayBuffer(groups_per_step=1, max_staleness=1, steps=10)
        await admit_all(strict)
        await strict.add(group(1))
        no_slack = asyncio.create_task(strict.take(step=1))  # group 0 would be two steps old in step 2
        assert await is_waiting(no_slack)
        no_slack.cancel()

    run(scenario())


def test_a_group_that_got_too_old_is_dropped_counted_and_replaced():
    async def scenario():
        buffer = ReplayBuffer(groups_per_step=1, max_staleness=1, steps=10)
        await admit_all(buffer)
        await buffer.add(group(0, version=0))
        await buffer.add(group(1, version=1))
        assert [g.id for g in await buffer.take(step=2)] == [1]
        assert ([g.id for g in buffer.stale], buffer.discarded) == ([0], 1)
        assert await admit_all(buffer) == [2]

    run(scenario())


def test_a_discarded_group_makes_room_for_another():
    async def scenario():
        buffer = ReplayBuffer(groups_per_step=2, max_staleness=0, steps=10)
        assert await admit_all(buffer) == [0, 1]
        await buffer.discard(0)
        assert await admit_all(buffer) == [2]
        await buffer.add(group(2))
        await buffer.add(group(1))
        assert [g.id for g in await buffer.take(step=0)] == [1, 2]

    run(scenario())


def test_a_batch_that_was_taken_and_not_trained_is_replaced():
    async def scenario():
        buffer = ReplayBuffer(groups_per_step=2, max_staleness=0, steps=10)
        for i in await admit_all(buffer):
            await buffer.add(group(i))
        await buffer.discard(*[g.id for g in await buffer.take(step=0)])
        assert await admit_all(buffer) == [2, 3]

    run(scenario())


def test_the_end_reaches_whoever_waits_for_groups():
    async def scenario():
        buffer = ReplayBuffer(groups_per_step=2, max_staleness=0, steps=10)
        take = asyncio.create_task(buffer.take(step=0))
        assert await is_waiting(take)
        await buffer.end(RuntimeError("nothing to learn"))
        with pytest.raises(RuntimeError, match="nothing to learn"):
            await take

    run(scenario())


def test_staleness_stays_within_the_bound_whatever_order_groups_finish_in():
    """Property: with random finishing order and any window, every group taken is at most S steps old."""
    import random

    async def scenario(seed: int):
        rng = random.Random(seed)
        per_step, bound, steps = rng.randint(1, 4), rng.randint(0, 3), 12
        buffer = ReplayBuffer(groups_per_step=per_step, max_staleness=bound, steps=steps, window=rng.randint(0, 5))
        version, running, trained = 0, {}, []
        for step in range(steps):
            for i in await admit_all(buffer):
                running[i] = version
            take = asyncio.create_task(buffer.take(step))
            while await is_waiting(take):
                i = rng.choice(sorted(running))
                await buffer.add(group(i, version=running.pop(i)))
            for g in take.result():
                assert 0 <= step - g.policy_version <= bound
                trained.append(g.id)
            version = step + 1
            await buffer.advance(version)
        assert len(trained) == len(set(trained)) == per_step * steps
        assert buffer.stale == []

    for seed in range(40):
        run(scenario(seed))


def test_a_resumed_buffer_holds_the_finished_groups_and_restarts_the_running_ones():
    async def scenario():
        buffer = ReplayBuffer(groups_per_step=2, max_staleness=1, steps=10)
        await admit_all(buffer)
        for i in (0, 1, 3):
            await buffer.add(group(i))
        await buffer.take(step=0)

        resumed = ReplayBuffer(groups_per_step=2, max_staleness=1, steps=10, first_step=1)
        resumed.load(finished=buffer.finished, running=[2], next_id=buffer.next_id)
        assert await admit_all(resumed) == [4, 5]
        await resumed.add(group(2, version=1))
        assert [g.id for g in await resumed.take(step=1)] == [2, 3]

    run(scenario())


def ready_as_defined(buffer: ReplayBuffer, step: int) -> list[int] | None:
    """The rule written down plainly, over all groups that wait."""
    waiting = sorted([*buffer._running, *buffer._finished])
    chosen = [i for i in waiting if i in buffer._finished][: buffer._per_step]
    if len(chosen) < buffer._per_step:
        return None
    overtaken = sum(i < chosen[-1] for i in buffer._running)
    if overtaken > buffer._window:
        return None
    left = [i for i in waiting if i not in chosen]
    lateness = [step + 1 + n // buffer._per_step - buffer._started_at[i] for n, i in enumerate(left)]
    return chosen if overtaken == 0 or all(late <= buffer._max_staleness for late in lateness) else None


@settings(max_examples=60, deadline=None)
@given(data=st.data(), per_step=st.integers(1, 4), staleness=st.integers(0, 3))
def test_the_short_cuts_never_change_what_is_taken(data, per_step, staleness):
    """Whatever the order in which groups finish, fail and are taken, the counters agree with the rule."""

    async def scenario():
        buffer = ReplayBuffer(groups_per_step=per_step, max_staleness=staleness, steps=6)
        step = 0
        for _ in range(60):
            while buffer._may_start():
                await buffer.admit()
            expected = ready_as_defined(buffer, step)
            assert buffer._ready(step) == expected
            if expected is not None and data.draw(st.booleans()):
                assert [g.id for g in await buffer.take(step)] == expected
                step += 1
                await buffer.advance(step)
                if step == 6:
                    return
            elif buffer._running:
                group_id = data.draw(st.sampled_from(sorted(buffer._running)))
                if data.draw(st.integers(0, 5)):
                    await buffer.add(group(group_id, version=buffer._started_at[group_id]))
                else:
                    await buffer.discard(group_id)

    asyncio.run(scenario())
