"""`concur morning`: what the last refresh added, what failed and why, and what it cost."""

from __future__ import annotations

import html

import click

from flows.cli.common import command, emit


@command
def morning(root: str, as_json: bool) -> None:
    """Report what is new since the previous refresh, what failed and why, and the cost."""
    from flows.morning import text
    from flows.morning.report import newest

    found = newest(root)
    emit(text.as_json(found), as_json, lambda _: click.echo(_plain(text.markdown(found))))


def _plain(markdown: str) -> str:
    """The same for a terminal: nothing is escaped, and only printable characters are left."""
    text = html.unescape(markdown)
    return "".join(
        character if character.isprintable() or character == "\n" else "?" for character in text
    ).rstrip()
