"""Readers of all kinds: the right bytes at the right place, or an error that names the place."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.errors import DamagedBundleError, MachineError
from bel.runtime import reader_uring
from bel.runtime.readers import KINDS
from bel.runtime.reads import PAGE_BYTES, Batches, Read
from bel.runtime.uring import Ring
from readable import DIRECT, FILE_PAGES, SMALL_PIECE, TAIL_BYTES, Memory, open_descriptors, random_files, reader_of


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return random_files(tmp_path_factory.mktemp("readers"))


@pytest.fixture(scope="module")
def contents(files: list[Path]) -> list[bytes]:
    return [path.read_bytes() for path in files]


def in_step(kind: str) -> int:
    return 1 if kind == "buffered" else PAGE_BYTES


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100)
@given(data=st.data())
def test_reads_bring_the_files_bytes_to_their_places(
    files: list[Path], contents: list[bytes], kind: str, data: st.DataObject
) -> None:
    step = in_step(kind)
    sizes = data.draw(st.lists(st.integers(0, 40 * PAGE_BYTES // step), max_size=60))
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    reads, at = [], 0
    memory = Memory(sum(sizes) * step + (len(sizes) + 1) * PAGE_BYTES)
    memory.fill(0xA5)
    for size in sizes:
        at += rng.randrange(PAGE_BYTES // step) * step if step < PAGE_BYTES else 0
        offset = rng.randrange(FILE_PAGES * PAGE_BYTES // step - size + 1) * step
        reads.append(Read(rng.randrange(2), offset, size * step, memory.address + at))
        at += size * step
    tags = [rng.randrange(4) for _ in reads]
    with reader_of(files, kind, depth=4, piece_bytes=rng.choice([1, SMALL_PIECE, 2**20])) as reader:
        for read, tag in zip(reads, tags, strict=True):
            reader.submit([read], tag)
        for tag in rng.sample(sorted(set(tags)), len(set(tags))):
            reader.wait(tag)
            for read in (r for r, t in zip(reads, tags, strict=True) if t == tag):
                expected = contents[read.file][read.offset_bytes : read.offset_bytes + read.size_bytes]
                assert memory.bytes_at(read.address, read.size_bytes) == expected
    gaps = bytearray(memory.bytes_at(memory.address, memory.size_bytes))
    for read in reads:
        begin = read.address - memory.address
        gaps[begin : begin + read.size_bytes] = b"\xa5" * read.size_bytes
    assert gaps == b"\xa5" * len(gaps), "bytes were written beside the places that were asked for"


@given(
    size_pages=st.integers(0, 3000),
    piece_bytes=st.integers(1, 5 * 2**20),
    offset_pages=st.integers(0, 2**40),
    address_pages=st.integers(1, 2**35),
)
def test_pieces_cover_a_read_once_and_are_even(
    size_pages: int, piece_bytes: int, offset_pages: int, address_pages: int
) -> None:
    read = Read(0, offset_pages * PAGE_BYTES, size_pages * PAGE_BYTES, address_pages * PAGE_BYTES)
    pieces = Batches(1, piece_bytes, PAGE_BYTES).add([read], 0)
    at = 0
    for piece in pieces:
        assert (piece.offset_bytes, piece.address) == (read.offset_bytes + at, read.address + at)
        assert 0 < piece.size_bytes <= max(piece_bytes, 1) + PAGE_BYTES - 1
        at += piece.size_bytes
    assert at == read.size_bytes
    if pieces:
        assert max(p.size_bytes for p in pieces) - min(p.size_bytes for p in pieces) < PAGE_BYTES * len(pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_more_reads_than_fit_into_flight(files: list[Path], contents: list[bytes], kind: str) -> None:
    count = 4 * reader_uring.RING_READS
    memory = Memory(count * PAGE_BYTES)
    order = random.Random(3).sample(range(count), count)
    with reader_of([files[0]], kind) as reader:
        reader.submit([Read(0, p % FILE_PAGES * PAGE_BYTES, PAGE_BYTES, memory.address + p * PAGE_BYTES) for p in order], 9)
        reader.wait(9)
    assert memory.bytes_at(memory.address, FILE_PAGES * PAGE_BYTES) == contents[0][: FILE_PAGES * PAGE_BYTES]


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_to_the_last_byte_of_a_file(files: list[Path], contents: list[bytes], kind: str) -> None:
    last = FILE_PAGES * PAGE_BYTES
    memory = Memory(PAGE_BYTES)
    with reader_of(files, kind) as reader:
        if kind == "buffered":
            reader.submit([Read(1, last, TAIL_BYTES, memory.address)], 1)
            reader.wait(1)
            assert memory.bytes_at(memory.address, TAIL_BYTES) == contents[1][last:]
        reader.submit([Read(1, last, PAGE_BYTES, memory.address)], 1)
        with pytest.raises(DamagedBundleError, match=r"part-1\.bin: the file ends within") as caught:
            reader.wait(1)
    # direct: what came of the page does not count; else the end itself is the place
    assert caught.value.offset_bytes == (last + TAIL_BYTES if kind == "buffered" else last)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept_bytes", [0, 5 * PAGE_BYTES, 5 * PAGE_BYTES + 512, 6 * PAGE_BYTES - 1])
def test_a_file_cut_short_while_it_is_open(tmp_path: Path, kind: str, kept_bytes: int) -> None:
    path = tmp_path / "experts.bin"
    path.write_bytes(b"x" * 8 * PAGE_BYTES)
    memory = Memory(8 * PAGE_BYTES)
    with reader_of([path], kind) as reader:
        os.truncate(path, kept_bytes)
        reader.submit([Read(0, 0, 8 * PAGE_BYTES, memory.address)], 1)
        with pytest.raises(DamagedBundleError, match=r"experts\.bin: the file ends within") as caught:
            reader.wait(1)
        at = caught.value.offset_bytes
        assert at is not None
        assert kept_bytes - PAGE_BYTES < at <= kept_bytes
        os.truncate(path, 8 * PAGE_BYTES)
        reader.submit([Read(0, 0, PAGE_BYTES, memory.address)], 1)  # the tag is free again, and the reader works on
        reader.wait(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_vanished_or_was_replaced_is_still_read(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_bytes(b"a" * PAGE_BYTES)
    other.write_bytes(b"b" * PAGE_BYTES)
    memory = Memory(PAGE_BYTES)
    with reader_of([path, other], kind) as reader:
        other.replace(path)
        path.unlink()
        for file, expected in ((0, b"a"), (1, b"b")):
            reader.submit([Read(file, 0, PAGE_BYTES, memory.address)], file)
            reader.wait(file)
            assert memory.bytes_at(memory.address, PAGE_BYTES) == expected * PAGE_BYTES


@contextlib.contextmanager
def this_processs_memory(reader: Any) -> Iterator[None]:
    """Let the reader's first file be this process's own memory: the kernel says EIO where no page is mapped."""
    fd = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        os.dup2(fd, reader._files.fds[0])
    finally:
        os.close(fd)
    yield


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_error_of_the_kernel(files: list[Path], contents: list[bytes], kind: str) -> None:
    source, target = Memory(4 * PAGE_BYTES), Memory(4 * PAGE_BYTES)
    source.fill(0x33)
    hole = source.address + 2 * PAGE_BYTES
    protect = ctypes.CDLL(None, use_errno=True).munmap
    assert protect(ctypes.c_void_p(hole), ctypes.c_size_t(PAGE_BYTES)) == 0
    try:
        with reader_of(files, kind) as reader, this_processs_memory(reader):
            good = Read(1, 0, PAGE_BYTES, target.address + 3 * PAGE_BYTES)
            reader.submit([Read(0, source.address, 3 * PAGE_BYTES, target.address), good], 1)
            # the kernel brings two pages and stops; the third is asked for again, and fails
            with pytest.raises(MachineError, match=f"reading {PAGE_BYTES} bytes failed: Input/output error") as caught:
                reader.wait(1)
        assert (caught.value.path, caught.value.offset_bytes) == (str(files[0]), hole)
        assert target.bytes_at(target.address, 2 * PAGE_BYTES) == b"\x33" * 2 * PAGE_BYTES
        assert target.bytes_at(good.address, PAGE_BYTES) == contents[1][:PAGE_BYTES], "the error came before all had ended"
    finally:
        remap = ctypes.CDLL(None, use_errno=True).mmap
        remap.restype, remap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        assert remap(hole, PAGE_BYTES, 3, 0x32, -1, 0) == hole  # private, anonymous, fixed: `source` owns a whole range again


@pytest.mark.parametrize("kind", DIRECT)
def test_memory_that_is_not_there_is_an_error_and_no_crash(files: list[Path], kind: str) -> None:
    with reader_of(files, kind) as reader:
        reader.submit([Read(0, 0, PAGE_BYTES, PAGE_BYTES)], 1)
        with pytest.raises(MachineError, match="Bad address"):
            reader.wait(1)


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_in_part_is_resumed(
    files: list[Path], contents: list[bytes], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, queue_read = os.preadv, Ring.queue_read
    few = 2 * PAGE_BYTES if kind in DIRECT else 1500  # a real read of less than was asked for

    def less(fd: int, buffers: list[Any], offset: int) -> int:
        return preadv(fd, [memoryview(buffers[0]).cast("B")[:few]], offset)

    def queue_less(ring: Ring, fd: int, offset: int, size: int, address: int, key: int) -> None:
        queue_read(ring, fd, offset, min(size, few), address, key)

    monkeypatch.setattr(os, "preadv", less)
    monkeypatch.setattr(Ring, "queue_read", queue_less)
    size = 41 * PAGE_BYTES
    memory = Memory(size)
    with reader_of(files, kind) as reader:
        reader.submit([Read(1, 7 * PAGE_BYTES, size, memory.address)], 1)
        reader.wait(1)
    assert memory.bytes_at(memory.address, size) == contents[1][7 * PAGE_BYTES :][:size]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_of_a_closed_reader(files: list[Path], kind: str) -> None:
    before = open_descriptors(), threading.active_count()
    for _ in range(5):
        with reader_of(files, kind) as reader:
            assert open_descriptors() > before[0]
            reader.close()  # and once more at the end of the block
    assert (open_descriptors(), threading.active_count()) == before


@pytest.mark.parametrize("kind", DIRECT)
@pytest.mark.parametrize("bad", [Read(0, 512, 4096, 4096), Read(0, 0, 100, 4096), Read(0, 0, 4096, 4097), Read(2, 0, 0, 0)])
def test_a_read_that_cannot_be_is_refused_before_any_starts(files: list[Path], kind: str, bad: Read) -> None:
    memory = Memory(PAGE_BYTES)
    memory.fill(0)
    with reader_of(files, kind) as reader:
        with pytest.raises(ValueError, match="in steps of 4096"):
            reader.submit([Read(0, 0, PAGE_BYTES, memory.address), bad], 5)
        with pytest.raises(ValueError, match="tag 5"):
            reader.wait(5)
    assert memory.bytes_at(memory.address, PAGE_BYTES) == bytes(PAGE_BYTES)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tag_with_no_reads_is_complete_and_free_after_it(files: list[Path], kind: str) -> None:
    with reader_of(files, kind) as reader:
        reader.submit([], 3)
        reader.wait(3)
        with pytest.raises(ValueError, match="tag 3"):
            reader.wait(3)


def test_another_thread_may_not_use_an_io_uring(files: list[Path]) -> None:
    memory, raised = Memory(PAGE_BYTES), []
    with reader_of(files, "io_uring") as reader:

        def other() -> None:
            try:
                reader.submit([Read(0, 0, PAGE_BYTES, memory.address)], 1)
            except RuntimeError as error:
                raised.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert raised == ["a reader works only in the thread that opened it"]


@pytest.mark.parametrize("kind", DIRECT)
def test_submit_does_not_wait_for_the_disk(files: list[Path], kind: str) -> None:
    size = FILE_PAGES * PAGE_BYTES
    memory = Memory(8 * size)
    memory.fill(1)
    shares = []
    with reader_of(files, kind) as reader:
        for _ in range(7):
            began = time.perf_counter()
            reader.submit([Read(i % 2, 0, size, memory.address + i * size) for i in range(8)], 1)
            submitted = time.perf_counter()
            reader.wait(1)
            shares.append((submitted - began) / (time.perf_counter() - began))
    assert statistics.median(shares) < 0.5


def cached_pages(path: Path) -> int:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:
        marks = ctypes.create_string_buffer(-(-len(data) // PAGE_BYTES))
        start = ctypes.c_char.from_buffer(data)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(data)), marks)
        del start
        assert not failed
        return sum(mark & 1 for mark in marks.raw)


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_cache_does_not_fill(files: list[Path], kind: str) -> None:
    fd = os.open(files[0], os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    before = cached_pages(files[0])
    if before > FILE_PAGES // 2:
        pytest.skip("this file system keeps its files in memory")
    memory = Memory(FILE_PAGES * PAGE_BYTES)
    with reader_of(files, kind) as reader:
        reader.submit([Read(0, 0, memory.size_bytes, memory.address)], 1)
        reader.wait(1)
    assert cached_pages(files[0]) <= before + FILE_PAGES // 20
