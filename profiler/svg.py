"""A matplotlib figure as an SVG element that goes straight into a page.  Needs matplotlib.

Text stays text and takes the page's font; the colours of text, muted text and lines are the page's variables --ink, --muted
and --line, so that a dark page works.
"""

from __future__ import annotations

import io
import re
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

INK, MUTED, LINE = "#010203", "#040506", "#070809"  # stand-ins, replaced by the page's variables
_VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", LINE: "var(--line)"}
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "bel",  # the same report gives the same bytes
    "text.parse_math": False,  # a workload may be called $x$
    "font.family": ["DejaVu Sans"],  # matplotlib's own; only for its measure, the page's font replaces it
    "font.size": 10.5,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.linewidth": 1.9,
    "savefig.transparent": True,
}


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure: its finding as a title, the SVG element, and the width beyond which its text would be too large."""

    title: str
    svg: str
    width_px: int


def draw(title: str, width_in: float, height_in: float, paint: Callable[[Figure], None]) -> Drawing:
    """What `paint` puts on a figure of that size.  The same painting gives the same bytes."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        paint(figure)
        out = io.StringIO()
        with warnings.catch_warnings():
            # The font only serves to measure; the page's own may well have the letters of a workload's name.
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return Drawing(title, _inline(out.getvalue(), title), round(100 * width_in))


def _inline(svg: str, title: str) -> str:
    """The svg element alone, free of links, fixed sizes and fonts; ids made unique by the title."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg[^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg).replace("xlink:href", "href")
    mark = f"f{zlib.crc32(title.encode()):08x}"
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{mark}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{mark}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{mark}-\1"', svg)
    for stand_in, variable in _VARIABLES.items():
        svg = svg.replace(stand_in, variable)
    return svg
