"""Weights on a host that the store is not on: one process there fetches a chunk, and all readers share its memory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, ActorError, endpoint
from torch import Tensor

from forge.weights.segments import SegmentHandle, SegmentPool

if TYPE_CHECKING:
    from forge.weights.store import WeightStore
    from forge.weights.torchstore_client import Client

logger = logging.getLogger(__name__)


class Mirror(Actor):
    """Keeps the chunks that readers of its host asked for, until no version in the store consists of them."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._pool = SegmentPool()
        self._held: dict[str, tuple[SegmentHandle, int]] = {}
        self._fetched_bytes = 0

    @endpoint
    async def hold(self, key: str) -> tuple[SegmentHandle, int]:
        """Where the chunk is, and its size in bytes; fetched first unless it is here. Raises KeyError if it is gone."""
        if key not in self._held:
            flat = await self._store.client().get_flat(key)
            await self._let_go(spare_bytes=flat.numel())
            segment = self._pool.keep(self._pool.lend(flat.numel()).handle.inode)
            segment.memory[: flat.numel()].copy_(flat)
            self._held[key] = segment.handle, flat.numel()
            self._fetched_bytes += flat.numel()
        return self._held[key]

    @endpoint
    async def fetched_bytes(self) -> int:
        """What came from the store's host so far."""
        return self._fetched_bytes

    async def _let_go(self, *, spare_bytes: int) -> None:
        """Chunks of versions that there are no more; their memory is kept for those that come, up to as much again."""
        needed = await self._store.chunk_keys()
        for key in self._held.keys() - needed:
            self._pool.release_inode(self._held.pop(key)[0].inode)
        self._pool.trim(spare_bytes + sum(size for _, size in self._held.values()))


class MirrorReader:
    """Reads chunks through the mirror of this host, and straight from the store if the mirror has ended."""

    shares_memory = True

    def __init__(self, mirror: Any, store: Client) -> None:
        self._mirror = mirror
        self._store = store

    async def get_flat(self, key: str) -> Tensor:
        """uint8. Raises KeyError where there is no such chunk, and SegmentGone where it was dropped meanwhile."""
        if self._mirror is None:
            return await self._store.get_flat(key)
        try:
            handle, size = await self._mirror.hold.call_one(key)
        except ActorError as error:
            if isinstance(error.exception, KeyError):
                raise error.exception from None
            raise
        except SupervisionError as error:
            logger.warning("the process that fetches weights for this host has ended; fetching without it: %s", error)
            self._mirror = None
            return await self._store.get_flat(key)
        return handle.open(writable=False)[:size]
