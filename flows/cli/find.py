"""Commands that find what is there: snapshots, pages, reports, profiles and their settings."""

from __future__ import annotations

import json
import os
import webbrowser
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from flows.cli import pages
from flows.cli.common import (
    Candidates,
    Group,
    Json,
    Profile,
    Root,
    command,
    setting,
)
from flows.cli.silence import now_at
from kernels_eval.errors import UsageError
from kernels_eval.installation import ROOT_VARIABLE

if TYPE_CHECKING:
    from pydantic import BaseModel

    from flows.morning.history import Refresh
    from tasks.store import Snapshot


@command(Group.FIND, page=pages.of_list)
def ls(
    *,
    root: Root = ".concur",
    stage: str | None = None,
) -> Json:
    """List the newest snapshot of each stage under a root, and the newest refreshes.

    `--stage STAGE` lists all of a stage, `concur show FINGERPRINT` shows one.

    Options:
        stage: Snapshots of this stage only, such as curation.
    """
    from flows.gc import scan
    from flows.morning.history import refreshes

    if not Path(root).is_dir():
        raise UsageError(f"there is no directory {root}", "name one with --root")
    found = [each for each in scan(Path(root)) if stage in (None, each.stage)]
    snapshots = [
        each.model_dump(include={"stage", "fingerprint", "finished", "rows", "level", "bytes"})
        | {"changed_at": datetime.fromtimestamp(each.changed_s, UTC).isoformat(timespec="seconds")}
        for each in sorted(found, key=lambda each: each.changed_s)
    ]
    return {
        "root": root,
        "snapshots": snapshots,
        "refreshes": [refresh_row(each) for each in refreshes(root)],
    }


def refresh_row(refresh: Refresh) -> Json:
    """Return a refresh with the names of its snapshots."""
    names = {name: f"{ref.stage}/{ref.fingerprint}" for name, ref in refresh.snapshots.items()}
    return refresh.model_dump(mode="json") | {"snapshots": names}


@command(Group.FIND, needs=["batch"], page=pages.of_shown)
def show(
    fingerprint: str,
    *,
    root: str | None = None,
    rows: Annotated[int, Option(min=0)] = 3,
) -> Json:
    """Show a snapshot: what it holds, its first rows and its columns. Or a candidate: its verdict
    and its kernel.

    Options:
        fingerprint FINGERPRINT: The beginning of a fingerprint or of a candidate's id, a
            snapshot's directory, or --out of verify-batch.
        root: Folder of the snapshots, or --out of verify-batch. [default: $CONCUR_ROOT, else
            .concur, and what verify-batch wrote here]
        rows N: Print the first N rows.
    """
    from tasks.curation.source import in_batch
    from tasks.store.lookup import find_snapshot

    first, *others = [snapshots_in(root)] if root else roots_here()
    try:
        snapshot = find_snapshot(first, str(in_batch(Path(fingerprint)))).open()
    except UsageError as error:
        for place in (first, *others):
            if found := verdict_on(place, fingerprint):
                return {"verdict": found}
        hint = "give --root: a folder of snapshots, or --out of verify-batch; `concur ls` lists one"
        raise UsageError(error.args[0], error.hint if root else hint) from error
    return {
        "path": snapshot.path,
        "finished": snapshot.finished,
        "manifest": snapshot.manifest if snapshot.finished else None,
        "columns": {each.name: str(each.type) for each in snapshot.schema()},
        "rows": under_their_names(first_rows(snapshot, rows), snapshot),
    }


def snapshots_in(place: str) -> str:
    """The root of snapshots of a place: a root, or what verify-batch wrote."""
    below = Path(place, "snapshots")
    return str(below) if below.is_dir() else place


def roots_here() -> list[str]:
    """The default root, then those that verify-batch wrote into the current folder, newest
    first."""
    batches = [path.parent.parent for path in Path().glob("*/snapshots/verification")]
    batches.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return [
        os.environ.get(ROOT_VARIABLE) or ".concur",
        *(snapshots_in(str(path)) for path in batches),
    ]


def verdict_on(root: str, name: str) -> Json | None:
    """Return the newest verdict on the candidate of this id or name, else of the only id that
    begins so. Raises UsageError where several do."""
    from tasks.store.lookup import newest_first

    for snapshot in newest_first(root, "verification"):
        names, ids = names_of(snapshot), snapshot.keys("candidate_id")
        found = [each for each in ids if name in (each, names.get(each))]
        found = found or [each for each in ids if each.startswith(name)]
        if len(found) > 1:
            said = f"{len(found)} candidates of {snapshot.path} begin with {name!r}"
            raise UsageError(said, "give more of the id")
        for row in snapshot.rows_by("candidate_id", found):
            given = {"given_id": names.get(row["candidate_id"])}
            return given | row | kernel_of(snapshot, row["candidate_id"])
    return None


def kernel_of(snapshot: Snapshot, candidate_id: str) -> Json:
    """Return the `code` of a candidate that was judged; nothing where it is not stored or gave
    none."""
    candidates = snapshot.above("synthesis", "candidates", "improved")
    if candidates is None:
        return {}
    return next(candidates.rows_by("candidate_id", [candidate_id], ["code"]), {})


