"""The weight store in its own process, published to and fetched from by others, through TorchStore and Monarch."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch

from forge.placement import Machine, Request
from forge.provisioner import Provisioner
from forge.service import ActorHandle, ForgeActor, ReplicaDied
from forge.service.hosts import LocalHost
from forge.weights import CorruptWeights, UnknownVersion, WeightStore, WeightStoreError
from tests.processes import gone, listening, shared_memory, shared_memory_left

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a child cannot import this file by its name

CHUNK = 1 << 20


def weights_of(version, *, dtype=torch.float32):
    """Three chunks and a few tensors, different for each version."""
    generator = torch.Generator().manual_seed(version)
    named = {f"layers.{i}.weight": torch.randn(64, 1000, generator=generator).to(dtype) for i in range(9)}
    return {**named, "norm": torch.full((7,), float(version), dtype=dtype), "steps": torch.tensor([version])}


def same(a, b):
    return list(a) == list(b) and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


class Peer(ForgeActor):
    """A trainer or a generator, as far as weights are concerned."""

    def __init__(self, store):
        self.store = store
        self.held = None

    async def publish(self, version, seed=None, dtype=None):
        return await self.store.publish(version, weights_of(seed or version).items(), dtype=dtype)

    async def publish_all_but_norm(self, version, seed):
        """The weights of `seed` for the second time, with another norm."""
        named = {**weights_of(seed), "norm": torch.full((7,), -1.0)}
        return await self.store.publish(version, named.items(), unchanged=named.keys() - {"norm"})

    async def has_new_norm(self, version, seed):
        named = await self.store.fetch(version)
        norm = named.pop("norm")
        expected = weights_of(seed)
        del expected["norm"]
        return bool((norm == -1).all()) and all(torch.equal(named.pop(k), v) for k, v in expected.items()) and not named

    async def publish_and_break_off(self, version):
        def source():
            for i, named in enumerate(weights_of(version).items()):
                if i == 8:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield named

        await self.store.publish(version, source())

    async def publish_and_fail(self, version):
        def source():
            yield from list(weights_of(version).items())[:8]
            raise ValueError("out of layers")

        await self.store.publish(version, source())

    async def fetch_is_right(self, version, seed=None, dtype=torch.float32):
        return same(await self.store.fetch(version), weights_of(seed or version, dtype=dtype))

    async def hold(self, version):
        self.held = await self.store.fetch(version)

    def let_go(self):
        self.held = None

    def held_inodes(self):
        """Of the shared memory that this process has mapped."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sorted({line.split()[4] for line in lines if "memfd:forge-weights" in line})

    def held_is_right(self, version):
        return same(self.held, weights_of(version))

    async def scribble(self, version):
        tensors = await self.store.fetch(version)
        for tensor in tensors.values():
            tensor.zero_()

    async def fetch_until(self, last):
        """Fetches the newest version over and over, as a generator does; how many were complete and right."""
        right = dropped = newest = 0
        while newest < last:
            newest = (await self.store.versions() or [0])[-1]
            if newest:
                try:
                    right += same(await self.store.fetch(newest), weights_of(newest))
                except UnknownVersion:
                    dropped += 1
        return right, dropped

    def memory(self):
        return psutil.Process().memory_info().rss


@dataclass
class Cluster:
    """A store, a trainer and two generators, and the event loop they were started on."""

    runner: asyncio.Runner
    store: WeightStore
    trainer: ActorHandle
    generators: list[ActorHandle]
    next_version: int = 0

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    def new_version(self) -> int:
        self.next_version += 1
        return self.next_version


