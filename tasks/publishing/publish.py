"""A curated snapshot as a folder that `datasets.load_dataset`, polars and DuckDB read without our
code.

Layout: `data/train-00000-of-0000N.parquet` (and `test-...`), `strategies/NAME/...` for further
configurations, `README.md` (the card), `croissant.json`, `figures/`, and `publication.json`: what
the folder is made of, its revision, and the SHA-256 of every file.

Guarantees: the folder is there whole or not at all, written beside its place and renamed; what it
replaces is an earlier publication of ours and nothing else, and stays until the new one is whole;
the same snapshots, options and code give the same bytes and the same revision, and no work is done
twice. Does not guarantee that two processes that publish to one place at once both succeed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from kernels_eval.errors import UsageError
from kernels_eval.records import Record, stable_hash
from tasks.publishing.card import CardContext, bibtex_of_set, card
from tasks.publishing.columns import UNKNOWN
from tasks.publishing.croissant import croissant
from tasks.publishing.lineage import Lineage, analysis_of, facts, lineage
from tasks.publishing.shards import SHARD_BYTES, Shard, write_shards
from tasks.publishing.statistics import statistics_of
from tasks.publishing.workloads import Workloads, workloads_of
from tasks.reporting.text import cell
from tasks.store import Snapshot, SnapshotRef
from tasks.versions import PUBLISHING_VERSION

PUBLICATION, README, CROISSANT, DATA, FIGURES = (
    "publication.json",
    "README.md",
    "croissant.json",
    "data",
    "figures",
)
MOST_CHARACTERS = 2000
"""Of a sentence of an analysis: they name generators, whose names are anybody's."""


