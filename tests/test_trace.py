"""The trace format: round trips, torn tails, damage, lies with valid checksums, and a writer that is killed."""

from __future__ import annotations

import base64
import errno
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats import trace_layout as layout
from bel.formats.errors import BadInputError, UsageError
from bel.formats.trace import BLOCK_CALLS, BLOCK_IDS, DECODE, PROMPT, TraceHeader, TraceLayer, TraceWriter
from bel.formats.trace_calls import Trace, read_trace
from bel.formats.trace_header import decode_header, encode_header
from bel.formats.trace_reader import TraceReader

HEADER = TraceHeader(
    model_name="tiny",
    arch="qwen3moe",
    fingerprint="f1",
    layers=(TraceLayer(0, 8, 2, 4096), TraceLayer(3, 300, 3, None)),
    workload="code",
    prompts=("aa", "bb"),
    engine="test",
    engine_build="b1",
    sampling={"temperature": 0, "seed": 1},
)


@dataclass
class Call:
    phase: int
    ubatch: int
    layer: int
    tokens: np.ndarray
    ids: np.ndarray
    weights: np.ndarray | None = None
    time_ns: int | None = None


def calls_of(seed: int, count: int, header: TraceHeader = HEADER) -> list[Call]:
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        row = header.layers[int(rng.integers(len(header.layers)))]
        phase = int(rng.integers(2))
        n = 1 if phase == DECODE else int(rng.integers(1, 5))
        ids = rng.integers(0, row.n_expert, (n, row.top_k)).astype(np.uint16)
        weights = rng.random((n, row.top_k)).astype(np.float16) if header.has_weights else None
        time = int(rng.integers(10**7)) if header.has_times and i % 3 else None
        made.append(Call(phase, i // 3, row.layer, np.arange(i, i + n), ids, weights, time))
    return made


def write(path: Path, calls: list[Call], header: TraceHeader = HEADER, flush_every: int = 0, **options: Any) -> Path:
    with TraceWriter(path, header, sync=False, **options) as writer:
        append(writer, calls, flush_every)
    return path


def append(writer: TraceWriter, calls: list[Call], flush_every: int = 0) -> None:
    for i, c in enumerate(calls, 1):
        writer.append(
            phase=c.phase, ubatch=c.ubatch, layer=c.layer, tokens=c.tokens, ids=c.ids, weights=c.weights, time_ns=c.time_ns
        )
        if flush_every and i % flush_every == 0:
            writer.flush()


def assert_holds(trace: Trace, calls: list[Call]) -> None:
    """The trace is these calls, no more and no less."""
    assert sum(len(x.phase) for x in trace.layers) == len(calls)
    for layer in trace.layers:
        mine = [(i, c) for i, c in enumerate(calls) if c.layer == layer.info.layer]
        assert layer.order.tolist() == [i for i, _ in mine]
        assert layer.phase.tolist() == [c.phase for _, c in mine]
        assert layer.ubatch.tolist() == [c.ubatch for _, c in mine]
        assert layer.rows_per_call.tolist() == [len(c.ids) for _, c in mine]
        assert layer.token.tolist() == [t for _, c in mine for t in c.tokens.tolist()]
        assert layer.ids.tolist() == [row for _, c in mine for row in c.ids.tolist()]
        if layer.weights is not None:
            wanted = [c.weights for _, c in mine if c.weights is not None]
            assert layer.weights.tolist() == [row for w in wanted for row in w.tolist()]
        if layer.time_ns is not None:
            assert layer.time_ns.tolist() == [-1 if c.time_ns is None else c.time_ns for _, c in mine]


@given(seed=st.integers(0, 2**32), count=st.integers(0, 60), flush=st.integers(0, 7), columns=st.integers(0, 3))
@settings(max_examples=60)
def test_a_trace_reads_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, seed: int, count: int, flush: int, columns: int
) -> None:
    header = replace(HEADER, has_weights=bool(columns & 1), has_times=bool(columns & 2))
    calls = calls_of(seed, count, header)
    folder = tmp_path_factory.mktemp("trace")
    path = write(folder / "a.trace", calls, header, flush)
    trace = read_trace(path, weights=True)
    assert trace.header == header
    assert trace.notes == ()
    assert_holds(trace, calls)
    assert write(folder / "b.trace", calls, header, flush).read_bytes() == path.read_bytes()


def test_weights_are_decoded_only_where_asked_for(tmp_path: Path) -> None:
    header = replace(HEADER, has_weights=True)
    path = write(tmp_path / "a.trace", calls_of(1, 20, header), header)
    assert all(x.weights is None for x in read_trace(path).layers)
    assert all(x.weights is not None and x.weights.dtype == np.float16 for x in read_trace(path, weights=True).layers)


def test_blocks_end_by_themselves(tmp_path: Path) -> None:
    one = Call(DECODE, 0, 0, np.array([0]), np.array([[1, 2]], np.uint16))
    path = write(tmp_path / "a.trace", [one] * (BLOCK_CALLS + 1))
    big = Call(PROMPT, 0, 0, np.arange(BLOCK_IDS // 2), np.zeros((BLOCK_IDS // 2, 2), np.uint16))
    with TraceReader(path) as reader:
        assert [len(b.rows) for b in reader.blocks()] == [BLOCK_CALLS, 1]
    with TraceReader(write(tmp_path / "b.trace", [big, one])) as reader:
        assert [len(b.rows) for b in reader.blocks()] == [1, 1]


def test_the_writer_copies_what_it_is_given(tmp_path: Path) -> None:
    ids, tokens = np.array([[1, 2]], np.uint16), np.array([5])
    with TraceWriter(tmp_path / "a.trace", HEADER) as writer:
        writer.append(phase=DECODE, ubatch=0, layer=0, tokens=tokens, ids=ids)
        ids[:], tokens[:] = 7, 9
    layer = read_trace(tmp_path / "a.trace").layers[0]
    assert (layer.ids.tolist(), layer.token.tolist()) == ([[1, 2]], [5])


def test_skewed_routing_takes_less_than_two_bytes_an_id(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, 129) ** 0.5
    rows = np.argsort(rng.exponential(size=(300, 48, 128)) / share, axis=2)[:, :, :8].astype(np.uint16)
    header = replace(HEADER, layers=tuple(TraceLayer(n, 128, 8, 10**6) for n in range(48)))
    calls = [Call(DECODE, t, n, np.array([t]), rows[t, n : n + 1]) for t in range(300) for n in range(48)]
    size = write(tmp_path / "a.trace", calls, header).stat().st_size
    assert size / rows.size < 1.0


def file_of_blocks(tmp_path: Path, count: int = 3) -> tuple[bytes, list[Call], list[int]]:
    """The bytes of a closed trace, its calls (4 a block), and where each block and the end mark begin."""
    calls = calls_of(7, 4 * count)
    data = write(tmp_path / "blocks.trace", calls, flush_every=4).read_bytes()
    starts, at = [], data.index(layout.BLOCK_MARK)
    while at < len(data):
        starts.append(at)
        sizes = layout.BLOCK_HEAD.unpack_from(data, at)[5:13]
        at += layout.BLOCK_HEAD.size + sum(sizes)
    assert at == len(data)
    return data, calls, starts


def test_a_cut_anywhere_costs_the_last_block_only_and_is_said(tmp_path: Path) -> None:
    data, calls, starts = file_of_blocks(tmp_path)
    path = tmp_path / "cut.trace"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        if size < starts[0]:
            with pytest.raises(BadInputError):
                read_trace(path)
            continue
        trace = read_trace(path)
        whole = sum(start <= size for start in starts) - 1
        assert_holds(trace, calls[: 4 * whole])
        assert len(trace.notes) == 1
        said = "not closed in order" if size in starts else f"ends inside block {whole}"
        assert said in trace.notes[0]


def test_a_tail_of_zeros_is_torn(tmp_path: Path) -> None:
    data, calls, starts = file_of_blocks(tmp_path)
    path = tmp_path / "zeros.trace"
    for keep in (starts[2], starts[2] + layout.BLOCK_HEAD.size, starts[3]):
        path.write_bytes(data[:keep] + bytes(starts[3] - keep + (4096 if keep == starts[3] else 0)))
        trace = read_trace(path)
        assert "torn" in trace.notes[0]
        assert_holds(trace, calls[: 12 if keep == starts[3] else 8])


def test_no_flipped_bit_passes(tmp_path: Path) -> None:
    data, _, starts = file_of_blocks(tmp_path, 2)
    path = tmp_path / "flip.trace"
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1 << (at % 8)
        path.write_bytes(bad)
        try:
            trace = read_trace(path)
        except BadInputError as error:
            assert str(path) in str(error)
            continue
        # Only the payload of the last block before an end that is gone too could be taken for torn: never a closed trace.
        raise AssertionError(f"byte {at} of {len(data)} (blocks at {starts}) was flipped and {trace.notes} came of it")


def test_a_flip_in_the_last_block_of_an_unclosed_trace_costs_that_block(tmp_path: Path) -> None:
    data, calls, starts = file_of_blocks(tmp_path)
    bad = bytearray(data[: starts[3]])
    bad[-1] ^= 1
    (tmp_path / "a.trace").write_bytes(bad)
    trace = read_trace(tmp_path / "a.trace")
    assert_holds(trace, calls[:8])
    assert "torn" in trace.notes[0]


def test_blocks_keep_their_place_and_their_run(tmp_path: Path) -> None:
    data, _, starts = file_of_blocks(tmp_path)
    other = write(tmp_path / "other.trace", calls_of(8, 12), replace(HEADER, workload="chat"), 4).read_bytes()
    at = other.index(layout.BLOCK_MARK)
    one, two = data[starts[0] : starts[1]], data[starts[1] : starts[2]]
    for what, bad in {
        "swapped": data[: starts[0]] + two + one + data[starts[2] :],
        "left out": data[: starts[0]] + data[starts[1] :],
        "of another run": data[: starts[0]] + other[at:],
        "twice": data[: starts[1]] + one + data[starts[1] :],
        "two traces": data + other,
        "a byte too many": data + b"\0",
    }.items():
        (tmp_path / "bad.trace").write_bytes(bad)
        with pytest.raises(BadInputError, match=r"out of its place|damaged, or of another run|bytes follow the end"):
            read_trace(tmp_path / "bad.trace")
            raise AssertionError(what)


def head_with(**changes: Any) -> bytes:
    """The first bytes of a trace whose JSON header is changed, with valid digests."""
    body = encode_header(HEADER).decode()
    for old, new in changes.items():
        assert f'"{old}"' in body
        body = body.replace(f'"{old}": ', f'"{old}": {new}, "was_{old}": ', 1)
    return layout.pack_file_head(body.encode())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", '"other"'),
        ("top_k", "9"),
        ("top_k", "0"),
        ("n_expert", "65537"),
        ("n_expert", "-1"),
        ("n_expert", "NaN"),
        ("n_expert", "8.0"),
        ("layer", "3"),
        ("layer", "1e999"),
        ("expert_bytes", "0"),
        ("expert_bytes", str(2**60)),
        ("layers", "[]"),
        ("layers", "[5]"),
        ("model", "null"),
        ("prompts", "[1]"),
        ("sampling", '"' + "x" * 70000 + '"'),
        ("workload", '"' + "x" * 5000 + '"'),
        ("engine", "[" * 100000),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, key: str, value: str) -> None:
    path = tmp_path / "a.trace"
    path.write_bytes(head_with(**{key: value}))
    with pytest.raises(BadInputError, match="header of the trace is not valid"):
        read_trace(path)


def test_a_newer_version_is_refused_by_both_numbers(tmp_path: Path) -> None:
    data = bytearray(write(tmp_path / "a.trace", []).read_bytes())
    data[8] = 7
    (tmp_path / "b.trace").write_bytes(data)
    with pytest.raises(BadInputError, match=r"version 7 .* reads 1"):
        read_trace(tmp_path / "b.trace")


def block_with(columns: dict[str, bytes], **changes: Any) -> bytes:
    """A trace of one block with valid digests and the given raw columns; `changes` go into its head."""
    head = layout.pack_file_head(encode_header(HEADER))
    run = head[layout.FILE_HEAD.size - 16 : layout.FILE_HEAD.size]
    good = {
        "phase": b"\1",
        "layer": np.array([0], "<u2").tobytes(),
        "ubatch": np.array([4], "<i8").tobytes(),
        "rows": np.array([1], "<u4").tobytes(),
        "token": np.array([9], "<i8").tobytes(),
        "ids": bytes([3, 5, 0, 0]),
        "weights": b"",
        "times": b"",
    }
    raw = {**good, **columns}
    packed = [zstandard.compress(raw[name]) if raw[name] else b"" for name in layout.COLUMNS]
    payload = b"".join(packed)
    block = layout.BlockHead(layout.BLOCK_MARK, 0, 1, 1, 2, tuple(map(len, packed)), layout.short_digest(payload))
    return head + replace(block, **changes).pack(run) + payload


def test_the_block_of_the_lies_is_good_without_one(tmp_path: Path) -> None:
    (tmp_path / "a.trace").write_bytes(block_with({}))
    layer = read_trace(tmp_path / "a.trace").layers[0]
    assert (layer.ids.tolist(), layer.token.tolist(), layer.ubatch.tolist()) == ([[3, 5]], [9], [4])


@pytest.mark.parametrize(
    ("columns", "changes"),
    [
        ({"phase": b"\2"}, {}),
        ({"layer": b"\2\0"}, {}),
        ({"rows": bytes(4)}, {}),
        ({"rows": b"\2\0\0\0"}, {}),
        ({"rows": b"\xff\xff\xff\xff"}, {}),
        ({"ubatch": np.array([-1], "<i8").tobytes()}, {}),
        ({"token": np.array([-5], "<i8").tobytes()}, {}),
        ({"ids": bytes([3, 8, 0, 0])}, {}),
        ({"ids": bytes([3, 5, 0, 1])}, {}),
        ({"ids": bytes(6)}, {}),
        ({"ids": bytes(2**20)}, {}),
        ({"weights": bytes(4)}, {}),
        ({"times": bytes(8)}, {}),
        ({"token": b""}, {}),
        ({}, {"calls": 0}),
        ({}, {"calls": 2}),
        ({}, {"calls": 2**32 - 1}),
        ({}, {"rows": 2**31}),
        ({}, {"ids": 2**32 - 1}),
        ({}, {"ids": 1 << 24, "rows": 1 << 22}),
        ({}, {"number": 1}),
        ({}, {"mark": b"ELSE"}),
    ],
)
def test_a_block_that_lies_is_refused(tmp_path: Path, columns: dict[str, bytes], changes: dict[str, Any]) -> None:
    path = tmp_path / "a.trace"
    path.write_bytes(block_with(columns, **changes))
    with pytest.raises(BadInputError, match=r"not valid|claims|out of its place"):
        read_trace(path)


@pytest.mark.parametrize("data", [b"", b"BELTRAC", b"GGUF" + bytes(100), b"BELTRACE", b"BELTRACE" + bytes(3)])
def test_what_is_no_trace_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.trace").write_bytes(data)
    with pytest.raises(BadInputError, match=r"not a trace|cut off"):
        read_trace(tmp_path / "a.trace")


def test_a_folder_and_a_pipe_are_no_traces(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(BadInputError, match="not a file"):
            read_trace(path)


def test_the_writer_refuses_what_cannot_be(tmp_path: Path) -> None:
    good = {"phase": DECODE, "ubatch": 0, "layer": 0, "tokens": np.array([0]), "ids": np.array([[1, 2]], np.uint16)}
    with TraceWriter(tmp_path / "a.trace", HEADER) as writer:
        with pytest.raises(BadInputError, match=r"layer 0 .*out of range; found 8, expected 0 to 7"):
            writer.append(**{**good, "ids": np.array([[1, 8]], np.uint16)})
        with pytest.raises(BadInputError, match="layer 1 is not in the header"):
            writer.append(**{**good, "layer": 1})
        for change in (
            {"ids": np.array([[1, 2]], np.int32)},
            {"ids": np.array([[1, 2, 3]], np.uint16)},
            {"ids": np.zeros((0, 2), np.uint16), "tokens": np.zeros(0, np.int64)},
            {"tokens": np.array([0, 1])},
            {"tokens": np.array([-1])},
            {"phase": 2},
            {"ubatch": -1},
            {"weights": np.zeros((1, 2), np.float16)},
        ):
            with pytest.raises(ValueError, match=r"layer 0|phase|weights"):
                writer.append(**{**good, **change})
        writer.append(**good)
    assert read_trace(tmp_path / "a.trace").id_count == 2


def test_an_existing_file_is_refused_or_taken_away_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "a.trace", calls_of(1, 9))
    with path.open("rb") as old:
        with pytest.raises(UsageError, match="exists already"):
            TraceWriter(path, HEADER)
        write(path, calls_of(2, 3), replace=True)
        assert old.read() != path.read_bytes(), "the old file is still whole for those who read it"
    assert_holds(read_trace(path), calls_of(2, 3))


def test_an_error_in_the_run_keeps_what_was_recorded(tmp_path: Path) -> None:
    calls = calls_of(3, 5)
    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / "a.trace", HEADER) as writer:
        append(writer, calls)
        raise KeyboardInterrupt
    trace = read_trace(tmp_path / "a.trace")
    assert_holds(trace, calls)
    assert trace.notes == ()


def test_a_write_that_fails_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt inside the write of a block must not lose the block, nor write it twice."""
    calls, real = calls_of(3, 8), os.pwrite
    armed = [True]

    def interrupted(fd: int, data: memoryview, offset: int) -> int:
        if armed.pop() if armed else False:
            real(fd, data[: len(data) // 2], offset)
            raise KeyboardInterrupt
        return real(fd, data, offset)

    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / "a.trace", HEADER) as writer:
        append(writer, calls)
        monkeypatch.setattr("os.pwrite", interrupted)
        writer.flush()
    assert not armed
    assert_holds(read_trace(tmp_path / "a.trace"), calls)


KILLED = """
import os, sys
import numpy as np
from pathlib import Path
from bel.formats.trace import TraceHeader, TraceLayer, TraceWriter
writer = TraceWriter(Path(sys.argv[1]), TraceHeader("m", "a", "f", (TraceLayer(0, 8, 2, None),), "w"))
for i in range(10**9):
    writer.append(phase=1, ubatch=i, layer=0, tokens=np.array([i]), ids=np.array([[i % 8, 7]], np.uint16))
    if i % 10 == 9:
        writer.flush()
        print(i + 1, flush=True)
"""


def test_a_killed_writer_loses_at_most_its_last_block(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    flushed = 0
    while flushed < 200:
        flushed = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    flushed = max([flushed, *map(int, process.stdout.read().split())])
    process.wait()
    process.stdout.close()
    trace = read_trace(path)
    assert len(trace.notes) == 1
    ids = trace.layers[0].ids
    assert flushed <= len(ids) <= flushed + 10
    assert ids.tolist() == [[i % 8, 7] for i in range(len(ids))]


def test_headers_that_cannot_be_written_are_refused() -> None:
    for bad in (
        replace(HEADER, layers=()),
        replace(HEADER, layers=HEADER.layers[::-1]),
        replace(HEADER, layers=(TraceLayer(0, 4, 5, None),)),
        replace(HEADER, sampling={"x": float("nan")}),
    ):
        with pytest.raises(ValueError, match=r"layers|layer 0|JSON"):
            encode_header(bad)
    assert decode_header(encode_header(HEADER)) == HEADER


def test_the_structs_are_as_long_as_their_fields() -> None:
    assert (layout.FILE_HEAD.size, len(layout.FILE_FIELDS)) == (32, len(layout.FILE_HEAD.unpack(bytes(32))))
    assert (layout.BLOCK_HEAD.size, len(layout.BLOCK_FIELDS)) == (84, len(layout.BLOCK_HEAD.unpack(bytes(84))))


def golden_calls() -> list[Call]:
    """Plain arithmetic: a random stream may change with numpy."""
    made = []
    for i in range(6):
        row = HEADER.layers[i % 2]
        rows = 3 if i < 2 else 1
        ids = np.array([[(5 * i + 7 * r + 3 * j) % row.n_expert for j in range(row.top_k)] for r in range(rows)], np.uint16)
        phase = PROMPT if i < 2 else DECODE
        made.append(Call(phase, i // 2, row.layer, np.arange(i, i + rows), ids, ids.astype(np.float16) / 512, 1000 * i or None))
    return made


GOLDEN_V1 = (
    r"LPbneQb9vS0RR91mjM6(d}?DLiwj%t<QG|@m9EZ1dm?6Ua&2LBB03-<Vr6VCbaG*1Wg;vfB5iMEWo#lkAbTQiVQpn1Iv^r+X>NHU"
    r"EFdCba${&BIv^r(cV%ufZEs~FEFdCgX>Mm_a&U5KZge6#AR=ZlB7H0%B5YxKWpZ;OIv`tnB5YxKWpW}qATTT-B5q%0cyMKMbRs$+"
    r"I4mF{bZ>B9Ya%)zGAtk>Wq5F9a&%u}d30rSB03;6FgZ4TEFgO#Y+-q2aw0k)Gb|t?ZeL}1aAk6IB03;5Ffc42B6M$XUuz;dATul="
    r"B4v1RWpZ?1VtI6Bb0Rt*Zgp&IeO)XdB6n|cYiw^}WFk5sB4cl4Wg;vfB5-nVZE$pRB03;jB4J@7EFdCcVj^8EAR=XMXK8L_B03;@"
    r"B5q-AWg<EtB6MYQbRsMuB4TxEY-A!jAR=NhB7H0%B6DGFaBOLAXCgWvdm?jXWn>~cATcZ;B6MYKaAk5~bairNB03;2eJmg%V{dGA"
    r"ZEkZSIv{%@cV%g3XmoQTIv{j%b!99dB6MkOWpg4rAartdWqo}@MNC2f00003000070000H0000C0000F0000O0000L0000Q0000X"
    r"0000e0000T00027@@=~C`u2~cH$H>wm38)1u@{p^5p3AOke0J{iNRecwJ-f30~r7S0003fwJ-f31~C8t00031001bpFa01GeE<MR"
    r"00961000000097WP6#NqFa014VE_OF00003000010000ewJ-f3IE?@R7ytqP1%Qw~Lm`j>#7a-*PAIi6{U9R60058x0|x>I0RjaD"
    r"2n!4k5)&2~0096H5C$l<Fa01Q{Qv;S0Du61fWUx203IV8A{ZPYAtWUxCnzW>Dggi#P6#NqFa01Gr2qh6|L6k%&<6kj000000sue^"
    r"nY#i)MNC2g0000300003000080000C0000F0000L0000L0000S0000P0000P0000U00018+XbtDfxx+PE#3-c8JS+Z8K(+zTX`)O"
    r"$b^A$>vl>gwJ-f30~r7S0RaIhwJ-f31~C8t0RR910RSkqFa01GWdHym0RRC20suf_3}68$wJ-f33}FBO0RR910RR910RR91D77#B"
    r"AQ+th09XV7{{jF20000000ICYiveH(D77#BAP|8700ajQ5)~O79{>OV0000004TLD{U8v500000fPg?i0Kgz4CnzZ@D=R3qFa01G"
    r"tpEUMxC;QF4~P>00000000ICjgD)@yLPbnP0ssI20000000000000000000000000000000000000000000000000000000uM<hR"
    r"_4%Qupg>LPHr&ZcXlvT>98-q=Cz2PukR*ah"
)


def test_a_trace_of_version_1_reads_forever(tmp_path: Path) -> None:
    """Written by the first release of the format: two blocks, with weights and times, closed."""
    path = tmp_path / "golden.trace"
    path.write_bytes(base64.b85decode(GOLDEN_V1))
    header = replace(HEADER, has_weights=True, has_times=True)
    trace = read_trace(path, weights=True)
    assert trace.header == header
    assert trace.notes == ()
    assert_holds(trace, golden_calls())


def test_a_header_that_does_not_fit_on_the_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _data: memoryview, _offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(OSError, match="No space") as caught:
        TraceWriter(tmp_path / "a.trace", HEADER)
    assert caught.value.filename == str(tmp_path / "a.trace")
    assert os.listdir(tmp_path) == []
