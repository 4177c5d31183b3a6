"""`concur morning`: what the last refresh brought, what failed and why, and what it cost."""

from __future__ import annotations

import json

import click


@click.command()
@click.option(
    "--root",
    default=".concur",
    show_default=True,
    envvar="CONCUR_ROOT",
    help="Where the snapshots are.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
def morning(root: str, as_json: bool) -> None:
    """Say what is new since the refresh before, what failed and why, and what it cost."""
    from flows.cli.main import _guarded
    from flows.morning.morning import morning as report

    found = _guarded(lambda: report(root))
    click.echo(json.dumps(found.as_json()) if as_json else _plain(found.markdown()))


def _plain(markdown: str) -> str:
    """The same for a terminal, where nothing needs to be escaped but what is no character to
    print."""
    import html

    text = html.unescape(markdown)
    return "".join(
        character if character.isprintable() or character == "\n" else "?" for character in text
    ).rstrip()
