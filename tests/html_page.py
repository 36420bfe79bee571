"""What an HTML page holds, and that it needs nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """What a page holds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "br", "hr", "link", "img"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("href", "src", "xlink:href"):
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def self_contained(text: str) -> Page:
    """The page, which must be whole, without scripts, links to elsewhere, or ids that are used twice or missing."""
    found = Page(text)
    assert not found.open
    assert "script" not in found.tags and "link" not in found.tags
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in found.links)
    assert len(found.ids) == len(set(found.ids))
    assert {link[1:] for link in found.links if link[0] == "#"} <= set(found.ids)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(found.ids)
    assert not re.search(r"https?:|@import|font-family: *'?DejaVu|NaN|\bnan\b", text)
    return found
