"""Which reader a machine gives and why, and an end to every wait where it gives none or takes it away."""

from __future__ import annotations

import contextlib
import errno
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from bel.formats.errors import MachineError, UsageError
from bel.runtime.readers import KINDS, open_reader
from readable import DIRECT, open_descriptors, random_files, reader_of


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return random_files(tmp_path_factory.mktemp("readers"))


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
