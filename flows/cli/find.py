"""`concur ls`, `concur show` and `concur open`: what is under a root, and where to look at it."""

from __future__ import annotations

import json
import os
import webbrowser
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flows.cli.common import command, emit, require_extras
from kernels_eval.errors import UsageError

if TYPE_CHECKING:
    from tasks.store import Snapshot

SERVERS = {"prefect": "PREFECT_API_URL", "mlflow": "MLFLOW_TRACKING_URI"}
PAGES = {
    "report": ("report.html", "`concur run` writes it when it ends"),
    "view": ("view/index.html", "`concur view` writes it"),
}


@command
def ls(root: str, stage: str | None, as_json: bool) -> None:
    """List the snapshots under a root, with rows, size and date, and the refreshes that made them.

    `concur show FINGERPRINT` shows one.
    """
    from flows.morning.history import refreshes
    from flows.ops.gc_inventory import scan

    if not Path(root).is_dir():
        raise UsageError(f"there is no directory {root}", "name one with --root")
    found = [each for each in scan(Path(root)) if stage in (None, each.stage)]
    data = {
        "root": root,
        "snapshots": [
            each.model_dump(include={"stage", "fingerprint", "finished", "rows", "bytes"})
            | {"changed_at": datetime.fromtimestamp(each.changed_s, UTC).isoformat(" ", "minutes")}
            for each in sorted(found, key=lambda each: each.changed_s)
        ],
        "refreshes": [each.model_dump(mode="json") for each in refreshes(root)],
    }
    emit(data, as_json, "ls")


@command
@click.argument("fingerprint")
def show(fingerprint: str, root: str, rows: int, as_json: bool) -> None:
    """Show a snapshot: its manifest, its columns and its first rows.

    FINGERPRINT is the beginning of one, or the snapshot's directory.
    """
    from tasks.store.lookup import find_snapshot

    snapshot = find_snapshot(root, fingerprint).open()
    data = {
        "path": snapshot.path,
        "manifest": snapshot.manifest if snapshot.finished else None,
        "columns": {each.name: str(each.type) for each in snapshot.schema()},
        "rows": _first(snapshot, rows),
    }
    emit(data, as_json, "show")


def _first(snapshot: Snapshot, most: int) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for _, frame in snapshot.frames():
        if len(found) >= most:
            break
        found += json.loads(frame.head(most - len(found)).write_json())
    return found


@command
@click.argument("what", type=click.Choice([*PAGES, *SERVERS]))
def open(what: str, root: str, as_json: bool) -> None:
    """Print the address of the newest report, the candidates, Prefect or MLflow, and open it if
    there is a browser."""
    address = _server(what, root) if what in SERVERS else _page(what, root)
    shown = {"DISPLAY", "WAYLAND_DISPLAY", "BROWSER"} & os.environ.keys()
    opened = bool(shown) and not as_json and webbrowser.open(address)
    emit({"what": what, "address": address, "opened": opened}, as_json, lambda _: print(address))


def _page(what: str, root: str) -> str:
    name, fix = PAGES[what]
    page = Path(root).absolute() / name
    if not page.is_file():
        raise UsageError(f"there is no {page}", f"{fix}; or name another root with --root")
    return page.as_uri()


def _server(what: str, root: str) -> str:
    require_extras(["line"])
    from flows.ops.control import use_stack
    from flows.ops.health import mlflow_page

    environment = dict(os.environ)
    use_stack(root, environment)
    address = environment.get(SERVERS[what], "")
    if not address.startswith("http"):
        raise UsageError(
            f"no {what} server is running for {root}", f"start one with `concur up --root {root}`"
        )
    return mlflow_page(address) if what == "mlflow" else address.removesuffix("/api")
