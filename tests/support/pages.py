"""Text that tries to be more than text, and a page as a browser would see it."""

import base64
import re
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

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.text = []
        self.open = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    @property
    def words(self):
        return " ".join("".join(self.text).split())


def svgs(page):
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


def assert_tame(page):
    """Every tag is closed, nothing is loaded from elsewhere, and neither page nor figures act."""
    assert page.open == []
    assert not {"script", "link", "iframe", "object", "b"} & {tag for tag, _ in page.tags}
    sources = [found[name] for _, found in page.tags for name in ("src", "srcset") if name in found]
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    for element in (element for root in svgs(page) for element in root.iter()):
        kind = element.tag.split("}")[-1]
        assert kind not in {"script", "img", "image", "foreignObject", "a"}
        for name, value in element.attrib.items():
            assert not name.lower().startswith("on")
            assert not name.endswith("href") or value.startswith("#")


def assert_whole_tables(markdown, more_than):
    """There are more than so many tables, and their rows have as many cells as their heads."""
    blocks = markdown.strip().split("\n\n")
    tables = [block.split("\n") for block in blocks if block.startswith("|")]
    assert len(tables) > more_than
    for header, rule, *body in tables:
        assert re.fullmatch(r"\|( --- \|)+", rule)
        assert {line.count("|") for line in (header, *body)} == {rule.count("|")}, header
