"""Content as one self-contained HTML page: it loads nothing and runs no script, and everything in
it is escaped.

Guarantees: only what is an http(s) address becomes a link. Does not guarantee what lies behind one.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.reporting.blocks import (
    Block,
    Bullets,
    Cell,
    Code,
    Folded,
    Link,
    Links,
    Picture,
    Section,
    Table,
    Text,
)
from tasks.reporting.drawing import figures
from tasks.reporting.numbers import headline
from tasks.reporting.records import ReportContext
from tasks.reporting.sections import sections
from tasks.reporting.text import address, clean

_CSS = """
:root{color-scheme:light dark;--ink:#1d2126;--paper:#fff;--line:#d8dce2;--soft:#f4f6f8;--accent:#13786a}
@media(prefers-color-scheme:dark){:root{--ink:#dfe3e8;--paper:#15181c;--line:#363c44;--soft:#1e2227;--accent:#4fd1ba}}
body{margin:0 auto;max-width:70rem;padding:1.5rem 1.25rem 4rem;font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);
overflow-wrap:anywhere}
h1{font-size:1.5rem;margin:0}h2{font-size:1.15rem;margin:2.2rem 0 .6rem;border-top:1px solid var(--line);padding-top:1.1rem}
.meta{margin:.2rem 0 1rem;opacity:.75}.headline{font-size:1.15rem;border-left:4px solid var(--accent);padding:.2rem 0 .2rem .9rem}
.scroll{overflow-x:auto;background:linear-gradient(to left,var(--paper) 30%,transparent) right/3rem 100% no-repeat local,
linear-gradient(to left,#8888,transparent) right/.9rem 100% no-repeat scroll}table{border-collapse:collapse;font-size:.9rem;margin:.6rem 0}
th,td{text-align:left;padding:.3rem .8rem .3rem 0;border-bottom:1px solid var(--line);vertical-align:top;overflow-wrap:anywhere}
th{overflow-wrap:normal;vertical-align:bottom}td:first-child{min-width:8.5rem}
td:not(:first-child){font-variant-numeric:tabular-nums;min-width:5.5rem}td.w:not(:first-child){min-width:8rem}
td.n,td:empty{white-space:nowrap;min-width:3rem!important}
figure{margin:1rem 0}figure img{width:100%;max-width:46rem;height:auto}figcaption{font-size:.9rem;opacity:.8}
a{color:var(--accent)}
details{margin:.4rem 0}summary{cursor:pointer;overflow-wrap:anywhere}
pre{background:var(--soft);padding:.8rem;overflow:auto;max-height:28rem;font-size:.8rem;line-height:1.4}
"""
NUMBER, NUMBER_CHARS = re.compile(r"[-+<]?\s?\d|n/a$"), 26
_CSP = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def build_report(context: ReportContext) -> str:
    """The report as one self-contained HTML page."""
    facts = (context.language, context.device, context.created_at)
    return page_of(
        f"concur: {context.run_name}", facts, headline(context), sections(context), figures(context)
    )


def page_of(
    title: str,
    facts: Sequence[str],
    sentence: str,
    content: Sequence[Section],
    drawn: Mapping[str, str],
) -> str:
    """One self-contained HTML page: title, a line of facts, the headline, the sections; `drawn`
    maps a figure's name to its SVG.

    Strings are raw. Raises KeyError for a picture that is not drawn.
    """
    body = "\n".join(_section_html(section, drawn) for section in content)
    meta = " · ".join(_h(fact) for fact in facts if fact)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_CSP}">
<title>{_h(title)}</title><style>{_CSS}</style></head>
<body><h1>{_h(title)}</h1><p class="meta">{meta}</p>
<p class="headline">{_h(sentence)}</p>
{body}
</body></html>
"""


def _section_html(section: Section, drawn: Mapping[str, str]) -> str:
    return "\n".join(
        [f"<h2>{_h(section.title)}</h2>", *(_block_html(block, drawn) for block in section.blocks)]
    )


def _block_html(block: Block, drawn: Mapping[str, str]) -> str:
    match block:
        case Text(text):
            return f"<p>{_h(text)}</p>"
        case Bullets(items):
            return f"<ul>{''.join(f'<li>{_h(item)}</li>' for item in items)}</ul>"
        case Links(items):
            return f"<p>{' · '.join(_cell(item) for item in items)}</p>"
        case Table(header, rows):
            head = "".join(f'<th scope="col">{_h(cell)}</th>' for cell in header)
            lines = "".join(f"<tr>{''.join(map(_td, row))}</tr>\n" for row in rows)
            return (
                "<div"
                f' class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
            )
        case Code(text):
            return f"<pre>{_h(text)}</pre>"
        case Picture(name, caption):
            # as an image, not inline: whatever a label holds, an image can neither run nor load
            # anything
            image = f'<img alt="{_h(caption)}" src="{_data(drawn[name])}">'
            if narrow := drawn.get(f"{name}.narrow"):
                image = (
                    '<picture><source media="(max-width:36rem)"'
                    f' srcset="{_data(narrow)}">{image}</picture>'
                )
            return f"<figure>{image}<figcaption>{_h(caption)}</figcaption></figure>"
        case Folded(title, blocks):
            inner = "".join(_block_html(part, drawn) for part in blocks)
            return f"<details><summary>{_h(title)}</summary>{inner}</details>"


def _td(cell: Cell) -> str:
    """A number stays with its interval on one line; names and sentences may break, sentences
    between words."""
    text = cell if isinstance(cell, str) else ""
    if len(text) <= NUMBER_CHARS:
        return (
            f'<td class="n">{_cell(cell)}</td>' if NUMBER.match(text) else f"<td>{_cell(cell)}</td>"
        )
    return f'<td class="w">{_cell(cell)}</td>'


def _cell(cell: Cell) -> str:
    if not isinstance(cell, Link):
        return _h(cell or "")
    url = address(cell.url)
    # the page that is opened learns neither where it was opened from nor a handle on this one
    return (
        f'<a href="{_h(url)}" rel="noopener noreferrer">{_h(cell.text)}</a>'
        if url
        else _h(cell.text)
    )


def _data(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _h(text: Any) -> str:
    return html.escape(clean(text), quote=True)