def first_rows(snapshot: Snapshot, most: int) -> list[Json]:
    """Return at most `most` rows, as plain data."""
    found: list[Json] = []
    for _, frame in snapshot.frames():
        if len(found) >= most:
            break
        found += json.loads(frame.head(most - len(found)).write_json())
    return found


def under_their_names(rows: list[Json], snapshot: Snapshot) -> list[Json]:
    """The rows, each with the name that its candidate has in the table or folder it is from."""
    from tasks.verification.batch import under_its_name

    if not (names := names_of(snapshot)):
        return rows
    return [under_its_name({"given_id": names.get(row["candidate_id"])} | row) for row in rows]


def names_of(snapshot: Snapshot) -> dict[str, str]:
    """Return the names of a snapshot's candidates in the table or folder they are from, by id."""
    table = snapshot.above("candidates") if snapshot.finished else None
    if table is None:
        return {}
    known = table.read(columns=["candidate_id", "given_id"]).select("candidate_id", "given_id")
    return dict(known.drop_nulls().iter_rows())


@command(Group.FIND, needs=["line"])
def view(
    place: str | None = None,
    *,
    root: Root = ".concur",
    candidates: Candidates = None,
    tasks: str | None = None,
    out: str | None = None,
    opened: bool = False,
) -> Json:
    """Write a static site of the candidates in PLACE, and print the path of its first page.

    PLACE is a root, the --out of verify-batch, a verification snapshot, or Parquet with
    verdicts. The site opens from disk and can be published as it is.

    Options:
        place PLACE: A root, a verification, or Parquet. [default: --root]
        tasks TASKS: Tasks of the candidates: Parquet or task files. [default: beside the
            snapshot]
        out DIR: Folder to write. [default: view, in the root or the current folder]
        opened --open: Open the page in the browser.
    """
    from flows.view import write_view

    now_at(f"writes the pages of {place or root}")
    found = write_view(place or root, candidates, tasks=tasks, out=out)
    if opened:
        webbrowser.open(Path(found["page"]).as_uri())
    return found


@command(Group.FIND, needs=["line"], page=pages.of_morning)
def morning(
    *,
    root: Root = ".concur",
) -> Json:
    """Report what is new since the previous refresh, what failed and why, and what to do."""
    from flows.morning import text
    from flows.morning.report import newest

    return text.as_json(newest(root))


@command(Group.FIND)
def profiles() -> Json:
    """List the profiles that ship with concur, and what each is for."""
    from flows.config import about_profile, load_profile, shipped_dir, shipped_names

    found = []
    for name in shipped_names("profiles"):
        path, config = shipped_dir("profiles") / f"{name}.yaml", load_profile(name)
        kind = {"name": name, "language": config.language.value, "root": config.root}
        found.append(kind | {"about": about_profile(name), "path": str(path)})
    return {"profiles": found}


@command(Group.FIND)
def config(
    what: Literal["show", "keys", "schema"],
    key: str = "",
    *,
    profile: Profile = "local",
    overrides: list[str] = setting("the profile", "language=cuda"),
) -> Json | str:
    """Show the configuration that a run with a profile would have, what its keys mean, or the JSON
    Schema of profiles.

    `show` says of every key whether its value comes from --set, the profile or the defaults.
    `keys` explains them: `concur config keys timing`. Those of verification.eval are the protocol,
    which `verify --set` takes without that prefix. `schema` is for editors: name the file in the
    first line of a profile, as `# yaml-language-server: $schema=FILE`.

    Options:
        what WHAT: The values, what each key means, or the JSON Schema.
        key KEY: keys: only those with this in their name. [default: all]
    """
    from flows.config import PipelineConfig, load_profile, read_profile
    from tasks.reporting.text import masked

    if what == "schema":
        return json.dumps(PipelineConfig.model_json_schema())
    if what == "keys":
        defaults = dict(dotted(PipelineConfig().model_dump(mode="json")))
        known = {
            name: {"default": defaults.get(name), "meaning": meaning}
            for name, meaning in explained(PipelineConfig)
            if key in name
        }
        if not known:
            raise UsageError(f"no key has {key!r} in its name", "see `concur config keys`")
        return {"keys": known}
    values = masked(load_profile(profile, overrides).model_dump(mode="json"))
    in_profile = [key for key, _ in dotted(read_profile(profile))]
    in_overrides = [override.partition("=")[0] for override in overrides]

    def source(key: str) -> str:
        if is_among(key, in_overrides):
            return "--set"
        return "profile" if is_among(key, in_profile) else "default"

    keys = {key: {"value": value, "from": source(key)} for key, value in dotted(values)}
    return {"profile": profile, "keys": keys}


def explained(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield every key with its dotted path and its meaning."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and hasattr(kind, "model_fields"):
            yield from explained(kind, f"{above}{name}.")
        else:
            yield f"{above}{name}", " ".join((field.description or "").split())


def dotted(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key with its dotted path that holds a value, not keys."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def is_among(key: str, keys: list[str]) -> bool:
    """Return whether a key is among these, or below one of them."""
    return any(key == each or key.startswith(f"{each}.") for each in keys)