@pytest.fixture(scope="module", params=["auto", "tcp"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with asyncio.Runner() as runner:
        provisioner = Provisioner(gpus=[])

        async def start() -> Cluster:
            await provisioner.__aenter__()
            store = await WeightStore.start(transport=request.param, chunk_bytes=CHUNK)
            names = ("trainer", "generator0", "generator1")
            actors = await asyncio.gather(*(Peer.options(name=name).as_actor(store=store) for name in names))
            return Cluster(runner, store, actors[0], actors[1:])

        cluster = runner.run(start())
        children = psutil.Process().children(recursive=True)
        # The janitor ends with this process, since it was this one that started Monarch.
        pids = [p.pid for p in children if "_janitor.py" not in " ".join(p.cmdline())]
        yield cluster
        runner.run(provisioner.__aexit__(None, None, None))
        assert gone(pids)


def test_what_is_fetched_is_what_was_published(cluster):
    version = cluster.new_version()
    published = cluster.run(cluster.trainer.publish.call(version))
    assert published["bytes"] >= 9 * 64 * 1000 * 4
    assert cluster.run(cluster.generators[0].fetch_is_right.call(version))
    assert same(cluster.run(cluster.store.fetch(version)), weights_of(version))


def test_several_fetch_at_once(cluster):
    version = cluster.new_version()
    cluster.run(cluster.trainer.publish.call(version))

    async def all_at_once():
        return await asyncio.gather(*(g.fetch_is_right.call(version) for g in cluster.generators for _ in range(4)))

    assert cluster.run(all_at_once()) == [True] * 8


def test_the_last_two_versions_exist_and_asking_for_another_lists_them(cluster):
    versions = [cluster.new_version() for _ in range(3)]
    for version in versions:
        cluster.run(cluster.trainer.publish.call(version))
    assert cluster.run(cluster.store.versions()) == versions[1:]
    expected = f"no version {versions[0]} of the weights; those that exist: {versions[1]}, {versions[2]}"
    with pytest.raises(UnknownVersion, match=expected):
        cluster.run(cluster.generators[0].fetch_is_right.call(versions[0]))


def test_conversion_happens_while_publishing(cluster):
    version = cluster.new_version()
    cluster.run(cluster.trainer.publish.call(version, dtype=torch.bfloat16))
    assert cluster.run(cluster.generators[0].fetch_is_right.call(version, dtype=torch.bfloat16))


def test_publishing_a_number_again_replaces_it(cluster):
    version = cluster.new_version()
    cluster.run(cluster.trainer.publish.call(version))
    cluster.run(cluster.trainer.publish.call(version, seed=999))
    assert cluster.run(cluster.store.versions()).count(version) == 1
    assert cluster.run(cluster.generators[0].fetch_is_right.call(version, seed=999))


def test_what_is_unchanged_is_not_sent_again_and_outlives_the_version_it_was_sent_with(cluster):
    first, *later = [cluster.new_version() for _ in range(4)]
    sent = cluster.run(cluster.trainer.publish.call(first))["bytes_sent"]
    assert sent >= 9 * 64 * 1000 * 4
    for version in later:
        again = cluster.run(cluster.trainer.publish_all_but_norm.call(version, seed=first))["bytes_sent"]
        assert again < sent / 2  # the norm, and the last chunk's other tensors, of which it held most
    assert cluster.run(cluster.store.versions()) == later[1:]
    assert cluster.run(cluster.generators[0].has_new_norm.call(later[-1], seed=first))


def test_a_fetcher_that_writes_into_its_tensors_does_not_change_the_version(cluster):
    version = cluster.new_version()
    cluster.run(cluster.trainer.publish.call(version))
    cluster.run(cluster.generators[0].scribble.call(version))
    assert cluster.run(cluster.generators[1].fetch_is_right.call(version))


def test_tensors_stay_valid_after_their_version_was_dropped(cluster):
    version = cluster.new_version()
    cluster.run(cluster.trainer.publish.call(version))
    cluster.run(cluster.generators[0].hold.call(version))
    for _ in range(4):
        cluster.run(cluster.trainer.publish.call(cluster.new_version()))
    assert cluster.run(cluster.generators[0].held_is_right.call(version))


def test_fetching_while_versions_are_published_and_dropped_never_gives_a_torn_one(cluster):
    versions = [cluster.new_version() for _ in range(12)]

    async def publish_all():
        for version in versions:
            await cluster.trainer.publish.call(version)

    async def both():
        fetches = [g.fetch_until.call(versions[-1]) for g in cluster.generators]
        return (await asyncio.gather(publish_all(), *fetches))[1:]

    for right, dropped in cluster.run(both()):  # an error other than UnknownVersion would have been raised
        assert right >= 1
        assert right + dropped >= 1


def test_a_publish_that_fails_leaves_no_version_and_the_next_one_works(cluster):
    before = cluster.run(cluster.store.versions())
    with pytest.raises(ValueError, match="out of layers"):
        cluster.run(cluster.trainer.publish_and_fail.call(cluster.new_version()))
    assert cluster.run(cluster.store.versions()) == before
    version = cluster.new_version()
    cluster.run(cluster.trainer.publish.call(version))
    assert cluster.run(cluster.generators[0].fetch_is_right.call(version))


def test_publishing_over_and_over_does_not_grow_the_store(cluster):
    (pid,) = cluster.store._groups[0].pids

    async def publish(times):
        for _ in range(times):
            await cluster.trainer.publish.call(cluster.new_version())

    cluster.run(publish(4))
    before = psutil.Process(pid).memory_info().rss
    files = psutil.Process(pid).num_fds()
    cluster.run(publish(8))
    assert psutil.Process(pid).memory_info().rss - before < 3 * 9 * 64 * 1000 * 4
    assert psutil.Process(pid).num_fds() - files < 20


def test_a_corrupted_chunk_is_refused(cluster):
    version = cluster.new_version()
    cluster.run(cluster.trainer.publish.call(version))
    cluster.run(_flip_a_bit(cluster.store, version))
    with pytest.raises(CorruptWeights, match=rf"version {version}, chunk 1 \(layers"):
        cluster.run(cluster.generators[0].fetch_is_right.call(version))


async def _flip_a_bit(store, version):
    """Puts chunk 1 into the store again with one bit changed."""
    client = store.client()
    key = (await store._manifest(version)).chunks[1].key
    flat = (await client.get_flat(key)).clone()
    flat[1000] ^= 16
    await client.delete(key)
    memory, handle = await client.lend(flat.numel())
    memory[: flat.numel()] = flat
    await client.put_flat(key, memory[: flat.numel()], handle)


def test_versions_survive_a_trainer_that_is_killed_while_it_publishes(cluster):
    version = cluster.new_version()
    cluster.run(cluster.trainer.publish.call(version))

    async def scenario():
        doomed = await Peer.options(name="doomed").as_actor(store=cluster.store)
        with pytest.raises(ReplicaDied):
            await doomed.publish_and_break_off.call(cluster.new_version())
        return await cluster.store.versions()

    assert cluster.run(scenario())[-1] == version
    assert cluster.run(cluster.generators[0].fetch_is_right.call(version))
    after = cluster.new_version()
    cluster.run(cluster.trainer.publish.call(after))
    assert cluster.run(cluster.generators[0].fetch_is_right.call(after))
    # The index, two versions of three chunks, and the one before them, whose memory the next publish takes.
    assert len(cluster.run(cluster.store.client().keys())) == 1 + 3 * 3


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Cluster]:
    """The trainer on one host, two generators on another; both are this machine, and share no memory by our rule."""
    hosts = [LocalHost(Machine(name="a", cores=1, gpus=("0",))), LocalHost(Machine(name="b", cores=1, gpus=("0", "1")))]
    hosts[1].env = {**hosts[1].env, "FORGE_HOST": "b"}
    with asyncio.Runner() as runner:
        provisioner = Provisioner(hosts=hosts)

        async def start() -> Cluster:
            await provisioner.__aenter__()
            provisioner.plan(
                [
                    Request(service="trainer", with_gpus=True),
                    Request(service="generator", num_replicas=2, with_gpus=True),
                ]
            )
            store = await WeightStore.start(chunk_bytes=CHUNK)
            trainer = await Peer.options(name="trainer", with_gpus=True).as_actor(store=store)
            service = Peer.options(name="generator", num_replicas=2, with_gpus=True)
            return Cluster(runner, store, trainer, [await service.as_service(store=store)])

        yield runner.run(start())
        runner.run(provisioner.__aexit__(None, None, None))


def fetched(cluster: Cluster) -> int:
    (mirror,) = [actor for _, actor in cluster.store._mirrors]

    async def ask() -> int:
        return await mirror.fetched_bytes.call_one()

    return cluster.run(ask())


def test_another_host_fetches_once_for_all_its_generators(two_hosts):
    (generators,) = two_hosts.generators
    for version in (two_hosts.new_version(), two_hosts.new_version()):
        before = fetched(two_hosts)
        bytes_ = two_hosts.run(two_hosts.trainer.publish.call(version))["bytes"]
        assert two_hosts.run(generators.fetch_is_right.fanout(version)) == [True, True]
        assert fetched(two_hosts) - before == bytes_
    assert two_hosts.run(generators.fetch_is_right.fanout(version)) == [True, True]
    assert fetched(two_hosts) - before == bytes_  # a third and a fourth time: nothing more


def test_its_generators_share_one_copy(two_hosts):
    (generators,) = two_hosts.generators
    version = two_hosts.new_version()
    two_hosts.run(two_hosts.trainer.publish.call(version))
    two_hosts.run(generators.hold.fanout(version))
    first, second = two_hosts.run(generators.held_inodes.fanout())
    assert first == second
    assert len(first) == 3


def test_a_host_lets_go_of_versions_that_there_are_no_more(two_hosts):
    (generators,) = two_hosts.generators

    def publish_and_fetch() -> None:
        version = two_hosts.new_version()
        two_hosts.run(two_hosts.trainer.publish.call(version))
        assert two_hosts.run(generators.fetch_is_right.fanout(version)) == [True, True]

    two_hosts.run(generators.let_go.fanout())
    process = psutil.Process(two_hosts.store._groups[1].pids[0])
    for _ in range(4):
        publish_and_fetch()
    before, files = process.memory_info().rss, process.num_fds()
    for _ in range(8):
        publish_and_fetch()
    assert process.memory_info().rss - before < 3 * 9 * 64 * 1000 * 4
    assert process.num_fds() - files < 20


def test_without_its_mirror_a_host_fetches_all_the_same(two_hosts):
    (generators,) = two_hosts.generators
    version = two_hosts.new_version()
    two_hosts.run(two_hosts.trainer.publish.call(version))
    os.kill(two_hosts.store._groups[1].pids[0], signal.SIGKILL)
    assert two_hosts.run(generators.fetch_is_right.fanout(version)) == [True, True]


def test_the_death_of_the_store_is_named_where_it_is_noticed():
    async def scenario():
        async with Provisioner(gpus=[]):
            store = await WeightStore.start(chunk_bytes=CHUNK)
            await store.publish(1, weights_of(1).items())
            os.kill(store._groups[0].pids[0], signal.SIGKILL)
            with pytest.raises(WeightStoreError, match="process that keeps the weights"):
                await store.fetch(1)

    asyncio.run(scenario())


def test_nothing_is_left_in_dev_shm_and_no_port_is_open():
    async def scenario():
        async with Provisioner(gpus=[]):
            store = await WeightStore.start(chunk_bytes=CHUNK)
            await store.publish(1, weights_of(1).items())
            await store.fetch(1)
            return listening([psutil.Process(), *psutil.Process().children(recursive=True)])

    before, listening_before = (
        shared_memory(),
        listening([psutil.Process(), *psutil.Process().children(recursive=True)]),
    )
    assert asyncio.run(scenario()) <= listening_before
    assert shared_memory_left(before) == set()


def test_a_store_is_shut_down_only_where_it_was_started():
    import pickle

    async def scenario():
        async with Provisioner(gpus=[]):
            store = await WeightStore.start()
            copy = pickle.loads(pickle.dumps(store))
            with pytest.raises(RuntimeError, match="only by the process that started it"):
                await copy.shutdown()
            await store.shutdown()

    asyncio.run(scenario())


def test_keep_must_leave_room_for_the_version_just_published():
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        asyncio.run(WeightStore.start(keep=0))
