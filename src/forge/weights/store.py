"""WeightStore: numbered versions on TorchStore, whose storage is a process of its own.

Tensors are packed into flat chunks. On one host a chunk is shared memory: publishing copies the weights once, and a
fetch copies nothing. A version exists from the moment its manifest is in the index, which is written last.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from forge.weights.packing import Chunk, Manifest, Packer, UnknownVersion, WeightStoreError
from forge.weights.segments import SegmentGone

if TYPE_CHECKING:
    from forge.service.procs import ProcGroup
    from forge.weights.mirror import MirrorReader
    from forge.weights.torchstore_client import Client

logger = logging.getLogger(__name__)

Transport = Literal["auto", "shm", "rdma", "tcp"]

CHUNK_BYTES = 64 * 2**20
"""Many small tensors travel as one; large enough that the messages about it do not matter."""
_INDEX = "index"
"""The key of the list of manifests."""


class WeightStore:
    """A handle: `start` makes it in the controller, and it can be sent to actors. All methods can be used anywhere.

    Versions are numbered by the caller. The `keep` latest published ones exist; memory holds one more, for reuse by the
    next. One process publishes at a time, any number fetch. The trainer may die: what it published completely stays.
    """

    def __init__(
        self, *, controller: Any, strategy: Any, home: Home, transports: Transports, keep: int, chunk_bytes: int
    ) -> None:
        self._controller = controller
        self._strategy = strategy
        self._home = home
        self._transports = transports
        self._keep = keep
        self._chunk_bytes = chunk_bytes
        self._mirrors: list[tuple[Home, Any]] = []
        self._groups: list[ProcGroup] = []
        self._client_here: Client | None = None
        self._reader_here: Client | MirrorReader | None = None
        self._publishing: asyncio.Lock | None = None

    @classmethod
    async def start(
        cls, *, keep: int = 2, transport: Transport = "auto", chunk_bytes: int = CHUNK_BYTES
    ) -> WeightStore:
        """Starts the process that keeps the weights, on the trainer's host, and one on each other host with generators,
        which fetches for all of them.

        Args:
            keep: versions that exist at the same time.
            transport: see `choose_transports`.
            chunk_bytes: size of a chunk, unless a single tensor is larger.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}: the version just published has to stay.")
        from forge.provisioner import Provisioner

        provisioner = Provisioner.current()
        group = await provisioner.spawn("weights", near=("trainer", 0))
        groups = [group]
        try:
            from forge.weights.mirror import Mirror
            from forge.weights.torchstore_client import SingletonStrategy, StoreController, Volume

            strategy = SingletonStrategy()
            controller = group.mesh.spawn("forge_store_controller", StoreController)
            volumes = group.mesh.spawn("forge_store_volume", Volume, id_func=SingletonStrategy.get_volume_id)
            await controller.init.call(strategy=strategy, num_storage_volumes=1, storage_volumes=volumes)
            await strategy.set_storage_volumes(volumes)
            store = cls(
                controller=controller,
                strategy=strategy,
                home=Home.of(group),
                transports=choose_transports(transport),
                keep=keep,
                chunk_bytes=chunk_bytes,
            )
            await store.client().put_object(_INDEX, [])
            for number, replica in enumerate(provisioner.first_on_each_machine("generator", besides="trainer"), 1):
                groups.append(await provisioner.spawn("weights", replica=number, near=("generator", replica)))
                mirror = groups[-1].mesh.spawn("forge_weights_mirror", Mirror, store)
                store._mirrors.append((Home.of(groups[-1]), mirror))
        except BaseException:
            await asyncio.gather(*(group.stop() for group in groups))
            raise
        store._groups = groups
        group.on_death(lambda _, reason: provisioner.fail(WeightStoreError(f"The weight store died. {reason}")))
        return store

    async def publish(
        self,
        version: int,
        named_tensors: Iterable[tuple[str, Tensor]],
        *,
        dtype: torch.dtype | None = None,
        unchanged: Collection[str] = (),
    ) -> dict[str, float]:
        """Makes `named_tensors` the newest version; a version of the same number is replaced.

        The iterable is consumed in another thread, one tensor at a time, so it may make them as it goes.

        Args:
            dtype: what floating-point tensors are converted to on the way; None leaves them as they are.
            unchanged: names whose values are those of the version published last. They are not sent again: the new
                version refers to the memory of that one.

        Returns:
            `{"seconds", "bytes", "bytes_sent"}`.

        Raises:
            ValueError: a name occurs twice, or there is no tensor at all.
        """
        self._publishing = self._publishing or asyncio.Lock()
        started = time.perf_counter()
        async with self._publishing, _explained():
            client = self.client()
            old = await self._index()
            await self._clean_up(client, old)
            manifest = Manifest(version=version)
            last = old[-1] if old else Manifest(version=version)
            packer = Packer(named_tensors, manifest, dtype=dtype, reusable=last.reusable(unchanged))
            await self._put_chunks(client, manifest, packer)
            sent = manifest.nbytes
            packer.refer_to(last)
            if not manifest.entries:
                raise ValueError(f"version {version} has no tensors: there is nothing to publish.")
            new = [*(m for m in old if m.version != version), manifest][-self._keep :]
            await client.put_object(_INDEX, new)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "bytes": float(manifest.nbytes), "bytes_sent": float(sent)}

    async def fetch(self, version: int) -> dict[str, Tensor]:
        """All tensors of `version`, on the CPU, under the names and in the order in which they were published; those
        that were unchanged come last.

        On the store's own host they are views of shared memory: nothing is copied, and writing into one changes it for
        this process only. They stay valid for as long as they are held, whatever happens to the version.

        Raises:
            UnknownVersion: see there; the message says which versions exist.
            CorruptWeights: a size or checksum is wrong.
        """
        return {name: tensor async for name, tensor in self.stream(version)}

    async def stream(self, version: int) -> AsyncIterator[tuple[str, Tensor]]:
        """Like `fetch`, one tensor at a time; what comes from another host is then never in memory as a whole."""
        client = self._reader()
        try:
            async with _explained():
                manifest = await self._manifest(version)
                opened: dict[str, Tensor] = {}
                if client.shares_memory:
                    # All are opened before any is used: what is open is not reused, even if the version is dropped now.
                    keys = [chunk.key for chunk in manifest.chunks]
                    opened = dict(zip(keys, await asyncio.gather(*map(client.get_flat, keys)), strict=True))
                    await self._manifest(version)  # it was not dropped before they were all open, either
                for index, chunk in enumerate(manifest.chunks):
                    flat = opened.pop(chunk.key) if opened else await client.get_flat(chunk.key)
                    await asyncio.to_thread(manifest.verify, index, flat)
                    for named in manifest.tensors(index, flat):
                        yield named
        except (KeyError, SegmentGone) as error:
            raise UnknownVersion(
                f"Version {version} was dropped while it was fetched; there are {await self.versions()}."
            ) from error

    async def versions(self) -> list[int]:
        """The versions that exist, the one published last at the end."""
        async with _explained():
            return [manifest.version for manifest in await self._index()]

    async def shutdown(self) -> None:
        """Ends the store's process. Tensors that were fetched stay valid."""
        if not self._groups:
            raise RuntimeError("A weight store can be shut down only by the process that started it.")
        await asyncio.gather(*(group.stop() for group in self._groups))

    def __getstate__(self) -> dict[str, Any]:
        not_sent: dict[str, Any] = {"_groups": [], "_client_here": None, "_reader_here": None, "_publishing": None}
        return {**self.__dict__, **not_sent}

    async def chunk_keys(self) -> set[str]:
        """Of the chunks that the versions consist of."""
        return {chunk.key for manifest in await self._index() for chunk in manifest.chunks}

    def client(self) -> Client:
        if self._client_here is None:
            from forge.weights.torchstore_client import Client

            transport = self._transports.near if self._home.is_here() else self._transports.far
            self._client_here = Client(self._controller, self._strategy, transport=transport)
        return self._client_here

    def _reader(self) -> Client | MirrorReader:
        """What chunks are read with: the mirror of this host, if it has one."""
        if self._reader_here is None:
            self._reader_here = self.client()
            for home, mirror in self._mirrors:
                if home.is_here():
                    from forge.weights.mirror import MirrorReader

                    self._reader_here = MirrorReader(mirror, self.client())
        return self._reader_here

    async def _index(self) -> list[Manifest]:
        index: list[Manifest] = await self.client().get_object(_INDEX)
        return index

    async def _manifest(self, version: int) -> Manifest:
        index = await self._index()
        for manifest in index:
            if manifest.version == version:
                return manifest
        exist = ", ".join(str(manifest.version) for manifest in index) or "none"
        raise UnknownVersion(
            f"There is no version {version} of the weights; those that exist: {exist}. The last {self._keep} are kept."
        )

    async def _put_chunks(self, client: Client, manifest: Manifest, packer: Packer) -> None:
        await asyncio.to_thread(packer.advance)
        publication = uuid.uuid4().hex[:8]  # a version that is published again must not meet keys of the first
        while (needed := packer.bytes_of_next()) is not None:
            memory, handle = await client.lend(max(needed, self._chunk_bytes))
            nbytes, checksum = await asyncio.to_thread(packer.fill, memory)
            chunk = Chunk(
                key=f"{manifest.version}-{publication}/{len(manifest.chunks)}", nbytes=nbytes, checksum=checksum
            )
            await client.put_flat(chunk.key, memory[:nbytes], handle)
            manifest.chunks.append(chunk)

    async def _clean_up(self, client: Client, index: list[Manifest]) -> None:
        """Frees, for the coming publish, what is not in the index: a version that was dropped, or one that was never
        completed. All but one version's worth of it goes back to the system."""
        known = {_INDEX, *(chunk.key for manifest in index for chunk in manifest.chunks)}
        await asyncio.gather(*(client.delete(key) for key in await client.keys() if key not in known))
        await client.tidy(max((manifest.nbytes for manifest in index), default=0) + self._chunk_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Home:
    """Where the store's process is."""

    host: str
    pid: int

    @classmethod
    def of(cls, group: ProcGroup) -> Home:
        """That of a group of one process."""
        return cls(host=host_identity(group.hosts[0].env.get("FORGE_HOST", "")), pid=group.pids[0])

    def is_here(self) -> bool:
        """Whether its memory can be reached: the same host, the same view of processes, and permission."""
        if self.host != host_identity():
            return False
        try:
            os.listdir(f"/proc/{self.pid}/fd")
        except PermissionError:
            logger.warning("The weight store runs as another user, so weights are copied over TCP instead of shared.")
            return False
        except FileNotFoundError:
            raise WeightStoreError(f"The process that keeps the weights (pid {self.pid}) has ended.") from None
        return True


def host_identity(host: str | None = None) -> str:
    """The same in all processes that can reach each other under /proc, and nowhere else.

    Args:
        host: the config's name of the host, which may be one of several on a machine; None: this process's own.
    """
    host = os.environ.get("FORGE_HOST", "") if host is None else host
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}:{host}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Transports:
    """How chunks travel, by where the other end is."""

    near: str
    """on the store's own host"""
    far: str
    """from and to other hosts"""


