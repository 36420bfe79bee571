"""Readers of all kinds: the right bytes at the right place, and an end to every wait, whatever fails."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import random
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats.errors import DamagedBundleError, MachineError, UsageError
from bel.runtime import reader_uring
from bel.runtime.readers import KINDS, open_reader
from bel.runtime.reads import PAGE_BYTES, Batches, Read
from bel.runtime.uring import Ring

FILE_PAGES = 1024
TAIL_BYTES = 777  # the file ends within a page
SMALL_PIECE = 3 * PAGE_BYTES
DIRECT = KINDS[:2]


class Memory:
    """Anonymous memory with an address."""

    def __init__(self, size_bytes: int) -> None:
        self._map = mmap.mmap(-1, size_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.size_bytes = size_bytes

    def bytes_at(self, address: int, size_bytes: int) -> bytes:
        return ctypes.string_at(address, size_bytes)

    def fill(self, value: int) -> None:
        ctypes.memset(self.address, value, self.size_bytes)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two files of random bytes, on the disk."""
    folder, rng = tmp_path_factory.mktemp("readers"), random.Random(11)
    paths = []
    for number in range(2):
        paths.append(folder / f"part-{number}.bin")
        with paths[-1].open("wb") as file:
            file.write(rng.randbytes(FILE_PAGES * PAGE_BYTES + TAIL_BYTES))
            file.flush()
            os.fsync(file.fileno())
    return paths


@pytest.fixture(scope="module")
def contents(files: list[Path]) -> list[bytes]:
    return [path.read_bytes() for path in files]


@contextlib.contextmanager
def reader_of(paths: list[Path], kind: str, **options: int) -> Iterator[Any]:
    """A reader of this kind; the test is skipped where the machine has none."""
    try:
        reader = open_reader(paths, kind=kind, **options)
    except MachineError as error:
        if "cannot be had" not in str(error):
            raise
        pytest.skip(str(error))
    with contextlib.closing(reader):
        assert reader.name == kind
        yield reader


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


@contextlib.contextmanager
def alarms(every_seconds: float, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, every_seconds, every_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", KINDS)
def test_signals_that_do_not_stop_us_change_nothing(files: list[Path], contents: list[bytes], kind: str) -> None:
    struck: list[int] = []
    size = FILE_PAGES * PAGE_BYTES
    memory = Memory(size)
    with reader_of(files, kind, piece_bytes=SMALL_PIECE) as reader, alarms(0.0005, lambda n, _f: struck.append(n)):
        for _ in range(20):
            memory.fill(0)
            reader.submit([Read(0, 0, size, memory.address)], 1)
            reader.wait(1)
            assert memory.bytes_at(memory.address, size) == contents[0][:size]
    assert struck


class Stopped(Exception):  # noqa: N818 - stands for KeyboardInterrupt, which pytest would take for its own
    pass


@pytest.mark.parametrize("kind", KINDS)
def test_after_an_interrupt_close_leaves_no_read_in_flight(files: list[Path], kind: str) -> None:
    size = FILE_PAGES * PAGE_BYTES
    memory, hits = Memory(8 * size), 0

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Stopped

    for round_number in range(8):
        with reader_of(files, kind, piece_bytes=SMALL_PIECE) as reader:
            before = signal.signal(signal.SIGALRM, stop)
            gc.disable()  # an exception that strikes within a callback of the collector is lost
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0004 * (round_number + 1))
                for place in range(8):
                    reader.submit([Read(place % 2, 0, size, memory.address + place * size)], place)
                for place in range(8):
                    reader.wait(place)
            except Stopped:
                hits += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
                gc.enable()
        memory.fill(0xEE)
        time.sleep(0.02)
        assert memory.bytes_at(memory.address, 8 * size) == b"\xee" * (8 * size)
    assert hits


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_at_any_line_of_a_wait_is_raised_as_it_is(files: list[Path], kind: str) -> None:
    """Those of the standard library included: some give back a lock that they do not hold at that moment."""
    size = FILE_PAGES * PAGE_BYTES
    memory = Memory(8 * size)
    for number in range(1, 25):
        lines = 0

        def trace(_frame: FrameType, event: str, _argument: Any, number: int = number) -> Any:
            nonlocal lines
            lines += event == "line"
            if event == "line" and lines == number:
                raise Stopped
            return trace

        with reader_of(files, kind, piece_bytes=SMALL_PIECE) as reader:
            reader.submit([Read(place % 2, 0, size, memory.address + place * size) for place in range(8)], 0)
            before = sys.gettrace()
            sys.settrace(trace)
            try:
                reader.wait(0)
            except Stopped:
                continue
            finally:
                sys.settrace(before)
        break  # there are no more lines
    assert number > 2


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_during_close_is_raised_behind_it(files: list[Path], kind: str) -> None:
    memory = Memory(FILE_PAGES * PAGE_BYTES)
    before = open_descriptors()
    reader = open_reader(files, kind="auto" if kind == "io_uring" else kind, piece_bytes=PAGE_BYTES)
    reader.submit([Read(0, 0, memory.size_bytes, memory.address)], 1)
    files_close = reader._files.close  # type: ignore[attr-defined]

    def struck() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        files_close()

    reader._files.close = struck  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        reader.close()
    assert open_descriptors() == before


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


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


