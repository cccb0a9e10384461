"""What becomes of a replica that died, its requests, and the state that replicas share. Deaths are played here."""

import asyncio

import pytest

from forge.config import RestartsConfig
from forge.service import (
    ActorHandle,
    ForgeActor,
    LeastLoaded,
    NoHealthyReplica,
    ReplicaDied,
    Service,
    TooManyRestarts,
    repeated_on_restart,
)
from forge.service.supervision import Restarts, Starter
from forge.service.wire import encode


class Policy(ForgeActor):
    """Has a version, which must be set before a question is answered."""

    def __init__(self):
        self.version = 0

    @repeated_on_restart
    async def set_version(self, version, pause=0.0):
        await asyncio.sleep(pause)
        self.version = version
        return version

    async def ask(self, pause=0.0):
        await asyncio.sleep(pause)
        return self.version

    async def refuse(self):
        raise ReplicaDied("somebody else died")


class World:
    """A service whose replicas can be killed, and a record of what was started and told."""

    def __init__(self, new_mesh, *, start_gate=None, **limits):
        self.meshes, self.incidents, self.failures = [], [], []
        self.starts = 0

        async def make(index):
            self.starts += 1
            if start_gate is not None and self.starts > self.first:
                await start_gate(self)
            self.meshes.append(new_mesh())
            return self.meshes[-1]

        self.starter = Starter(
            "policy",
            encode((Policy, {})),
            make,
            limits=RestartsConfig(**{"backoff_s": 0.0, **limits}),
            on_incident=self.incidents.append,
            on_failure=self.failures.append,
        )

    async def service(self, replicas=1):
        self.first = replicas
        made = [await self.starter.start(index) for index in range(replicas)]
        return Service(Policy, "policy", made, LeastLoaded(), starter=self.starter)

    def kill(self, mesh):
        self.meshes[mesh].die(0, "It was killed by SIGKILL (pid 7). From a.log:\nlast words")


async def all_are_back(service, replicas):
    while service.health()["healthy"] < replicas:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.01)


async def under_way(service, requests=1):
    """Returns as soon as living replicas have so many requests to answer."""
    while sum(replica.in_flight for replica in service.replicas if replica.healthy) < requests:  # noqa: ASYNC110
        await asyncio.sleep(0)


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 20))


def test_a_request_in_flight_is_sent_again_to_another_replica(new_mesh):
    async def main():
        world = World(new_mesh)
        service = await world.service(2)
        asked = asyncio.ensure_future(service.ask.route(0.05))
        await under_way(service)
        world.kill(0)
        return await asked, service.health()["retried"]

    assert run(main()) == (0, 1)


def test_with_one_replica_the_request_waits_for_the_replacement(new_mesh):
    async def slow(_):
        await asyncio.sleep(0.1)

    async def main():
        world = World(new_mesh, start_gate=slow)
        service = await world.service()
        asked = asyncio.ensure_future(service.ask.route(0.05))
        await under_way(service)
        world.kill(0)
        late = asyncio.ensure_future(service.ask.route())
        down = service.health()
        return await asked, await late, down, service.health(), [r["state"] for r in service.describe()]

    first, late, down, up, states = run(main())
    assert (first, late) == (0, 0)
    assert down == {"healthy": 0, "restarts": 1, "in_flight": 0, "retried": 0} or down["healthy"] == 0
    assert (up["healthy"], up["restarts"], up["retried"]) == (1, 1, 1)
    assert states == ["healthy"]


def test_a_request_over_which_two_replicas_died_raises(new_mesh):
    async def main():
        world = World(new_mesh)
        service = await world.service()
        asked = asyncio.ensure_future(service.ask.route(5))
        for mesh in (0, 1):
            await under_way(service)
            world.kill(mesh)
        with pytest.raises(ReplicaDied, match=r"policy \(replica 0\): the process of rank 0 died. It was killed"):
            await asked
        return await service.ask.route()

    assert run(main()) == 0


def test_a_death_that_the_method_itself_reports_is_an_answer(new_mesh):
    async def main():
        service = await World(new_mesh).service()
        with pytest.raises(ReplicaDied, match="somebody else"):
            await service.refuse.route()
        return service.health()["retried"]

    assert run(main()) == 0


def test_in_a_session_nothing_is_sent_again(new_mesh):
    async def main():
        world = World(new_mesh)
        service = await world.service(2)
        async with service.session() as session:
            world.kill(session.replica.index)
            with pytest.raises(ReplicaDied):
                await service.ask.route()
        async with service.session():
            return await service.ask.route()

    assert run(main()) == 0


def test_a_replacement_gets_the_shared_state_before_its_first_request(new_mesh):
    async def main():
        world = World(new_mesh)
        service = await world.service()
        await service.set_version.fanout(3)
        await service.set_version.fanout(4)
        world.kill(0)
        return await service.ask.route()

    assert run(main()) == 4


