"""MkDocs hook: what the pages link to outside of docs/ becomes part of the site, and no page is
left out of the navigation.

Guarantees: a link to a file of the repository works both where the repository is browsed and in the
built site: Markdown becomes a page under `repository/`, anything else is copied there. A link to
something that is not there is left as it is, and ends the strict build. A page that `nav` does not
name stands at the end of its folder's section. Does not put pages from outside of docs/ into the
navigation.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "repository/"
SECTIONS = {"how-to": "How-to", "reference": "Reference", "explanation": "Explanation"}
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: Any) -> Files:
    """Add every file outside of docs/ that a page leads to, and all that those lead to."""
    todo = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    while todo:
        place, text = todo.pop()
        for target in {found for _, found, _ in links(place, text)}:
            if (
                target.startswith("docs/")
                or files.get_file_from_path(PREFIX + target)
                or not (ROOT / target).is_file()
            ):
                continue
            if not target.endswith(".md"):
                files.append(
                    File.generated(config, PREFIX + target, abs_src_path=str(ROOT / target))
                )
                continue
            content = (ROOT / target).read_text(encoding="utf-8")
            files.append(
                File.generated(
                    config, PREFIX + target, content=content, inclusion=InclusionLevel.NOT_IN_NAV
                )
            )
            todo.append((target, content))
    _name_every_page(files, config)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page with its links to files of the repository pointed at their places in the site."""
    uri = page.file.src_uri
    place = uri.removeprefix(PREFIX) if uri.startswith(PREFIX) else f"docs/{uri}"
    for match, target, anchor in reversed(list(links(place, markdown))):
        there = target.removeprefix("docs/") if target.startswith("docs/") else PREFIX + target
        if files.get_file_from_path(there):
            relative = posixpath.relpath(there, posixpath.dirname(uri) or ".")
            markdown = markdown[: match.start()] + relative + anchor + markdown[match.end() :]
    return markdown


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


def _name_every_page(files: Files, config: Any) -> None:
    named = set(re.findall(r"[\w/.-]+\.md", str(config["nav"])))
    for folder, section in SECTIONS.items():
        entries = next(entry[section] for entry in config["nav"] if section in entry)
        for file in files.documentation_pages():
            if file.src_uri.startswith(f"{folder}/") and file.src_uri not in named:
                entries.append(file.src_uri)