class PublishOptions(Record):
    """How a set is published. Part of the revision: other options, another revision."""

    name: str = Field(default="ConCuR kernels", min_length=1, max_length=200)
    license: str = Field(
        default=UNKNOWN,
        pattern=r"^[a-z0-9][a-z0-9.+-]*$",
        description="the hub's identifier, such as apache-2.0",
    )
    creator: str = "unknown"
    url: str = README
    citation: str | None = Field(
        default=None, description="BibTeX of the set; default: one that names the revision"
    )
    holdout_share: float = Field(
        default=0.0, ge=0, lt=1, description="share of the tasks whose rows make the split `test`"
    )
    seed: int = 0
    shard_bytes: int = Field(
        default=SHARD_BYTES,
        ge=1,
        description="a shard is closed by the row group that brings it to this size",
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
    facts: dict[str, dict[str, Any]]
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
    told = {name: facts(line) for name, line in lines.items()}
    created_at = max(line.manifest["created_at"] for line in lines.values())
    if observations is None and (analysis := analysis_of(next(iter(lines.values())))):
        observations, drawn = observed(analysis)
        figures = figures or drawn
    identity = [
        options.model_dump(mode="json"),
        {name: line.curated.fingerprint for name, line in lines.items()},
        told,
    ]
    workloads = workloads_of(next(iter(lines.values())))
    identity += [
        workloads.model_dump() if workloads else None,
        observations,
        decontamination,
        _of_figures(figures),
        PUBLISHING_VERSION,
    ]
    fingerprint = stable_hash(identity)
    tag = f"refresh-{created_at[:10]}-{fingerprint[:8]}"
    with _writable(out):
        _restore(out)
    if (there := _replaceable(out)) and there.fingerprint == fingerprint and is_whole(out, there):
        return there
    with _writable(out), _beside(out) as folder:
        shards: list[Shard] = []
        for number, (name, line) in enumerate(lines.items()):
            settings = {
                "holdout_share": options.holdout_share,
                "seed": options.seed,
                "shard_bytes": options.shard_bytes,
            }
            directory = DATA if number == 0 else f"strategies/{name}"
            shards += write_shards(
                line,
                folder,
                config=name,
                directory=directory,
                scratch=_scratch_of(folder) / name,
                **settings,
            )
        _write_texts(
            folder,
            options,
            tag,
            created_at,
            told,
            shards,
            workloads,
            observations,
            decontamination,
            figures,
        )
        published = Published(
            tag=tag,
            fingerprint=fingerprint,
            created_at=created_at,
            name=options.name,
            configs=tuple(lines),
            curated={name: line.curated.fingerprint for name, line in lines.items()},
            facts=told,
            options=options,
            shards=tuple(shards),
            files=tuple(_file(folder, path) for path in sorted(_files_in(folder))),
        )
        (folder / PUBLICATION).write_text(
            published.model_dump_json(indent=2) + "\n", encoding="utf-8"
        )
        _put(folder, out)
    return published


def read_publication(folder: Path) -> Published:
    """What a published folder says of itself. Raises UsageError where it is none, or is of a later
    version."""
    try:
        return Published.model_validate_json((folder / PUBLICATION).read_text(encoding="utf-8"))
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
    """Are its files all there in the right size, and with `content` with the right SHA-256?"""
    for file in published.files:
        path = folder / file.path
        if not path.is_file() or path.stat().st_size != file.size_bytes:
            return False
        if content and _sha256(path) != file.sha256:
            return False
    return True


def observed(analysis: Snapshot) -> tuple[str, list[Path]]:
    """The words of an analysis as Markdown, and its figures. What comes from data is escaped in
    them already, or is here."""
    manifest = analysis.manifest
    sentences = "\n".join(
        f"- {cell(sentence, MOST_CHARACTERS)}"
        for sentence in (*manifest["finding"], *manifest["cautions"])
    )
    return sentences, [
        analysis.local_dir() / name for name in manifest["files"] if name.endswith(".png")
    ]


def _named(lines: list[Lineage]) -> dict[str, Lineage]:
    """Each configuration by its strategy, which is also a directory. Two of one strategy are told
    apart by fingerprints."""
    found: dict[str, Lineage] = {}
    for line in lines:
        name = re.sub(r"[^A-Za-z0-9_]+", "_", line.strategy).strip("_")[:60] or "strategy"
        if name in found and found[name].curated.fingerprint == line.curated.fingerprint:
            continue
        found[name if name not in found else f"{name}_{line.curated.fingerprint[:8]}"] = line
    return found


def _write_texts(
    folder: Path,
    options: PublishOptions,
    tag: str,
    created_at: str,
    told: dict[str, dict[str, Any]],
    shards: Sequence[Shard],
    workloads: Workloads | None,
    observations: str | None,
    decontamination: str | None,
    figures: Sequence[Path],
) -> None:
    """The card and the Croissant metadata, from the files that are there."""
    import pyarrow.parquet as pq

    images = []
    for figure in figures:
        (folder / FIGURES).mkdir(exist_ok=True)
        shutil.copyfile(figure, folder / FIGURES / figure.name)
        images.append(f"{FIGURES}/{figure.name}")
    schema = pq.read_schema(folder / shards[0].path)
    statistics = {
        name: statistics_of(folder, [shard for shard in shards if shard.config == name])
        for name in told
    }
    context = CardContext(
        name=options.name,
        license=options.license,
        tag=tag,
        default_config=next(iter(told)),
        shards=tuple(shards),
        columns=tuple(schema.names),
        statistics=statistics,
        facts=told,
        holdout_share=options.holdout_share,
        seed=options.seed,
        workloads=workloads,
        observations=observations,
        decontamination=decontamination,
        figures=tuple(images),
        citation=options.citation,
    )
    (folder / README).write_text(card(context), encoding="utf-8")
    first = statistics[context.default_config]
    described = croissant(
        name=options.name,
        description=(
            f"{first.rows:,} verified kernels for {first.tasks:,} PyTorch programs, with reasoning."
            f" Revision {tag}."
        ),
        license=options.license,
        cite_as=options.citation or bibtex_of_set(options.name, tag),
        published=date.fromisoformat(created_at[:10]),
        creator=options.creator,
        url=options.url,
        schema=schema,
        shards=shards,
        sha256={shard.path: _sha256(folder / shard.path) for shard in shards},
    )
    (folder / CROISSANT).write_text(described, encoding="utf-8")


# -- files -----------------------------------------------------------------------------------------


def _of_figures(figures: Sequence[Path]) -> list[list[str]]:
    found = []
    for figure in figures:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", figure.name):
            raise UsageError(
                f"the figure {figure.name!r} has characters that a page cannot link to",
                "use letters, digits, . _ and -",
            )
        try:
            found.append([figure.name, _sha256(figure)])
        except OSError as error:
            raise UsageError(
                f"cannot read the figure {figure}: {error.strerror or error}", "check the path"
            ) from error
    if len({name for name, _ in found}) < len(found):
        raise UsageError("two figures have the same name", "rename one")
    return found


def _replaceable(out: Path) -> Published | None:
    """The publication that lies at `out`, None where nothing does. Raises UsageError where
    something else is there too."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(f"{out} is not a folder", "choose another --out")
    if not out.exists() or not any(out.iterdir()):
        return None
    hint = "choose another --out: only a folder that `concur publish` made is replaced"
    if not (out / PUBLICATION).is_file():
        raise UsageError(f"{out} holds something else", hint)
    published = read_publication(out)
    ours = {PUBLICATION, *(file.path for file in published.files)}
    if others := sorted(path for path in _files_in(out) if path not in ours):
        raise UsageError(
            f"{out} also holds files that are not of the published set, such as {others[0]}", hint
        )
    return published


def _files_in(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if not path.is_dir() or path.is_symlink():
            yield path.relative_to(folder).as_posix()


def _file(folder: Path, path: str) -> PublishedFile:
    return PublishedFile(
        path=path, size_bytes=(folder / path).stat().st_size, sha256=_sha256(folder / path)
    )


def _sha256(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _scratch_of(folder: Path) -> Path:
    return folder.with_suffix(".scratch")


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """An empty folder next to `out`, removed where it has not become `out`. What killed processes
    left there goes as well."""
    import psutil

    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(f".{out.name}.*"):
        owner = re.fullmatch(re.escape(f".{out.name}.") + r"(\d+)\.(new|scratch)", left.name)
        if owner and (int(owner[1]) == os.getpid() or not psutil.pid_exists(int(owner[1]))):
            shutil.rmtree(left, ignore_errors=True)
    folder = out.parent / f".{out.name}.{os.getpid()}.new"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(_scratch_of(folder), ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def _old(out: Path) -> Path:
    return out.parent / f".{out.name}.old"


def _put(folder: Path, out: Path) -> None:
    """`folder` becomes `out`. A process killed between the renames leaves the old folder under
    another name: see `_restore`."""
    if out.exists() and any(out.iterdir()):
        out.rename(_old(out))
    elif out.exists():
        out.rmdir()
    try:
        folder.rename(out)
    except BaseException:
        _restore(out)
        raise
    shutil.rmtree(_old(out), ignore_errors=True)


def _restore(out: Path) -> None:
    """Undo half of an exchange that a killed process left."""
    if (_old(out) / PUBLICATION).is_file():  # ours, and nothing else that happens to be called so
        if out.exists():
            shutil.rmtree(_old(out))
        else:
            _old(out).rename(out)


@contextmanager
def _writable(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write {out}: {error.strerror or error}",
            "choose another --out, free some disk, or mend its permissions; what was published"
            " there before is intact",
        ) from error
