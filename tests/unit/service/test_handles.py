import asyncio
import pickle

import pytest

from forge.service import ActorHandle, ForgeActor, LeastLoaded, NoHealthyReplica, ReplicaDied, Service
from forge.service.replica import Replica
from forge.service.wire import encode


class Named(ForgeActor):
    def __init__(self, name):
        self.name = name

    def who(self):
        return self.name

    async def slow(self):
        await asyncio.sleep(0.05)
        return self.name

    def fail_on_b(self):
        if self.name == "b":
            raise ValueError("b")
        return self.name


async def service_of(new_mesh, names="abc"):
    meshes, replicas = [], []
    for index, name in enumerate(names):
        meshes.append(new_mesh())
        replicas.append(Replica(meshes[-1], service="named", index=index))
        await replicas[-1].start(encode((Named, {"name": name})))
    return Service(Named, "named", replicas, LeastLoaded()), meshes


def test_route_reaches_one_replica_and_fanout_all(new_mesh):
    async def main():
        service, _ = await service_of(new_mesh)
        return [await service.who.route() for _ in range(4)], await service.who.fanout()

    assert asyncio.run(main()) == (["a", "b", "c", "a"], ["a", "b", "c"])


def test_route_prefers_the_replica_with_the_fewest_requests_in_flight(new_mesh):
    async def main():
        service, _ = await service_of(new_mesh, "ab")
        slow = asyncio.ensure_future(service.slow.route())
        await asyncio.sleep(0)
        answers = [await service.who.route() for _ in range(3)]
        return await slow, answers

    assert asyncio.run(main()) == ("a", ["b", "b", "b"])


def test_fanout_raises_what_one_replica_raised(new_mesh):
    async def main():
        service, _ = await service_of(new_mesh)
        with pytest.raises(ValueError, match="b"):
            await service.fail_on_b.fanout()

    asyncio.run(main())


def test_a_session_stays_on_one_replica_in_child_tasks_too_and_ends(new_mesh):
    async def main():
        service, _ = await service_of(new_mesh)
        async with service.session():
            inside = [await service.who.route() for _ in range(3)]
            inside += await asyncio.gather(service.who.route(), service.who.route())
        async with service.session():
            other = await service.who.route()
        return inside, other, [await service.who.route() for _ in range(2)]

    assert asyncio.run(main()) == (["a"] * 5, "b", ["c", "a"])


def test_sessions_of_two_services_do_not_mix(new_mesh):
    async def main():
        one, _ = await service_of(new_mesh, "ab")
        two, _ = await service_of(new_mesh, "xy")
        await one.who.route()
        async with one.session(), two.session():
            return [await one.who.route(), await two.who.route(), await one.who.route()]

    assert asyncio.run(main()) == ["b", "x", "b"]


def test_a_session_never_moves_to_another_replica(new_mesh):
    async def main():
        service, meshes = await service_of(new_mesh)
        async with service.session():
            meshes[0].die(0, "Killed.")
            with pytest.raises(ReplicaDied, match="replica 0"):
                await service.who.route()
        return await service.who.route()

    assert asyncio.run(main()) == "b"


def test_a_dead_replica_gets_no_requests_and_is_described_as_dead(new_mesh):
    async def main():
        service, meshes = await service_of(new_mesh)
        meshes[1].die(0, "Killed.")
        answers = [await service.who.route() for _ in range(4)]
        return answers, await service.who.fanout(), [r["state"] for r in service.describe()]

    assert asyncio.run(main()) == (["a", "c", "a", "c"], ["a", "c"], ["healthy", "dead", "healthy"])


def test_without_a_healthy_replica_the_error_lists_the_states(new_mesh):
    async def main():
        service, meshes = await service_of(new_mesh, "ab")
        for mesh in meshes:
            mesh.die(0, "Killed.")
        with pytest.raises(NoHealthyReplica, match="named has no healthy replica: replica 0 dead, replica 1 dead"):
            await service.who.route()

    asyncio.run(main())


def test_a_wrong_endpoint_name_lists_the_right_ones(new_mesh):
    async def main():
        service, _ = await service_of(new_mesh, "a")
        with pytest.raises(AttributeError, match=r"no endpoint 'hwo'; there are: fail_on_b, slow, who"):
            _ = service.hwo

    asyncio.run(main())


def test_an_actor_handle_gives_rank_0_or_every_rank(new_mesh):
    async def main():
        replica = Replica(new_mesh(2), service="named", index=0)
        await replica.start(encode((Named, {"name": "n"})))
        handle = ActorHandle(Named, "named", replica)
        return await handle.who.call(), await handle.who.call_all()

    assert asyncio.run(main()) == ("n", ["n", "n"])


def test_a_handle_cannot_be_sent_away(new_mesh):
    async def main():
        service, _ = await service_of(new_mesh, "a")
        with pytest.raises(TypeError, match="belongs to the process that started it"):
            pickle.dumps(service)

    asyncio.run(main())


def test_shutdown_stops_every_replica(new_mesh):
    async def main():
        service, meshes = await service_of(new_mesh)
        async with service:
            pass
        return [mesh.stopped for mesh in meshes]

    assert asyncio.run(main()) == [True, True, True]
