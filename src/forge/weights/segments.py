"""Memory that several processes of one host share, and that the kernel frees when the last of them is gone.

A segment is a memfd: it has no name under /dev/shm, so nothing can be left behind, whatever ends the processes, and the
size of /dev/shm (64 MB in many containers) does not limit it. Other processes of the same user reach it through
/proc/<pid>/fd/<fd>. Whoever reads one holds a shared lock for as long as its mapping lives; the owner reuses a segment
only when no such lock is left. Reuse matters: touching 538 MB of new pages costs ten times as much as the copy itself.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass

import torch
from torch import Tensor


class SegmentGone(RuntimeError):
    """The segment was freed, or its owner has ended, before it could be opened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentHandle:
    """Where another process finds a segment. Small, and means something on the owner's host only."""

    pid: int
    fd: int
    inode: int
    capacity: int
    """bytes"""

    def open(self, *, writable: bool) -> Tensor:
        """The memory as a uint8 tensor [capacity], which keeps it mapped.

        Writable: what is written is seen by all. Otherwise the segment is locked against reuse until the tensor is
        gone, and what is written into the tensor stays private to this process.

        Raises:
            SegmentGone: there is no such segment (any more).
            PermissionError: it belongs to another user.
        """
        try:
            fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise SegmentGone(f"segment {self.inode} of process {self.pid} is gone") from error
        try:
            if os.fstat(fd).st_ino != self.inode:  # the number was given to another file
                raise SegmentGone(f"segment {self.inode} of process {self.pid} was freed")
            if not writable:
                fcntl.flock(fd, fcntl.LOCK_SH)
            return _map(fd, self.capacity, mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE)
        finally:
            os.close(fd)  # the mapping has its own duplicate, and the lock lives as long as that


class Segment:
    """A segment that this process owns."""

    def __init__(self, capacity: int) -> None:
        self._fd = os.memfd_create("forge-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, capacity)
        self.memory = _map(self._fd, capacity, mmap.MAP_SHARED)
        """uint8 [capacity]"""
        self.handle = SegmentHandle(pid=os.getpid(), fd=self._fd, inode=os.fstat(self._fd).st_ino, capacity=capacity)

    def is_read(self) -> bool:
        """Whether any process still has it open for reading."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """Gives the memory back once the last mapping of it, here or elsewhere, is gone."""
        os.close(self._fd)


class SegmentPool:
    """The owner's segments: lent to a writer, kept while they hold something, reused afterwards."""

    def __init__(self) -> None:
        self._lent: dict[int, Segment] = {}
        self._kept: dict[int, Segment] = {}
        self._free: list[Segment] = []

    def lend(self, capacity: int) -> Segment:
        """A segment of at least `capacity` bytes that nobody reads; new if none is free. Its content is arbitrary."""
        fitting = [s for s in self._free if capacity <= s.handle.capacity <= 2 * capacity and not s.is_read()]
        if fitting:
            segment = min(fitting, key=lambda s: s.handle.capacity)
            self._free.remove(segment)
        else:
            segment = Segment(capacity)
        self._lent[segment.handle.inode] = segment
        return segment

    def keep(self, inode: int) -> Segment:
        """The lent segment is full now; it stays as it is until `release`."""
        self._kept[inode] = self._lent.pop(inode)
        return self._kept[inode]

    def holding(self, tensor: Tensor) -> Segment | None:
        """The kept segment whose memory `tensor` starts at."""
        return next((s for s in self._kept.values() if s.memory.data_ptr() == tensor.data_ptr()), None)

    def release(self, segment: Segment) -> None:
        """Its content is not needed any more. Readers keep what they have open."""
        del self._kept[segment.handle.inode]
        self._free.append(segment)

    def release_inode(self, inode: int) -> None:
        """`release` of the kept segment with this inode."""
        self.release(self._kept[inode])

    def inodes(self) -> set[int]:
        """Of all segments that there are."""
        return {s.handle.inode for s in (*self._lent.values(), *self._kept.values(), *self._free)}

    def take_back(self) -> None:
        """Whatever is still lent belongs to a writer that gave up."""
        self._free.extend(self._lent.values())
        self._lent.clear()

    def trim(self, spare_bytes: int) -> None:
        """Frees unused segments, those with readers first, until at most `spare_bytes` remain."""
        self._free.sort(key=Segment.is_read)  # stable: unread ones first
        kept: list[Segment] = []
        for segment in self._free:
            if sum(s.handle.capacity for s in kept) + segment.handle.capacity <= spare_bytes:
                kept.append(segment)
            else:
                segment.close()
        self._free = kept


def _map(fd: int, capacity: int, flags: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(fd, capacity, flags=flags), dtype=torch.uint8)
