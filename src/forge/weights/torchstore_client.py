"""TorchStore 0.1.2 as we use it: with async endpoints only, and with shared memory between processes of one host.

Why, and until when:
* its `Controller` mixes sync and async endpoints, which Monarch 0.7 refuses; the subclass here has async ones only.
  Needed until a TorchStore release that runs on Monarch 0.7 (0.1.2 is the last one published);
* it moves tensors by RDMA or inside Monarch messages, where 16 MB take seconds; `SharedMemoryBuffer` moves none, and
  `BytesBuffer` moves bytes. Needed until TorchStore has a shared-memory transport itself.

TorchStore's import reconfigures the root logger and sets an environment variable unless it finds that set, so it is set
here for as long as the import takes.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from monarch.actor import ActorError, endpoint
from torch import Tensor

from forge.weights.segments import SegmentHandle, SegmentPool

_SET_BY_TORCHSTORE = "HYPERACTOR_CODEC_MAX_FRAME_LENGTH"
_was_set = _SET_BY_TORCHSTORE in os.environ
os.environ.setdefault(_SET_BY_TORCHSTORE, "0")
try:
    from torchstore.client import LocalClient
    from torchstore.controller import Controller, StorageInfo
    from torchstore.storage_volume import StorageVolume
    from torchstore.strategy import SingletonStrategy, TorchStoreStrategy
    from torchstore.transport.buffers import RDMATransportBuffer, TransportBuffer
    from torchstore.transport.pipe import Pipe, Request
finally:
    if not _was_set:
        del os.environ[_SET_BY_TORCHSTORE]

__all__ = ["Client", "SingletonStrategy", "StoreController", "Volume"]


def _body(endpoint_of_parent: Any) -> Any:
    """The function under TorchStore's `@endpoint`."""
    return endpoint_of_parent._method


class StoreController(Controller):
    """Knows which keys there are. Each method is its parent's."""

    @endpoint
    async def get_controller_strategy(self) -> TorchStoreStrategy:
        return _body(Controller.get_controller_strategy)(self)

    @endpoint
    async def locate_volumes(self, key: str) -> dict[str, StorageInfo]:
        return _body(Controller.locate_volumes)(self, key)

    @endpoint
    async def notify_put(self, key: str, request: Request, storage_volume_id: str) -> None:
        _body(Controller.notify_put)(self, key, request, storage_volume_id)

    @endpoint
    async def keys(self, prefix: str | None = None) -> list[str]:
        return list(_body(Controller.keys)(self, prefix))

    @endpoint
    async def notify_delete(self, key: str, storage_volume_id: str) -> None:
        _body(Controller.notify_delete)(self, key, storage_volume_id)


class SharedMemoryBuffer(TransportBuffer):
    """Carries the place of a segment of the volume instead of the data in it."""

    def __init__(self, handle: SegmentHandle | None = None, size: int = 0) -> None:
        self.handle = handle
        self.size = size
        self._pool: SegmentPool | None = None

    def in_volume(self, pool: SegmentPool) -> SharedMemoryBuffer:
        """Tells the buffer, once it is in the volume's process, where the segments are."""
        self._pool = pool
        return self

    def allocate(self, tensor_like: Any) -> None:
        pass

    def update(self, other_buffer: TransportBuffer) -> None:
        super().update(other_buffer)
        assert isinstance(other_buffer, SharedMemoryBuffer)
        self.handle, self.size = other_buffer.handle, other_buffer.size

    async def write_from(self, tensor: Tensor | None) -> None:
        """In the volume: where is this tensor?"""
        if self._pool is not None and tensor is not None:
            segment = self._pool.holding(tensor)
            assert segment is not None
            self.handle, self.size = segment.handle, tensor.numel()

    async def read_into(self, tensor: Tensor | None = None) -> Tensor:
        """In the volume: the segment is full, keep it. At a client: open it for reading."""
        assert self.handle is not None
        assert tensor is None
        if self._pool is not None:
            return self._pool.keep(self.handle.inode).memory[: self.size]
        return self.handle.open(writable=False)[: self.size]

    async def drop(self) -> None:
        pass

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}


class BytesBuffer(TransportBuffer):
    """Carries the data itself, as bytes, which Monarch moves fifty times faster than tensors."""

    def __init__(self) -> None:
        self.data = b""

    def allocate(self, tensor_like: Any) -> None:
        pass

    def update(self, other_buffer: TransportBuffer) -> None:
        super().update(other_buffer)
        assert isinstance(other_buffer, BytesBuffer)
        self.data = other_buffer.data

    async def write_from(self, tensor: Tensor | None) -> None:
        if tensor is not None:
            self.data = tensor.numpy().tobytes()

    async def read_into(self, tensor: Tensor | None = None) -> Tensor:
        assert tensor is None
        return torch.frombuffer(bytearray(self.data), dtype=torch.uint8)

    async def drop(self) -> None:
        self.data = b""


