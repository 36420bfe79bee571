"""The trace format: what is written is read back, from today and from its first version."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bel.formats import trace_layout as layout
from bel.formats.trace import BLOCK_CALLS, BLOCK_IDS, DECODE, PROMPT, TraceLayer
from bel.formats.trace_calls import read_trace
from bel.formats.trace_header import decode_header, encode_header
from bel.formats.trace_reader import TraceReader
from traced import HEADER, Call, assert_holds, calls_of, write


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


def test_skewed_routing_takes_less_than_two_bytes_an_id(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, 129) ** 0.5
    rows = np.argsort(rng.exponential(size=(300, 48, 128)) / share, axis=2)[:, :, :8].astype(np.uint16)
    header = replace(HEADER, layers=tuple(TraceLayer(n, 128, 8, 10**6) for n in range(48)))
    calls = [Call(DECODE, t, n, np.array([t]), rows[t, n : n + 1]) for t in range(300) for n in range(48)]
    size = write(tmp_path / "a.trace", calls, header).stat().st_size
    assert size / rows.size < 1.0


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
