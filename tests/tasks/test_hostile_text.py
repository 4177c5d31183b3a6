"""Text of strangers in every page that we write, as the Markdown renderer and the HTML parser of a
user interface would take it."""

from html.parser import HTMLParser

import polars as pl
import pytest
from markdown_it import MarkdownIt

from tasks.decontamination.decontamination import Decontaminated, removed_frame
from tasks.observe.composition import SetComposition, markdown_table
from tasks.reporting.text import as_text, cell, cells, fenced
from tests.support.payloads import CANARY, HOSTILE, LINES, PAYLOADS

OURS = {
    "p",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "h1",
    "h2",
    "h3",
    "ul",
    "li",
    "strong",
    "code",
    "pre",
}


class Tags(HTMLParser):
    """Every tag and attribute that a browser would see."""

    def __init__(self, text):
        super().__init__()
        self.tags = set()
        self.attributes = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


def rendered(text):
    """As a page that lets HTML through and links what looks like an address would show it."""
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(text)


def acts(page):
    """What in a rendered page is more than text, in tags and attributes that are not ours."""
    seen = Tags(page)
    attributes = [
        f"{name}={value}"
        for name, value in seen.attributes
        if name not in ("style", "class", "start")
    ]
    return (
        sorted(seen.tags - OURS)
        + attributes
        + [value for name, value in seen.attributes if name == "style" and "url" in value]
    )


def test_the_payloads_act_where_nothing_is_escaped():
    """Otherwise the other tests could not fail."""
    found = acts(rendered(LINES))
    assert {"script", "img", "svg", "iframe", "details", "a"} <= set(found) and any(
        CANARY in each for each in found
    )
    assert (
        sum(bool(acts(rendered(f"a\n\n{one}"))) for one in PAYLOADS) >= 7
    )  # two need something of ours around them to get out of


def decontamination_report():
    names = [HOSTILE, *PAYLOADS]
    rows = [
        {"task_id": name, "benchmark_task_id": name, "level": "exact", "detail": name}
        for name in names
    ]
    frame = removed_frame([])
    frame = pl.DataFrame(
        [{column: row.get(column) for column in frame.columns} for row in rows], schema=frame.schema
    )
    return Decontaminated(("kept",), frame, ("exact",), (HOSTILE, LINES)).markdown()


def composition():
    fields = {name: None for name in SetComposition.model_fields}
    fields |= {
        "name": HOSTILE,
        "samples": 1,
        "tasks": 1,
        "single_operator": 1,
        "fusion": 0,
        "timed": 0,
        "families": {HOSTILE: 1},
        "left_out": (),
    }
    return markdown_table([SetComposition.model_construct(**fields)])


def observations():
    from tasks.observe.stage import Found

    return Found(finding=(HOSTILE,), cautions=(LINES,)).markdown()


PLACES = {
    "decontamination, in Prefect and on the card": decontamination_report,
    "the training sets by strategy": composition,
    "what the observations say": observations,
    "a caution": lambda: f"- {as_text(HOSTILE)}\n\n{as_text(LINES)}",
    "cells of a table artifact": lambda: "\n\n".join(
        str(one) for row in cells([{HOSTILE: HOSTILE, "n": LINES}]) for one in row.values()
    ),
    "a cell of the card": lambda: f"| {cell(HOSTILE, 9999)} |\n\n{cell(LINES, 9999)}",
    "code on the card": lambda: f"before\n\n{fenced(LINES, 'python', 9999)}\n\nafter",
}


@pytest.mark.parametrize("place", PLACES)
def test_nothing_that_a_stranger_wrote_is_markup(place):
    page = rendered(PLACES[place]())
    assert acts(page) == []
    assert ("onerror" in page and "title" in page) or place.endswith("strategy")  # it is shown