class Volume(StorageVolume):
    """Holds flat uint8 tensors in shared memory, whichever way they came."""

    def __init__(self, id_func: Any) -> None:
        super().__init__(id_func)
        self._pool = SegmentPool()

    @endpoint
    async def lend(self, capacity: int) -> SegmentHandle:
        """Memory to write into; `put` with its handle makes it an entry."""
        return self._pool.lend(capacity).handle

    @endpoint
    async def put(self, key: str, transport_buffer: TransportBuffer, request: Request) -> None:
        if isinstance(transport_buffer, SharedMemoryBuffer):
            transport_buffer.in_volume(self._pool)
        await self.store.put(key, transport_buffer, request)
        value = self.store.kv[key]
        if isinstance(value, Tensor) and self._pool.holding(value) is None:
            segment = self._pool.keep(self._pool.lend(value.numel()).handle.inode)
            segment.memory[: value.numel()].copy_(value)
            self.store.kv[key] = segment.memory[: value.numel()]

    @endpoint
    async def get(self, key: str, transport_buffer: TransportBuffer, request: Request) -> TransportBuffer:
        if isinstance(transport_buffer, SharedMemoryBuffer):
            transport_buffer.in_volume(self._pool)
        return await self.store.get(key, transport_buffer, request)

    @endpoint
    async def delete(self, key: str) -> None:
        value = self.store.kv.get(key)
        segment = self._pool.holding(value) if isinstance(value, Tensor) else None
        await self.store.delete(key)
        if segment is not None:
            self._pool.release(segment)

    @endpoint
    async def tidy(self, spare_bytes: int) -> set[int]:
        """No publish is going on: take back what is lent, and keep at most `spare_bytes` for the next one.

        Returns the inodes of the segments that there still are.
        """
        self._pool.take_back()
        self._pool.trim(spare_bytes)
        return self._pool.inodes()


class _Pipe(Pipe):
    def __init__(self, volume: Any, buffer: TransportBuffer) -> None:
        super().__init__(volume)
        self._buffer = buffer

    def create_transport_buffer(self) -> TransportBuffer:
        return self._buffer


class Client(LocalClient):
    """TorchStore's client with a choice of transport for flat uint8 tensors: "shm", "tcp" or "rdma"."""

    def __init__(self, controller: Any, strategy: TorchStoreStrategy, *, transport: str) -> None:
        super().__init__(controller, strategy)
        self._transport = transport
        self._volume, self._volume_id = strategy.select_storage_volume()
        # By inode. A segment that is written again is mapped already: its 16,000 page faults cost more than the copy.
        self._writable: dict[int, Tensor] = {}

    @property
    def shares_memory(self) -> bool:
        return self._transport == "shm"

    async def lend(self, capacity: int) -> tuple[Tensor, SegmentHandle | None]:
        """Memory to fill and to give to `put_flat`, uint8 [>= capacity]; the volume's own where that is possible."""
        if not self.shares_memory:
            return torch.empty(capacity, dtype=torch.uint8), None
        handle: SegmentHandle = await self._volume.lend.call_one(capacity)
        if handle.inode not in self._writable:
            self._writable[handle.inode] = handle.open(writable=True)
        return self._writable[handle.inode], handle

    async def put_flat(self, key: str, flat: Tensor, handle: SegmentHandle | None) -> None:
        """Stores what is in lent memory, or in a tensor of this process if `handle` is None."""
        buffer = self._buffer() if handle is None else SharedMemoryBuffer(handle, flat.numel())
        await self._put(key, Request.from_tensor(flat), buffer)

    async def get_flat(self, key: str) -> Tensor:
        """uint8. Raises KeyError where there is no such key, and SegmentGone where it was deleted meanwhile."""
        tensor: Tensor = await self._get(key, self._buffer())
        return tensor

    async def put_object(self, key: str, value: Any) -> None:
        """Stores anything that pickles, replacing what was there."""
        await self._put(key, Request.from_objects(value), BytesBuffer())

    async def get_object(self, key: str) -> Any:
        """What `put_object` stored. Raises KeyError where there is no such key."""
        return await self._get(key, BytesBuffer())

    async def tidy(self, spare_bytes: int) -> None:
        """See `Volume.tidy`."""
        exist = await self._volume.tidy.call_one(spare_bytes)
        self._writable = {inode: memory for inode, memory in self._writable.items() if inode in exist}

    async def _put(self, key: str, request: Request, buffer: TransportBuffer) -> None:
        await _Pipe(self._volume, buffer).put_to_storage_volume(key, request)
        await self._controller.notify_put.call_one(key, request.meta_only(), self._volume_id)

    async def _get(self, key: str, buffer: TransportBuffer) -> Any:
        volume_id = next(iter(await self._locate_volumes(key)))
        pipe = _Pipe(self.strategy.get_storage_volume(volume_id), buffer)
        try:
            return await pipe.get_from_storage_volume(key, Request.from_objects(None))
        except ActorError as error:
            if isinstance(error.exception, KeyError):  # deleted since it was located
                raise error.exception from None
            raise

    async def _locate_volumes(self, key: str) -> dict[str, StorageInfo]:
        try:
            found: dict[str, StorageInfo] = await self._controller.locate_volumes.call_one(key)
        except ActorError as error:
            if isinstance(error.exception, KeyError):
                raise error.exception from None
            raise
        return found

    def _buffer(self) -> TransportBuffer:
        if self.shares_memory:
            return SharedMemoryBuffer()
        return RDMATransportBuffer() if self._transport == "rdma" else BytesBuffer()
