"""A curated snapshot as a folder that `datasets.load_dataset`, polars and DuckDB read without our
code.

Layout: `data/train-00000-of-0000N.parquet` (and `test-...`), `strategies/NAME/...` for further
configurations, `README.md` (the card), `croissant.json`, `figures/`, and `publication.json`: what
the folder is made of, its revision, and the SHA-256 of every file.

Guarantees: the folder is there whole or not at all, written beside its place and renamed; what it
replaces is an earlier publication and nothing else, and stays until the new one is whole; the same
snapshots, options and code give the same bytes and the same revision, and no work is done twice.
Does not guarantee that two processes that publish to one place at once both succeed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
from pydantic import ValidationError

from kernels_eval.errors import UsageError
from kernels_eval.records import Json, Record, stable_hash
from tasks.files import explain_write_errors, file_sha256
from tasks.publishing.card import Card, card
from tasks.publishing.config import (
    CROISSANT,
    DATA,
    FIGURES,
    PUBLICATION,
    README,
    STRATEGIES,
    PublishOptions,
)
from tasks.publishing.lineage import Lineage, analysis_of, facts, lineage
from tasks.publishing.shards import Shard, write_shards
from tasks.publishing.statistics import statistics_of, workloads_of
from tasks.reporting.text import cell
from tasks.store import Snapshot, SnapshotRef, another_runs
from tasks.versions import PUBLISHING_VERSION

MAX_CHARACTERS = (
    2000  # of a sentence of an analysis: it names generators, whose names are anybody's
)
WRITE_FIX = (
    "choose another --out, free some disk, or change its permissions; what was published there"
    " before is intact"
)


class PublishedFile(Record):
    """One file of the folder: its path inside, its size and its SHA-256 in hex."""

    path: str
    size_bytes: int
    sha256: str


class Published(Record):
    """A published folder. `tag` is its revision, also the git tag on the hub; `fingerprint`
    identifies its content."""

    schema_version: int = 1
    tag: str
    fingerprint: str
    created_at: str
    name: str
    configs: tuple[str, ...]
    curated: dict[str, str]
    facts: dict[str, Json]
    options: PublishOptions
    shards: tuple[Shard, ...]
    files: tuple[PublishedFile, ...]

    @property
    def rows(self) -> dict[str, dict[str, int]]:
        """Rows by configuration and split."""
        found: dict[str, dict[str, int]] = {name: {} for name in self.configs}
        for shard in self.shards:
            found[shard.config][shard.split] = found[shard.config].get(shard.split, 0) + shard.rows
        return found


def publish(
    curated: SnapshotRef,
    out: Path,
    options: PublishOptions | None = None,
    *,
    strategies: Sequence[SnapshotRef] = (),
    observations: str | None = None,
    decontamination: str | None = None,
    figures: Sequence[Path] = (),
) -> Published:
    """Publish a curated snapshot, and `strategies` as further configurations, into the folder
    `out`.

    `observations` and `decontamination` are Markdown for those sections of the card; `figures` are
    images, copied to `figures/`. Without `observations`, those of the set's own samples are taken,
    with their figures, where an analysis of them is there. Raises UsageError where a snapshot
    cannot be published, `out` holds something else or cannot be written, or a figure cannot be
    read.
    """
    options, out = options or PublishOptions(), out.expanduser().absolute()
    lines = _named([lineage(ref) for ref in (curated, *strategies)])
    known, first = {name: facts(line) for name, line in lines.items()}, next(iter(lines.values()))
    fingerprints = {name: line.curated.fingerprint for name, line in lines.items()}
    created_at = max(line.manifest["created_at"] for line in lines.values())
    if observations is None and (analysis := analysis_of(first)):
        observations, drawn = observed(analysis)
        figures = figures or drawn
    workloads = workloads_of(first)
    fingerprint = stable_hash(
        [
            options.model_dump(mode="json"),
            fingerprints,
            known,
            workloads.model_dump() if workloads else None,
            observations,
            decontamination,
            _identity_of(figures),
            PUBLISHING_VERSION,
        ]
    )
    tag = f"refresh-{created_at[:10]}-{fingerprint[:8]}"
    with explain_write_errors(out, WRITE_FIX):
        _restore(out)
    if (there := _replaceable(out)) and there.fingerprint == fingerprint and is_whole(out, there):
        return there
    with explain_write_errors(out, WRITE_FIX), _beside(out) as beside:
        folder, shards = beside / "set", list[Shard]()
        for name, line in lines.items():
            place = f"{STRATEGIES}/{name}" if shards else DATA
            shards += write_shards(
                line, folder, options, config=name, directory=place, scratch=beside / "scratch"
            )
        context = Card(
            options=options,
            tag=tag,
            shards=shards,
            columns=pq.read_schema(folder / shards[0].path).names,
            statistics={
                name: statistics_of(folder, [each for each in shards if each.config == name])
                for name in lines
            },
            facts=known,
            workloads=workloads,
            observations=observations,
            decontamination=decontamination,
            figures=[f"{FIGURES}/{figure.name}" for figure in figures],
        )
        _write_texts(folder, context, created_at, figures)
        published = Published(
            tag=tag,
            fingerprint=fingerprint,
            created_at=created_at,
            name=options.name,
            configs=tuple(lines),
            curated=fingerprints,
            facts=known,
            options=options,
            shards=tuple(shards),
            files=tuple(_file(folder, path) for path in sorted(_files_in(folder))),
        )
        (folder / PUBLICATION).write_text(published.model_dump_json(indent=2) + "\n", "utf-8")
        _put(folder, out)
    return published


def read_publication(folder: Path) -> Published:
    """What a published folder says of itself. Raises UsageError where it is none, or is of a later
    version."""
    try:
        return Published.model_validate_json((folder / PUBLICATION).read_text("utf-8"))
    except OSError as error:
        raise UsageError(
            f"{folder} is no published set: {error.strerror or error}",
            "give a folder that `concur publish` made",
        ) from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{folder / PUBLICATION} cannot be read", "publish again into another folder"
        ) from error


def is_whole(folder: Path, published: Published, *, content: bool = False) -> bool:
    """Whether its files are all there in the right size, and with `content` with the right
    SHA-256."""
    return all(
        (path := folder / file.path).is_file()
        and path.stat().st_size == file.size_bytes
        and (not content or file_sha256(path) == file.sha256)
        for file in published.files
    )


def observed(analysis: Snapshot) -> tuple[str, list[Path]]:
    """The sentences of an analysis as Markdown, and its figures. What comes from data is escaped in
    them already, or is here."""
    manifest = analysis.manifest
    sentences = (*manifest["finding"], *manifest["cautions"])
    figures = [name for name in manifest["files"] if name.endswith(".png")]
    return (
        "\n".join(f"- {cell(sentence, MAX_CHARACTERS)}" for sentence in sentences),
        [analysis.local_dir() / name for name in figures],
    )


def _named(lines: list[Lineage]) -> dict[str, Lineage]:
    """Each configuration by its strategy, which is also a directory. Two of one strategy are told
    apart by fingerprints."""
    found: dict[str, Lineage] = {}
    for line in lines:
        name = re.sub(r"[^A-Za-z0-9_]+", "_", line.strategy).strip("_")[:60] or "strategy"
        fingerprint = line.curated.fingerprint
        if name in found:
            if found[name].curated.fingerprint == fingerprint:
                continue
            name = f"{name}_{fingerprint[:8]}"
        found[name] = line
    return found


def _write_texts(folder: Path, context: Card, created_at: str, figures: Sequence[Path]) -> None:
    """The figures, the card and the Croissant metadata of the existing files."""
    from tasks.publishing.croissant import croissant  # mlcroissant takes a second to import

    for figure in figures:
        (folder / FIGURES).mkdir(exist_ok=True)
        shutil.copyfile(figure, folder / FIGURES / figure.name)
    (folder / README).write_text(card(context), "utf-8")
    schema = pq.read_schema(folder / context.shards[0].path)
    sha256 = {shard.path: file_sha256(folder / shard.path) for shard in context.shards}
    (folder / CROISSANT).write_text(croissant(context, created_at, schema, sha256), "utf-8")


# -- files -----------------------------------------------------------------------------------------


def _identity_of(figures: Sequence[Path]) -> list[list[str]]:
    found: dict[str, str] = {}
    for figure in figures:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", figure.name):
            raise UsageError(
                f"the figure {figure.name!r} has characters that a page cannot link to",
                "use letters, digits, . _ and -",
            )
        if figure.name in found:
            raise UsageError("two figures have the same name", "rename one")
        try:
            found[figure.name] = file_sha256(figure)
        except OSError as error:
            raise UsageError(
                f"cannot read the figure {figure}: {error.strerror or error}", "check the path"
            ) from error
    return [list(pair) for pair in found.items()]


def _replaceable(out: Path) -> Published | None:
    """The publication that lies at `out`, None where nothing does. Raises UsageError where
    something else is there too."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(f"{out} is not a folder", "choose another --out")
    if not out.exists() or not any(out.iterdir()):
        return None
    hint = "choose another --out: only a folder that `concur publish` made is replaced"
    if not (out / PUBLICATION).is_file():
        raise UsageError(f"{out} contains other files", hint)
    published = read_publication(out)
    known = {PUBLICATION, *(file.path for file in published.files)}
    if others := sorted(set(_files_in(out)) - known):
        raise UsageError(
            f"{out} also holds files that are not of the published set, such as {others[0]}", hint
        )
    return published


