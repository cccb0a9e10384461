import asyncio

import pytest

from forge.service import ActorFailed, ForgeActor, RemoteTraceback, ReplicaDied
from forge.service.replica import Replica, State
from forge.service.wire import encode, encode_error


class Slow(ForgeActor):
    log: list = []  # noqa: RUF012

    def __init__(self, fail=False):
        if fail:
            raise ValueError("broken checkpoint")

    async def wait(self, seconds):
        await asyncio.sleep(seconds)
        return seconds

    def fail(self):
        raise KeyError("k")

    async def shutdown(self):
        Slow.log.append("shutdown")


async def healthy(mesh):
    replica = Replica(mesh, service="generator", index=1)
    await replica.start(encode((Slow, {})))
    return replica


def test_a_call_returns_the_results_by_rank_but_only_that_of_rank_0_is_sent(new_mesh):
    async def main():
        replica = await healthy(new_mesh(3))
        return await replica.call("wait", (0,), {}), await replica.call("wait", (0,), {}, every_rank_answers=True)

    assert asyncio.run(main()) == ([0, None, None], [0, 0, 0])


def test_in_flight_counts_unanswered_calls(new_mesh):
    async def main():
        replica = await healthy(new_mesh())
        calls = [asyncio.ensure_future(replica.call("wait", (0.02,), {})) for _ in range(3)]
        await asyncio.sleep(0)
        during = replica.in_flight
        await asyncio.gather(*calls)
        return during, replica.in_flight

    assert asyncio.run(main()) == (3, 0)


def test_a_cancelled_caller_is_not_counted_any_more(new_mesh):
    async def main():
        replica = await healthy(new_mesh())
        call = asyncio.ensure_future(replica.call("wait", (30,), {}))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return replica.in_flight, replica.state

    assert asyncio.run(main()) == (0, State.HEALTHY)


def test_an_exception_is_an_answer_and_the_replica_stays_healthy(new_mesh):
    async def main():
        replica = await healthy(new_mesh())
        with pytest.raises(KeyError, match="k"):
            await replica.call("fail", (), {})
        return replica.state, replica.in_flight

    assert asyncio.run(main()) == (State.HEALTHY, 0)


def test_a_death_fails_every_unanswered_call_at_once_and_names_the_place(new_mesh):
    async def main():
        mesh = new_mesh(2)
        replica = await healthy(mesh)
        deaths = []
        replica.on_death(deaths.append)
        calls = [asyncio.ensure_future(replica.call("wait", (30,), {})) for _ in range(2)]
        await asyncio.sleep(0)
        mesh.die(1, "It was killed by SIGKILL.")
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 1)
        with pytest.raises(ReplicaDied, match="rank 1 died"):
            await replica.call("wait", (0,), {})
        mesh.die(0, "again")
        return results, deaths == [replica], replica.state

    results, reported_once, state = asyncio.run(main())
    for error in results:
        assert type(error) is ReplicaDied
        assert str(error) == "generator (replica 1): the process of rank 1 died. It was killed by SIGKILL."
        assert (error.service, error.replica, error.rank) == ("generator", 1, 1)
    assert results[0] is not results[1]
    assert reported_once
    assert state is State.DEAD


def test_a_death_during_the_start_is_raised_by_the_start(new_mesh):
    class NeverReady(ForgeActor):
        async def setup(self):
            await asyncio.sleep(30)

    async def main():
        mesh = new_mesh()
        replica = Replica(mesh, service="trainer", index=0)
        start = asyncio.ensure_future(replica.start(encode((NeverReady, {}))))
        await asyncio.sleep(0.05)
        mesh.die(0, "It was killed by SIGKILL.")
        with pytest.raises(ReplicaDied, match="trainer"):
            await asyncio.wait_for(start, 1)

    asyncio.run(main())


def test_what_init_raises_is_raised_by_the_start(new_mesh):
    async def main():
        replica = Replica(new_mesh(2), service="trainer", index=0)
        with pytest.raises(ValueError, match="broken checkpoint"):
            await replica.start(encode((Slow, {"fail": True})))
        return replica.healthy

    assert asyncio.run(main()) is False


def test_a_transport_that_gives_up_counts_as_a_death(new_mesh):
    async def main():
        mesh = new_mesh()
        replica = await healthy(mesh)
        broken = asyncio.get_running_loop().create_future()
        broken.set_exception(OSError("connection lost"))
        mesh.send = lambda kind, payload: [broken]
        with pytest.raises(ReplicaDied, match="connection lost"):
            await replica.call("wait", (0,), {})
        return replica.state

    assert asyncio.run(main()) is State.DEAD


def test_stop_runs_the_actors_shutdown_then_ends_the_processes_and_fails_what_is_open(new_mesh):
    async def main():
        Slow.log.clear()
        mesh = new_mesh()
        replica = await healthy(mesh)
        open_call = asyncio.ensure_future(replica.call("wait", (30,), {}))
        await asyncio.sleep(0)
        await replica.stop()
        await replica.stop()
        with pytest.raises(ReplicaDied, match="was stopped before it answered"):
            await asyncio.wait_for(open_call, 1)
        return mesh.stopped, Slow.log, replica.state

    assert asyncio.run(main()) == (True, ["shutdown"], State.STOPPED)


def test_stop_does_not_wait_longer_than_the_grace_for_a_shutdown_that_hangs(new_mesh):
    class Hangs(ForgeActor):
        async def shutdown(self):
            await asyncio.sleep(30)

    async def main():
        mesh = new_mesh()
        replica = Replica(mesh, service="x", index=0)
        await replica.start(encode((Hangs, {})))
        await asyncio.wait_for(replica.stop(grace_s=0.05), 2)
        return mesh.stopped

    assert asyncio.run(main())


def test_what_dies_unseen_fails_every_call_with_its_cause(new_mesh):
    async def main():
        told = []
        mesh = new_mesh(2)
        replica = await healthy(mesh)
        replica.on_failure(told.append)
        open_call = asyncio.ensure_future(replica.call("wait", (30,), {}))
        await asyncio.sleep(0)
        mesh.failure.set_result(encode_error(0, ActorFailed("the thread 'x' died of KeyError: 1")))
        for call in (open_call, replica.call("wait", (0,), {})):
            with pytest.raises(ActorFailed, match=r"\(replica 1\): the thread 'x' died of KeyError") as info:
                await asyncio.wait_for(call, 1)
            assert isinstance(info.value.__cause__, RemoteTraceback)
        await replica.stop()
        return len(told), mesh.stopped

    assert asyncio.run(main()) == (1, True)
