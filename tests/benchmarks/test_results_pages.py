"""Every page of results says how it came about, and what README and docs quote is what the newest
page says."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "benchmarks/results").glob("*.md"))
NEEDED = {
    "machine": r"\bH200\b|\bH100\b|\bcores?\b",
    "date": r"\b20\d\d-\d\d-\d\d\b",
    "command": r"`(?:python -m|pytest|make|concur|\.ci/run)\b",
    "commit": r"\b(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7,40}\b",
}

README = "README.md"
TUTORIAL = "docs/tutorial.md"
TRAIN = "docs/how-to/train.md"
DEMO = r"`make demo`: (\d+) min"
TEST = r"`make test`: (\d+) min"
QUOTED = [
    (README, r"bundled data \((\d+) to (\d+) minutes on 2 cores", DEMO),
    (TUTORIAL, r"It takes (\d+) to (\d+) minutes on 2 idle cores", DEMO),
    (README, r"runs the tests \(under (\d+) minutes on 2 cores\)", TEST),
    (
        README,
        r"from 0 to ([\d.]+) % Exec@1 on 73 published operators, and\n? *to ([\d.]+) % on 100",
        r"on 73 published operators: 0, then ([\d.]+), .*held out: 0, ([\d.]+),",
    ),
    (
        README,
        r"runs at ([\d.]+) to ([\d.]+) times TRL",
        r"\| TRL, FSDP2 \| 2 \| .*\*\*([\d.]+)\*\*(?:.*\n)+?"
        r"\| TRL, FSDP2 \| 2 \| [\d,]+ \| [\d,]+ \| ([\d.]+) ",
    ),
    (
        TRAIN,
        r"\[([\d.]+) \(rows of 8,192 tokens\) to ([\d.]+) times \(16,384\)\]",
        r"8,192 \| ours \| [^|]* \| \*\*([\d.]+)\*\*(?:.*\n)+?"
        r"\| 16,384 \| ours [^|]*\| [^|]*\| \*\*([\d.]+)",
    ),
]
"""Document, what it quotes, and how a page of results says it."""


@cache
def commits():
    """The history of this checkout; empty where it has none, or a part only."""
    asked = ["git", "-C", str(ROOT), "rev-list", "HEAD"]
    whole = not (ROOT / ".git/shallow").exists()
    return subprocess.run(asked, capture_output=True, text=True).stdout.split() if whole else []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_machine_date_command_and_commit(page):
    text = page.read_text(encoding="utf-8")
    head = text.split("\n## ")[0]
    absent = [what for what, pattern in NEEDED.items() if not re.search(pattern, head)]
    assert not absent, f"{page.name} does not say before its first section: {absent}"
    known = commits()
    named = re.findall(NEEDED["commit"], head)
    assert not known or any(each.startswith(tuple(named)) for each in known), (
        f"{page.name} names no commit of this repository"
    )


@pytest.mark.parametrize("document, quoted, source", QUOTED)
def test_what_a_document_quotes_is_what_the_newest_page_says(document, quoted, source):
    found = re.findall(quoted, (ROOT / document).read_text(encoding="utf-8"))
    assert len(found) == 1, f"{document} quotes {quoted} {len(found)} times: correct this test"
    said = found[0] if isinstance(found[0], tuple) else (found[0],)
    pages = [(page, re.findall(source, page.read_text(encoding="utf-8"))) for page in PAGES]
    page, measured = [each for each in pages if each[1]][-1]
    newest = measured[-1] if isinstance(measured[-1], tuple) else (measured[-1],)
    if source in (DEMO, TEST):
        low, high = (0, said[0]) if len(said) == 1 else said
        assert int(low) <= int(newest[0]) < int(high), (
            f"{document} says {said}, {page.name} {newest}"
        )
    else:
        assert said == newest, f"{document} says {said}, {page.name} {newest}"


def test_every_time_and_throughput_of_the_readme_has_a_source():
    text = (ROOT / README).read_text(encoding="utf-8")
    text = re.sub(r"```text\n.*?```", "", text, flags=re.DOTALL)  # the output of a command
    figures = r"\d[\d.,]*(?: to [\d.,]+)? (?:s|seconds?|min|minutes?|h|hours?|tokens/s|times)\b"
    known = [
        found.span()
        for name, quoted, _ in QUOTED
        if name == README
        for found in re.finditer(quoted, text)
    ]
    for figure in re.finditer(figures, text):
        assert any(start <= figure.start() < end for start, end in known), figure.group()