def _files_in(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if not path.is_dir() or path.is_symlink():
            yield path.relative_to(folder).as_posix()


def _file(folder: Path, path: str) -> PublishedFile:
    size_bytes = (folder / path).stat().st_size
    return PublishedFile(path=path, size_bytes=size_bytes, sha256=file_sha256(folder / path))


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """An empty directory next to `out`, removed when the block ends. What killed processes left
    there goes as well."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(f".{out.name}.*"):
        owner = re.fullmatch(r"(\d+)\.(new|scratch)", left.name.removeprefix(f".{out.name}."))
        if owner and not another_runs(int(owner[1])):
            shutil.rmtree(left, ignore_errors=True)
    folder = out.parent / f".{out.name}.{os.getpid()}.new"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _old(out: Path) -> Path:
    return out.parent / f".{out.name}.old"


def _put(folder: Path, out: Path) -> None:
    """`folder` becomes `out`. A process killed between the renames leaves the old folder under
    another name: see `_restore`."""
    if out.exists() and any(out.iterdir()):
        out.rename(_old(out))
    try:
        folder.rename(out)  # replaces an empty directory
    except BaseException:
        _restore(out)
        raise
    shutil.rmtree(_old(out), ignore_errors=True)


def _restore(out: Path) -> None:
    """Undo half of an exchange that a killed process left."""
    if (_old(out) / PUBLICATION).is_file():  # a publication, and nothing else of that name
        if out.exists():
            shutil.rmtree(_old(out))
        else:
            _old(out).rename(out)
