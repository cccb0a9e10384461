"""Named tensors in flat chunks, and how a reader knows that it got what was written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
import xxhash
from torch import Tensor

ALIGNMENT = 64
"""Bytes; a cache line, and a multiple of every dtype's size."""


class WeightStoreError(RuntimeError):
    """Weights could not be published or fetched."""


class UnknownVersion(WeightStoreError):
    """No such version: never published, not published completely, or dropped because newer ones were."""


class CorruptWeights(WeightStoreError):
    """What arrived is not what was published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Where one tensor is."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunk: int
    offset: int
    """bytes from the start of the chunk"""

    @property
    def nbytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A flat piece of the weights."""

    key: str
    nbytes: int
    checksum: int
    """XXH3, 64 bits: as fast as memory can be read"""


@dataclass(kw_only=True, slots=True)
class Manifest:
    """What a version consists of."""

    version: int
    entries: list[Entry] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)

    def verify(self, index: int, flat: Tensor) -> None:
        """Raises CorruptWeights unless `flat` (uint8) is chunk `index` as it was published."""
        chunk = self.chunks[index]
        if flat.numel() != chunk.nbytes:
            raise CorruptWeights(
                f"version {self.version}, chunk {index}: {flat.numel()} bytes arrived, {chunk.nbytes} were published."
            )
        if (checksum := checksum_of(flat)) != chunk.checksum:
            names = [entry.name for entry in self.entries if entry.chunk == index]
            raise CorruptWeights(
                f"version {self.version}, chunk {index} ({names[0]} to {names[-1]}): checksum {checksum:016x} arrived, "
                f"{chunk.checksum:016x} was published. Fetch it again; if that fails too, publish it again."
            )

    def tensors(self, index: int, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The named tensors of chunk `index` as views of `flat`."""
        for entry in self.entries:
            if entry.chunk == index:
                piece = flat[entry.offset : entry.offset + entry.nbytes]
                yield entry.name, piece.view(entry.dtype).view(entry.shape)

    def reusable(self, unchanged: Collection[str]) -> dict[str, Entry]:
        """The entries of `unchanged` whose chunks are worth keeping: those which mostly consist of such entries."""
        held = dict.fromkeys(range(len(self.chunks)), 0)
        for entry in self.entries:
            held[entry.chunk] += entry.nbytes if entry.name in unchanged else 0
        return {
            e.name: e for e in self.entries if e.name in unchanged and 2 * held[e.chunk] >= self.chunks[e.chunk].nbytes
        }


def checksum_of(flat: Tensor) -> int:
    """XXH3 (64 bits) of the bytes of a uint8 tensor; lets other threads run."""
    return xxhash.xxh3_64_intdigest(flat.numpy())


class Packer:
    """Packs named tensors into flat chunks and writes down where each is.

    Consumes the iterable, one tensor ahead of what has been packed; produces the entries of `manifest`.

    Args:
        dtype: what floating-point tensors are converted to; None leaves them as they are.
        reusable: entries of an older manifest whose tensors are not packed again, as long as shape and dtype agree.
    """

    def __init__(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        manifest: Manifest,
        *,
        dtype: torch.dtype | None = None,
        reusable: dict[str, Entry] | None = None,
    ) -> None:
        self._source = iter(named_tensors)
        self._manifest = manifest
        self._dtype = dtype
        self._reusable = reusable or {}
        self._names: set[str] = set()
        self._next: tuple[str, Tensor] | None = None
        self.reused: list[Entry] = []

    def advance(self) -> None:
        """Takes the next tensor that has to be packed from the source."""
        while (taken := next(self._source, None)) is not None:
            name, tensor = taken
            if name in self._names:
                raise ValueError(f"The name {name!r} occurs twice among the weights; each must be unique.")
            self._names.add(name)
            there = self._reusable.get(name)
            if there is None or (there.shape, there.dtype) != (tuple(tensor.shape), self._target(tensor)):
                break
            self.reused.append(there)
        self._next = taken

    def refer_to(self, old: Manifest) -> None:
        """Adds what was reused, and the chunks of `old` that hold it, to the manifest."""
        index_here: dict[int, int] = {}
        for entry in self.reused:
            if entry.chunk not in index_here:
                index_here[entry.chunk] = len(self._manifest.chunks)
                self._manifest.chunks.append(old.chunks[entry.chunk])
            self._manifest.entries.append(replace(entry, chunk=index_here[entry.chunk]))

    def bytes_of_next(self) -> int | None:
        """What the next tensor takes, or None after the last."""
        return None if self._next is None else self._next[1].numel() * self._target(self._next[1]).itemsize

    def fill(self, memory: Tensor) -> tuple[int, int]:
        """Packs as many tensors as fit into `memory` (uint8), converting as it copies; `(bytes used, checksum)`."""
        used = 0
        while self._next is not None:
            name, tensor = self._next
            entry = Entry(
                name=name,
                shape=tuple(tensor.shape),
                dtype=self._target(tensor),
                chunk=len(self._manifest.chunks),
                offset=-(-used // ALIGNMENT) * ALIGNMENT,
            )
            if entry.offset + entry.nbytes > memory.numel():
                break
            memory[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).view(entry.shape).copy_(tensor)
            used = entry.offset + entry.nbytes
            self._manifest.entries.append(entry)
            self.advance()
        return used, checksum_of(memory[:used])

    def _target(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
