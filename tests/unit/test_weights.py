"""Packing, verification and shared memory, in one process; tests/integration/test_weights.py has the real store."""

import gc
import logging
import os
import signal

import pytest
import torch

from forge.weights import CorruptWeights, WeightStoreError
from forge.weights.packing import Chunk, Manifest, Packer
from forge.weights.segments import Segment, SegmentGone, SegmentPool
from forge.weights.store import Home, choose_transports, host_identity


def pack(named, *, chunk_bytes, dtype=None):
    """The chunks of `named`, and their manifest."""
    manifest, chunks = Manifest(version=7), []
    packer = Packer(iter(named), manifest, dtype=dtype)
    packer.advance()
    while (needed := packer.bytes_of_next()) is not None:
        memory = torch.full((max(needed, chunk_bytes),), 255, dtype=torch.uint8)  # reused memory is not zero
        nbytes, checksum = packer.fill(memory)
        chunks.append(memory[:nbytes])
        manifest.chunks.append(Chunk(key=f"7/{len(chunks) - 1}", nbytes=nbytes, checksum=checksum))
    return manifest, chunks


def unpack(manifest, chunks):
    named = {}
    for index, flat in enumerate(chunks):
        manifest.verify(index, flat)
        named.update(manifest.tensors(index, flat))
    return named


MIXED = {
    "embed.weight": torch.arange(12.0).reshape(3, 4),
    "bias": torch.tensor([1.5], dtype=torch.bfloat16),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "empty": torch.zeros(0, 4),
    "mask": torch.tensor([True, False, True]),
}


def same(a, b):
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and torch.equal(a[k], b[k]) for k in a
    )


@pytest.mark.parametrize("chunk_bytes", [64, 128, 1 << 20])
def test_tensors_come_back_as_they_were_whatever_the_chunk_size(chunk_bytes):
    assert same(unpack(*pack(MIXED.items(), chunk_bytes=chunk_bytes)), MIXED)


def test_the_order_of_names_is_kept():
    assert list(unpack(*pack(MIXED.items(), chunk_bytes=64))) == list(MIXED)


def test_tensors_start_at_multiples_of_64_bytes_and_fill_chunks_in_order():
    manifest, chunks = pack({"a": torch.zeros(3), "b": torch.zeros(4), "c": torch.zeros(30)}.items(), chunk_bytes=128)
    assert [(e.name, e.chunk, e.offset, e.nbytes) for e in manifest.entries] == [
        ("a", 0, 0, 12),
        ("b", 0, 64, 16),
        ("c", 1, 0, 120),
    ]
    assert [chunk.numel() for chunk in chunks] == [80, 120]


def test_a_tensor_larger_than_a_chunk_gets_one_of_its_own():
    manifest, _ = pack({"small": torch.zeros(1), "large": torch.zeros(100)}.items(), chunk_bytes=64)
    assert [chunk.nbytes for chunk in manifest.chunks] == [4, 400]


def test_floating_point_is_converted_on_the_way_and_the_rest_is_not():
    named = unpack(*pack({"w": torch.tensor([1.0, 1.00390625]), "i": torch.tensor([5])}.items(), chunk_bytes=64,
                         dtype=torch.bfloat16))  # fmt: skip
    assert named["w"].dtype == torch.bfloat16
    assert named["w"].tolist() == [1.0, 1.0]  # 1 + 2^-8 lies between two bfloat16 numbers and goes to the even one
    assert named["i"].tolist() == [5]


