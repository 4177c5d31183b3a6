"""What the pages link to outside of docs/ becomes part of the site.

Guarantees: a link to a file of the repository works both where the repository is browsed and in the
built site: Markdown becomes a page under `repository/`, anything else is copied there. A link to
something that is not there is left as it is, and ends the strict build. Does not put pages from
outside of docs/ into the navigation.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "repository/"
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def write_pages(own: Mapping[str, str], out: Path) -> None:
    """Write the pages `own` (path in docs/ to text) into the folder `out`, and all files of the
    repository that these lead to."""
    pages = {f"docs/{path}": text for path, text in own.items()}
    todo, places = list(pages), {page: page.removeprefix("docs/") for page in pages}
    while todo:
        place = todo.pop()
        for _, target, _ in links(place, pages[place]):
            if target in places or target.startswith("docs/") or not (ROOT / target).is_file():
                continue
            places[target] = PREFIX + target
            if target.endswith(".md"):
                pages[target] = (ROOT / target).read_text(encoding="utf-8")
                todo.append(target)
    for place, path in places.items():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        if place in pages:
            (out / path).write_text(_relinked(place, pages[place], places), encoding="utf-8")
        else:
            shutil.copyfile(ROOT / place, out / path)


def _relinked(place: str, text: str, places: Mapping[str, str]) -> str:
    """The page with its links pointed at their places in the site."""
    for match, target, anchor in reversed(list(links(place, text))):
        if target in places:
            folder = posixpath.dirname(places[place]) or "."
            text = (
                text[: match.start()]
                + posixpath.relpath(places[target], folder)
                + anchor
                + text[match.end() :]
            )
    return text


def links(place: str, text: str) -> Iterator[tuple[re.Match[str], str, str]]:
    """Each relative link outside of code: the match, the path in the repository it leads to, and
    its anchor. `place` is the page's own."""
    code = [
        span.span()
        for span in re.finditer(r"^(`{3,}).*?^\1|`[^`\n]+`", text, re.MULTILINE | re.DOTALL)
    ]
    for match in LINK.finditer(text):
        if not any(start <= match.start() < end for start, end in code):
            yield (
                match,
                posixpath.normpath(posixpath.join(posixpath.dirname(place), match[1])),
                match[2] or "",
            )
