"""`concur view`: candidates as a static site that opens in a browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Any

import click

from flows.cli.common import command, emit


@command
@click.argument("place", required=False)
def view(place: str | None, root: str, opened: bool, as_json: bool, **options: Any) -> None:
    """Write a static site of the candidates in PLACE, and print the path of its first page.

    PLACE is a root, the --out of verify-batch, a verification snapshot, or Parquet with
    verdicts. The site opens from disk and can be published as it is.
    """
    from flows.view import write_view

    found = write_view(place or root, **options)
    emit(found, as_json, lambda _: click.echo(found["page"]))
    if opened:
        webbrowser.open(Path(found["page"]).as_uri())