def test_views_that_are_not_contiguous_are_packed_by_value():
    tensor = torch.arange(6.0).reshape(2, 3).t()
    assert unpack(*pack([("t", tensor)], chunk_bytes=64))["t"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_the_iterable_is_consumed_one_tensor_ahead_only():
    taken = []

    def source():
        for i in range(4):
            taken.append(i)
            yield str(i), torch.zeros(16)

    packer = Packer(source(), Manifest(version=1))
    packer.advance()
    packer.fill(torch.zeros(64, dtype=torch.uint8))
    assert taken == [0, 1]


def test_a_name_that_occurs_twice_is_refused():
    with pytest.raises(ValueError, match="'w' occurs twice"):
        pack([("w", torch.zeros(1)), ("w", torch.zeros(1))], chunk_bytes=64)


def pack_after(old, named, unchanged, *, chunk_bytes):
    """Like `pack`, for a version that comes after `old`."""
    manifest, chunks = Manifest(version=8), []
    packer = Packer(iter(named), manifest, reusable=old.reusable(unchanged))
    packer.advance()
    while packer.bytes_of_next() is not None:
        memory = torch.zeros(chunk_bytes, dtype=torch.uint8)
        nbytes, checksum = packer.fill(memory)
        chunks.append(memory[:nbytes])
        manifest.chunks.append(Chunk(key=f"8/{len(chunks) - 1}", nbytes=nbytes, checksum=checksum))
    packer.refer_to(old)
    return manifest, chunks


def test_unchanged_tensors_are_referred_to_where_they_are():
    frozen = {f"frozen{i}": torch.full((16,), float(i)) for i in range(3)}
    old, old_chunks = pack([*frozen.items(), ("w", torch.zeros(48))], chunk_bytes=192)
    manifest, chunks = pack_after(old, [*frozen.items(), ("w", torch.ones(48))], set(frozen), chunk_bytes=192)
    assert [c.key for c in manifest.chunks] == ["8/0", "7/0"]
    assert same(unpack(manifest, [*chunks, old_chunks[0]]), {**frozen, "w": torch.ones(48)})


def test_a_chunk_with_little_that_is_unchanged_is_not_kept_for_it():
    old, _ = pack([("frozen", torch.zeros(16)), ("w", torch.zeros(48))], chunk_bytes=256)
    manifest, chunks = pack_after(
        old, [("frozen", torch.zeros(16)), ("w", torch.ones(48))], {"frozen"}, chunk_bytes=256
    )
    assert [c.key for c in manifest.chunks] == ["8/0"]
    assert same(unpack(manifest, chunks), {"frozen": torch.zeros(16), "w": torch.ones(48)})


def test_what_is_called_unchanged_but_has_another_shape_or_dtype_or_is_new_is_packed():
    old, _ = pack([("a", torch.zeros(16)), ("b", torch.zeros(16))], chunk_bytes=128)
    new = {"a": torch.ones(4, 4), "b": torch.ones(16, dtype=torch.int32), "c": torch.ones(2)}
    manifest, chunks = pack_after(old, new.items(), set(new), chunk_bytes=256)
    assert [c.key for c in manifest.chunks] == ["8/0"]
    assert same(unpack(manifest, chunks), new)


def test_one_flipped_bit_is_noticed_and_the_message_says_which_tensors():
    manifest, chunks = pack(MIXED.items(), chunk_bytes=1 << 20)
    chunks[0][5] ^= 1
    with pytest.raises(CorruptWeights, match=r"version 7, chunk 0 \(embed.weight to mask\): checksum"):
        manifest.verify(0, chunks[0])


def test_two_swapped_words_are_noticed():
    manifest, chunks = pack([("w", torch.tensor([1.0, 2.0]))], chunk_bytes=64)
    chunks[0].view(torch.float32)[:] = torch.tensor([2.0, 1.0])
    with pytest.raises(CorruptWeights):
        manifest.verify(0, chunks[0])


def test_missing_bytes_are_noticed():
    manifest, chunks = pack([("w", torch.zeros(4))], chunk_bytes=64)
    with pytest.raises(CorruptWeights, match="12 bytes arrived, 16 were published"):
        manifest.verify(0, chunks[0][:12])


def test_a_reader_sees_what_was_written_and_its_own_writes_stay_private():
    segment = Segment(100)
    writer = segment.handle.open(writable=True)
    writer[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    reader = segment.handle.open(writable=False)
    assert reader[:3].tolist() == [1, 2, 3]
    reader[0] = 9
    assert segment.memory[0].item() == 1


def test_a_segment_counts_as_read_for_as_long_as_any_tensor_of_it_lives():
    segment = Segment(64)
    reader = segment.handle.open(writable=False)
    part = reader.view(torch.float32)[2:3]
    assert segment.is_read()
    del reader
    gc.collect()
    assert segment.is_read()
    del part
    gc.collect()
    assert not segment.is_read()


def test_a_reader_that_is_killed_holds_its_segment_no_longer():
    segment = Segment(64)
    told, tell = os.pipe()
    reader = os.fork()
    if reader == 0:  # until it is killed
        held = segment.handle.open(writable=False)
        os.write(tell, bytes(held[:1].tolist()))
        signal.pause()
    os.read(told, 1)
    assert segment.is_read()
    os.kill(reader, signal.SIGKILL)
    os.waitpid(reader, 0)
    assert not segment.is_read()
    os.close(told)
    os.close(tell)


def test_what_is_open_outlives_the_segment_and_opening_afterwards_fails():
    segment = Segment(64)
    segment.memory.fill_(7)
    reader = segment.handle.open(writable=False)
    segment.close()
    assert reader.sum().item() == 7 * 64
    with pytest.raises(SegmentGone):
        segment.handle.open(writable=False)


def test_a_descriptor_that_now_belongs_to_another_file_is_not_mistaken_for_the_segment():
    segment = Segment(64)
    segment.close()
    other = os.memfd_create("other")
    os.dup2(other, segment.handle.fd)
    try:
        with pytest.raises(SegmentGone):
            segment.handle.open(writable=False)
    finally:
        os.close(other)
        if other != segment.handle.fd:
            os.close(segment.handle.fd)


def test_released_segments_are_used_again():
    pool = SegmentPool()
    first = pool.keep(pool.lend(1000).handle.inode)
    pool.release(first)
    assert pool.lend(900) is first


def test_a_segment_that_is_still_read_is_not_used_again():
    pool = SegmentPool()
    first = pool.keep(pool.lend(1000).handle.inode)
    reader = first.handle.open(writable=False)
    pool.release(first)
    assert pool.lend(1000) is not first
    pool.take_back()
    del reader
    gc.collect()
    assert first in (pool.lend(1000), pool.lend(1000))


def test_a_much_larger_segment_is_not_wasted_on_a_small_request():
    pool = SegmentPool()
    large = pool.keep(pool.lend(10_000).handle.inode)
    pool.release(large)
    assert pool.lend(100) is not large


def test_what_a_writer_gave_up_is_free_again():
    pool = SegmentPool()
    lent = pool.lend(1000)
    assert pool.lend(1000) is not lent
    pool.take_back()
    assert lent in (pool.lend(1000), pool.lend(1000))


def test_trim_keeps_no_more_unused_memory_than_asked():
    pool = SegmentPool()
    for segment in [pool.keep(pool.lend(1000).handle.inode) for _ in range(3)]:
        pool.release(segment)
    pool.trim(2500)
    assert len(pool.inodes()) == 2


def test_nothing_appears_under_dev_shm():
    before = set(os.listdir("/dev/shm"))
    segment = Segment(1 << 20)
    segment.memory.fill_(1)
    assert set(os.listdir("/dev/shm")) == before
    segment.close()


@pytest.mark.parametrize(
    ("transport", "wanted", "exists", "near", "far", "warnings"),
    [
        ("auto", False, False, "shm", "tcp", 0),
        ("auto", True, True, "shm", "rdma", 0),
        ("auto", True, False, "shm", "tcp", 1),
        ("rdma", True, True, "rdma", "rdma", 0),
        ("rdma", True, False, "tcp", "tcp", 1),
        ("tcp", False, False, "tcp", "tcp", 0),
        ("shm", False, False, "shm", "shm", 0),
    ],
)
def test_transports(caplog, transport, wanted, exists, near, far, warnings):
    with caplog.at_level(logging.WARNING):
        chosen = choose_transports(transport, rdma_wanted=wanted, rdma_exists=exists)
    assert (chosen.near, chosen.far) == (near, far)
    assert len(caplog.records) == warnings


@pytest.mark.parametrize(("value", "warnings"), [("1", 1), ("0", 0), (None, 0)])
def test_torchstore_use_rdma_is_what_asks_for_rdma(monkeypatch, caplog, value, warnings):
    monkeypatch.delenv("TORCHSTORE_USE_RDMA", raising=False)
    if value is not None:
        monkeypatch.setenv("TORCHSTORE_USE_RDMA", value)
    with caplog.at_level(logging.WARNING):
        assert choose_transports("auto", rdma_exists=False).far == "tcp"
    assert len(caplog.records) == warnings


def test_the_store_is_here_if_host_and_process_are_within_reach(monkeypatch):
    assert Home(host=host_identity(), pid=os.getpid()).is_here()
    assert not Home(host="another", pid=os.getpid()).is_here()
    with pytest.raises(WeightStoreError, match="has ended"):
        Home(host=host_identity(), pid=2**22 - 1).is_here()


def test_a_store_of_another_user_is_reached_without_shared_memory(monkeypatch, caplog):
    def refuse(path):
        raise PermissionError(path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert not Home(host=host_identity(), pid=os.getpid()).is_here()
    assert "as another user" in caplog.text