def test_what_cannot_be_opened(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no reader 'mmap'"):
        open_reader(files, kind="mmap")
    with pytest.raises(UsageError, match="at least 1"):
        open_reader(files, kind="threads", depth=0)
    before = open_descriptors()
    for kind in ("auto", *KINDS):
        with pytest.raises(MachineError, match=r"none\.bin: cannot be opened: No such file"):
            open_reader([files[0], tmp_path / "none.bin"], kind=kind)
        with pytest.raises(MachineError, match="is not a regular file"):
            open_reader([files[0], tmp_path], kind=kind)
    assert open_descriptors() == before


def test_no_thread_to_be_had_is_an_error_that_leaves_none(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def third_fails(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    before = open_descriptors(), threading.active_count()
    monkeypatch.setattr(threading.Thread, "start", third_fails)
    with pytest.raises(MachineError, match="found 2 threads, expected 16 threads"):
        open_reader(files, kind="buffered")
    assert (open_descriptors(), threading.active_count()) == before


def test_the_best_reader_needs_no_excuse_and_an_asked_one_says_so(files: list[Path]) -> None:
    with contextlib.closing(open_reader(files)) as best:
        assert (best.why == "") == (best.name == KINDS[0])
    with contextlib.closing(open_reader(files, kind="buffered")) as asked:
        assert asked.why == "it was asked for"


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


# A filter of system calls that answers some with an errno, for the rest of the process's life.  The numbers are those of
# x86_64 and aarch64.  `directs` refuses to open with O_DIRECT.
FILTER = """
import ctypes, os, struct, sys
from pathlib import Path
from bel.formats.errors import BelError
from bel.runtime.readers import open_reader
from bel.runtime.reads import Read
import mmap
memory = mmap.mmap(-1, 4096)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
path = Path(sys.argv[1])

def refuse(calls, code, directs=False):
    LOAD, EQUAL, ANY, RETURN = 0x20, 0x15, 0x45, 0x06
    fails, openat = 0x50000 | code, {"x86_64": 257, "aarch64": 56}[os.uname().machine]
    steps = [(LOAD, 0, 0, 0)]
    for number in calls:
        steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, fails)]
    if directs:
        steps += [(EQUAL, 0, 3, openat), (LOAD, 0, 0, 32), (ANY, 0, 1, os.O_DIRECT), (RETURN, 0, 0, 0x50000 | 22)]
    steps.append((RETURN, 0, 0, 0x7FFF0000))
    packed = b"".join(struct.pack("HBBI", *step) for step in steps)
    text = ctypes.create_string_buffer(packed, len(packed))
    class Program(ctypes.Structure):
        _fields_ = [("size", ctypes.c_ushort), ("steps", ctypes.c_void_p)]
    program = Program(len(steps), ctypes.addressof(text))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(program), 0, 0):
        sys.exit(77)

def check(reader):
    reader.submit([Read(0, 8192, 4096, address)], 1)
    reader.wait(1)
    assert memory[:] == path.read_bytes()[8192:12288]
    print(reader.name, "|", reader.why)
    reader.close()
"""


def crippled(files: list[Path], code: str) -> str:
    """What the code prints in a process of its own, which may not come back crippled to this one."""
    done = subprocess.run(
        [sys.executable, "-c", FILTER + textwrap.dedent(code), str(files[0])],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("this machine lets no filter of system calls be set")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (errno.ENOSYS, "this kernel has no io_uring"),
        (errno.EPERM, "io_uring is forbidden here, as in many containers"),
        (errno.EINVAL, "this kernel's io_uring is too old (6.1 is needed)"),
        (errno.ENOMEM, "the memory for an io_uring is refused (this kernel may charge it to `ulimit -l`)"),
    ],
)
def test_without_io_uring_threads_take_over(files: list[Path], code: int, why: str) -> None:
    assert crippled(files, f"refuse([425, 426, 427], {code})\ncheck(open_reader([path]))") == f"threads | {why}"


def test_an_io_uring_that_only_its_first_read_shows_to_be_forbidden(files: list[Path]) -> None:
    printed = crippled(files, f"refuse([426], {errno.EPERM})\ncheck(open_reader([path]))")
    assert printed.startswith("threads | io_uring is forbidden here")


def test_without_direct_io_the_page_cache_takes_over(files: list[Path]) -> None:
    printed = crippled(files, "refuse([], 0, directs=True)\ncheck(open_reader([path]))")
    assert printed == f"buffered | the file system of {files[0]} has no direct I/O"


def test_without_either_the_reason_is_the_one_that_forbids_both(files: list[Path]) -> None:
    printed = crippled(files, f"refuse([425], {errno.ENOSYS}, directs=True)\ncheck(open_reader([path]))")
    assert printed == f"buffered | the file system of {files[0]} has no direct I/O"


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [(f"refuse([425], {errno.EPERM})", "io_uring"), ("refuse([], 0, True)", "io_uring"), ("refuse([], 0, True)", "threads")],
)
def test_a_reader_that_was_asked_for_is_never_replaced(files: list[Path], refusal: str, kind: str) -> None:
    code = f"""
    {refusal}
    try:
        open_reader([path], kind={kind!r})
    except BelError as error:
        print(type(error).__name__, error)
    """
    assert crippled(files, code).startswith(f"MachineError the reader {kind} was asked for and cannot be had: ")


def test_little_lockable_memory(files: list[Path]) -> None:
    code = """
    import resource
    ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)  # nor the capability that lifts the limit, after the next exec
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    check(open_reader([path]))
    """
    assert crippled(files, code).split(" |")[0] in DIRECT


@pytest.mark.parametrize("code", [errno.EIO, errno.EAGAIN])
def test_an_io_uring_that_fails_in_use_ends_the_wait(files: list[Path], code: int) -> None:
    with reader_of(files, "io_uring"):
        pass  # skips where there is none
    printed = crippled(
        files,
        f"""
        reader = open_reader([path], kind="io_uring")
        refuse([426], {code})
        try:
            reader.submit([Read(0, 0, 4096, address)], 1)
            reader.wait(1)
        except BelError as error:
            print(type(error).__name__, error)
        reader.close()
        """,
    )
    assert printed.startswith("MachineError ")
    assert "io_uring" in printed


def test_an_io_uring_that_fails_with_reads_in_flight_says_so(files: list[Path]) -> None:
    with reader_of(files, "io_uring"):
        pass  # skips where there is none
    printed = crippled(
        files,
        f"""
        reader = open_reader([path], kind="io_uring")
        reader.submit([Read(0, 0, 4096, address)], 1)
        refuse([426], {errno.EIO})
        for act in (lambda: reader.wait(1), reader.close):
            try:
                act()
            except BelError as error:
                print(type(error).__name__, error)
        """,
    )
    assert printed.splitlines()[0].startswith("MachineError the io_uring failed: Input/output error")
    assert printed.splitlines()[1].startswith("MachineError the io_uring failed with reads in flight")


def test_a_reader_that_nobody_closes_lets_the_process_end(files: list[Path]) -> None:
    for kind in ("auto", "threads"):
        code = f"reader = open_reader([path], kind={kind!r})\nreader.submit([Read(0, 0, 4096, address)], 1)\nprint('end')"
        assert crippled(files, code) == "end"