def test_a_state_that_is_set_while_the_replacement_is_brought_up_to_date_reaches_it_too(new_mesh):
    """The replacement is still being told of version 1 when 2 is fanned out to the others."""

    async def main():
        world = World(new_mesh)
        service = await world.service(2)
        await service.set_version.fanout(1, pause=0.5)
        world.kill(0)
        await asyncio.sleep(0.05)
        assert service.health()["healthy"] == 1
        await service.set_version.fanout(2)
        await all_are_back(service, 2)
        return await service.ask.fanout()

    assert run(main()) == [2, 2]


def test_fanout_leaves_out_who_dies_and_asks_the_replacement_if_all_do(new_mesh):
    async def main():
        world = World(new_mesh)
        service = await world.service(2)
        asked = asyncio.ensure_future(service.ask.fanout(0.05))
        await under_way(service, 2)
        world.kill(0)
        some = await asked
        await all_are_back(service, 2)
        asked = asyncio.ensure_future(service.ask.fanout(0.05))
        await under_way(service, 2)
        world.kill(1)
        world.kill(2)
        return some, len(await asked) >= 1

    assert run(main()) == ([0], True)


def test_a_replacement_that_dies_while_it_starts_is_replaced_too(new_mesh):
    async def dies_once(world):
        if world.starts == 2:
            raise ReplicaDied("killed while it started")

    async def main():
        world = World(new_mesh, start_gate=dies_once)
        service = await world.service()
        world.kill(0)
        return await service.ask.route(), service.health()["restarts"]

    assert run(main()) == (0, 2)


def test_too_many_restarts_end_the_waiting_and_the_run(new_mesh):
    async def main():
        world = World(new_mesh, max=2)
        service = await world.service()
        for mesh in range(2):
            world.kill(mesh)
            await service.ask.route()
        world.kill(2)
        with pytest.raises(NoHealthyReplica, match=r"restarted 2 times in 600 s.*restarts.max = 2.*SIGKILL") as info:
            await service.ask.route()
        return world.failures, info.value.__cause__

    failures, cause = run(main())
    assert [type(f) for f in failures] == [TooManyRestarts]
    assert cause is failures[0]
    assert "last words" in str(cause)


def test_an_actor_that_cannot_be_built_again_ends_the_waiting_with_its_own_error(new_mesh):
    async def broken(_):
        raise FileNotFoundError("the model is gone")

    async def main():
        world = World(new_mesh, start_gate=broken)
        service = await world.service()
        world.kill(0)
        with pytest.raises(NoHealthyReplica, match="the model is gone"):
            await service.ask.route()
        return world.failures

    assert [type(f) for f in run(main())] == [FileNotFoundError]


def test_without_restarts_nothing_is_replaced_or_sent_again(new_mesh):
    async def main():
        world = World(new_mesh, max=0)
        service = await world.service(2)
        asked = asyncio.ensure_future(service.ask.route(0.05))
        await under_way(service)
        world.kill(0)
        with pytest.raises(ReplicaDied):
            await asked
        return await service.ask.route(), world.starts

    assert run(main()) == (0, 2)


def test_a_shutdown_ends_replacements_that_are_on_their_way(new_mesh):
    async def never(_):
        await asyncio.sleep(100)

    async def main():
        world = World(new_mesh, start_gate=never)
        service = await world.service()
        world.kill(0)
        waiting = asyncio.ensure_future(service.ask.route())
        await asyncio.sleep(0.01)
        await service.shutdown()
        with pytest.raises(NoHealthyReplica):
            await waiting
        return world.failures

    assert run(main()) == []


def test_people_are_told_what_died_why_and_how_long_it_took(new_mesh):
    async def main():
        world = World(new_mesh)
        service = await world.service()
        world.kill(0)
        await service.ask.route()
        return [str(incident) for incident in world.incidents]

    died, back = run(main())
    assert died.startswith("policy (replica 0): the process of rank 0 died. It was killed by SIGKILL (pid 7). A repl")
    assert back == "policy (replica 0) is back after 0.0 s."


def test_an_actor_is_restarted_by_its_owner_alone(new_mesh):
    async def main():
        world = World(new_mesh)
        world.first = 1
        actor = ActorHandle(Policy, "policy", await world.starter.start(0), starter=world.starter)
        await actor.set_version.call(5)
        world.kill(0)
        for _ in range(2):
            with pytest.raises(ReplicaDied):
                await actor.ask.call()
        await actor.restart()
        after = await actor.ask.call()
        await actor.restart()  # a living one, too
        return after, await actor.ask.call(), [mesh.stopped for mesh in world.meshes], actor.health()["restarts"]

    assert run(main()) == (0, 0, [True, True, False], 2)


def test_pauses_grow_and_old_restarts_are_forgotten():
    now = 0.0
    restarts = Restarts("policy", RestartsConfig(max=4, window_s=100, backoff_s=2), now=lambda: now)
    died = ReplicaDied("died")
    assert [restarts.next_delay(died) for _ in range(4)] == [0, 2, 4, 8]
    with pytest.raises(TooManyRestarts):
        restarts.next_delay(died)
    now = 101.0
    assert restarts.next_delay(died) == 0
    assert restarts.count == 5