def choose_transports(
    transport: Transport, *, rdma_wanted: bool | None = None, rdma_exists: bool | None = None
) -> Transports:
    """What to use, and one warning where RDMA is asked for and there is none.

    "auto": shared memory on the store's host; between hosts RDMA if TORCHSTORE_USE_RDMA=1 and there is any, else TCP.
    Anything else is used for both, with TCP in the place of missing RDMA.
    """
    if rdma_wanted is None:
        rdma_wanted = transport == "rdma" or os.environ.get("TORCHSTORE_USE_RDMA", "0") == "1"
    if rdma_wanted and rdma_exists is None:
        from monarch.rdma import is_ibverbs_available

        rdma_exists = is_ibverbs_available()
    if rdma_wanted and not rdma_exists:
        logger.warning(
            "RDMA was asked for (%s), but this machine has no RDMA device; weights go through %s.",
            "transport rdma" if transport == "rdma" else "TORCHSTORE_USE_RDMA=1",
            "TCP" if transport == "rdma" else "shared memory on this host and TCP between hosts",
        )
    if transport == "auto":
        return Transports(near="shm", far="rdma" if rdma_wanted and rdma_exists else "tcp")
    chosen = "tcp" if transport == "rdma" and not rdma_exists else transport
    return Transports(near=chosen, far=chosen)


@contextlib.asynccontextmanager
async def _explained() -> AsyncIterator[None]:
    """Says what it means when Monarch reports that the other end is dead."""
    from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

    try:
        yield
    except SupervisionError as error:
        raise WeightStoreError(f"The process that keeps the weights has ended: {error}") from error
