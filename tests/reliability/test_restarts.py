"""Killed processes and what comes after them, on real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import cloudpickle
import pytest

from forge.config import RestartsConfig
from forge.provisioner import Provisioner
from forge.service import ForgeActor, NoHealthyReplica, ReplicaDied, repeated_on_restart
from tests.processes import gone

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a child cannot import this file by its name


class Counter(ForgeActor):
    def __init__(self, start=0):
        self.n = start

    def add(self, k):
        self.n += k
        return self.n

    @repeated_on_restart
    def set(self, n):
        self.n = n

    def pid(self):
        return os.getpid()

    async def slow(self, seconds):
        await asyncio.sleep(seconds)
        return os.getpid()

    def start_a_helper(self):
        return subprocess.Popen(["sleep", "600"]).pid

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self):
        print("said before it left", flush=True)
        os._exit(3)


async def until(condition):
    while not condition():  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.01)


def run(scenario, **provisioner_args):
    async def main():
        async with Provisioner(gpus=[], **provisioner_args) as provisioner:
            return await scenario(provisioner)

    return asyncio.run(asyncio.wait_for(main(), 120))


def test_a_killed_replica_is_replaced_and_its_requests_are_sent_again(tmp_path):
    """Two replicas of two processes each; of one replica the second process is killed."""
    incidents = []

    async def scenario(_):
        service = await Counter.options(procs=2, num_replicas=2, name="generator").as_service()
        await service.set.fanout(7)
        (pids,) = [await r.call("pid", (), {}, every_rank_answers=True) for r in service.replicas[:1]]
        owed = [asyncio.ensure_future(service.slow.route(2)) for _ in range(4)]
        await asyncio.sleep(0.5)
        os.kill(pids[1], signal.SIGKILL)
        killed_at = time.perf_counter()
        await until(lambda: incidents)
        noticed = time.perf_counter() - killed_at
        answers = await asyncio.gather(*owed)
        await until(lambda: service.health()["healthy"] == 2)
        values = [(await replica.call("add", (0,), {}))[0] for replica in service.replicas]
        return noticed, answers, service.health(), values

    noticed, answers, health, values = run(scenario, on_incident=incidents.append, log_dir=tmp_path)
    assert noticed < 3
    assert len(answers) == 4
    assert health == {"healthy": 2, "restarts": 1, "in_flight": 0, "retried": 2}
    assert values == [7, 7]
    assert [i.seconds is None for i in incidents] == [True, False]
    assert "rank 1 died" in incidents[0].cause


def test_what_kills_every_replica_that_it_is_sent_to_is_raised():
    async def scenario(_):
        service = await Counter.options(restarts=RestartsConfig(backoff_s=0.0)).as_service()
        with pytest.raises(ReplicaDied, match=r"counter \(replica 0\)"):
            await service.die.route()
        return await service.add.route(1), service.health()["restarts"]

    assert run(scenario) == (1, 2)


def test_the_limit_ends_it_with_the_last_words_of_the_process(tmp_path):
    async def scenario(provisioner):
        service = await Counter.options(restarts=RestartsConfig(max=1)).as_service()
        with pytest.raises((ReplicaDied, NoHealthyReplica)):
            await service.leave.route()
        with pytest.raises(NoHealthyReplica, match=r"restarts.max = 1"):
            await service.add.route(1)
        async with provisioner.ends_on_failure():
            await asyncio.sleep(60)

    with pytest.raises(Exception, match=r"(?s)restarts.max = 1 allows.*said before it left"):
        run(scenario, log_dir=tmp_path)


def test_an_actor_restarts_on_all_ranks_with_its_first_arguments(tmp_path):
    async def scenario(_):
        actor = await Counter.options(procs=2, name="trainer").as_actor(start=5)
        await actor.add.call(1)
        helper = await actor.start_a_helper.call()
        before = await actor.pid.call_all()
        owed = asyncio.ensure_future(actor.slow.call(60))
        await asyncio.sleep(0.3)
        os.kill(before[1], signal.SIGKILL)
        with pytest.raises(ReplicaDied, match=r"trainer \(replica 0\): the process of rank 1 died") as info:
            await asyncio.wait_for(owed, 3)
        started = time.perf_counter()
        await actor.restart()
        seconds = time.perf_counter() - started
        after = await actor.pid.call_all()
        return info.value, [*before, helper], after, await actor.add.call(0), seconds

    error, before, after, value, seconds = run(scenario, log_dir=tmp_path)
    assert (error.service, error.replica, error.rank) == ("trainer", 0, 1)
    assert value == 5
    assert not {*before} & {*after}
    assert gone(before)
    assert seconds < 60
