"""Text that tries to be more than text, and a page as a browser would see it."""

from __future__ import annotations

import base64
from html.parser import HTMLParser
from xml.etree import ElementTree

PARTS = (
    "</pre>",
    "<script>alert(1)</script>",
    '"><img src=http://evil.example/x onerror=alert(2)>',
    "`x`",
    "```",
    "| a | b |",
)
LINES = "\n# title\n[link](http://evil.example) https://evil.example www.evil.example "
HOSTILE = " ".join(PARTS) + LINES + "\x1b[31mred\u202egnp.exe\x00 $\\frac{$"


class Page(HTMLParser):
    """What a browser would see: tags with attributes, text, and whether every tag is closed in
    order."""

    VOID = frozenset({"meta", "img", "br", "source"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())


def svgs(page: Page) -> list[ElementTree.Element]:
    sources = [
        found[name] or ""
        for tag, found in page.tags
        for name in ("src", "srcset")
        if tag in ("img", "source") and name in found
    ]
    return [
        ElementTree.fromstring(base64.b64decode(source.removeprefix("data:image/svg+xml;base64,")))
        for source in sources
    ]
