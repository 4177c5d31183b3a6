"""Candidates of a root (its newest training set and benchmark), a snapshot or a table of verdicts,
as a static site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import NamedTuple

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.installation import command_at
from kernels_eval.records import Json, stable_hash
from tasks.benchmark.shown import HEADLINE_METRICS, label, scored
from tasks.curation.source import Files, Source
from tasks.curation.tables import places_of, with_flags, with_profiles
from tasks.files import atomic_write
from tasks.scores import affordable_resamples, scores
from tasks.sources.tables import load
from tasks.store.lookup import newest_first
from tasks.store.snapshot import Snapshot
from tasks.tables import CANDIDATES, CORRECT, VERDICTS, completed, unconfirmed
from tasks.versions import (
    CANDIDATE_TABLE_VERSION,
    PARSER_VERSION,
    SYNTHESIS_VERSION,
    VIEWER_VERSION,
)
from tasks.viewer.site import COLUMNS, PAGE, write_site

MADE_OF, VIEW = "made_of.txt", "view"
NEEDED = ("candidate_id", "task_id", "status")
NAMES = pl.List(pl.String)
READ = {
    **dict.fromkeys(("reason", "device", "generator", "model"), pl.String()),
    **{"outputs_match": pl.Boolean(), "flags": NAMES, "reasoning_tokens": pl.Int64()},
    "given_id": pl.String(),
    "custom_kernel_time_share": pl.Float64(),
    "timing": pl.Struct(dict.fromkeys(("speedup", "speedup_lower", "speedup_upper"), pl.Float64)),
}
"""Columns that a table may lack."""
PROFILED = ("bottleneck", "sol_score")
SCREENED = (
    "these scores count correct answers that were only screened; the column says how many of all."
    " A report and concur benchmark count confirmed ones alone."
)
LARGE = ("response", "separated_reasoning")
"""Texts stored in parts: reasoning and answer."""


class Part(NamedTuple):
    """One source's candidates in storage order of their texts, and their verdicts with the task
    programs."""

    source: Source
    places: pl.DataFrame
    frame: pl.DataFrame
    told: pl.DataFrame


def write_view(
    place: str = ".concur",
    candidates: str | None = None,
    *,
    tasks: str | None = None,
    out: str | None = None,
) -> Json:
    """Write the site; return its page and the verdicts shown.

    `place` is a root, a folder of `concur verify-batch`, or verdicts for
    `tasks.curation.source.Source`; `tasks` is for `tasks.sources.tables.load`. Default `out`:
    `view` in the root or folder, else here. Raises UsageError for what cannot be read or written.
    """
    root = _root(place)
    if not (root or glob(place)):
        raise UsageError(f"{place} does not exist", "name a root, a snapshot's folder or Parquet")
    if root and candidates:
        raise UsageError(f"{place} is a root: --candidates needs verdicts", "name the verdicts")
    sources = _sources(root) if root else [("", Source(place, candidates, "", unfinished=True))]
    directory = Path(out or Path(place if root else ".", VIEW))
    made_of, marker = _made_of([source for _, source in sources], tasks), directory / MADE_OF
    if not (made_of and marker.is_file() and marker.read_text(encoding="utf-8") == made_of):
        parts = [_part(name, source, tasks) for name, source in sources]
        index = pl.concat([part.frame.select("key", *COLUMNS) for part in parts])
        marker.unlink(missing_ok=True)
        about = {"title": _run_name(root) or Path(place).absolute().name, **_scores(parts)}
        write_site(directory, index, lambda keys: _details(parts, keys), **about)
        atomic_write(marker, made_of)
    read = [source.verdicts.path for _, source in sources]
    return {"page": str((directory / PAGE).absolute()), "verdicts": read}


def viewer_page(root: str) -> str:
    """The page of a root's viewer, written or not."""
    return f"{root}/{VIEW}/{PAGE}"


def view_command(root: str) -> str:
    """The command that opens the viewer of a root."""
    return command_at("view", root) + " --open"


# -- what is shown ---------------------------------------------------------------------------------


def _root(place: str) -> str | None:
    found = (path for path in (Path(place), Path(place, "snapshots")) if path.is_dir())
    return next((str(path) for path in found if (path / "verification").is_dir()), None)


def _run_name(root: str | None) -> str:
    from flows.morning.history import refreshes

    recorded = refreshes(root) if root else []
    return recorded[-1].name if recorded else ""


def _sources(root: str) -> list[tuple[str, Source]]:
    if not newest_first(root, "verification"):
        raise UsageError(
            f"there is no finished verification snapshot under {root}",
            f"for one that is being written, name {root}/verification/FINGERPRINT",
        )
    found = [("training", Source(None, None, root))]
    for benchmark in newest_first(root, "benchmark")[:1]:
        for name in benchmark.manifest["upstream"]:
            verdicts = Snapshot(root, "verification", name)
            if verdicts.finished and verdicts.path != found[0][1].verdicts.path:
                found.append(("benchmark", Source(verdicts.path, None, root)))
    return found if len(found) > 1 else [("", found[0][1])]


def _training_sets(source: Source) -> dict[str, Snapshot]:
    if isinstance(source.verdicts, Files):
        return {}
    return {
        str(each.manifest["config"]["strategy"]): each
        for each in reversed(newest_first(source.verdicts.root, "curation"))
        if source.verdicts.fingerprint in each.manifest["upstream"]
    }


def _trace_flags(source: Source) -> Snapshot | None:
    return source.made_of("trace-flags", source.verdicts, source.candidates)


def _profiles(source: Source) -> Snapshot | None:
    return source.made_of("kernel-profiles", source.verdicts)


def _made_of(sources: Sequence[Source], tasks: str | None) -> str:
    read = [each for source in sources for each in (source.verdicts, source.candidates)]
    if tasks or any(isinstance(each, Files) for each in read):
        return ""
    more = [each for source in sources for each in _training_sets(source).values()]
    of = (each(source) for source in sources for each in (_trace_flags, _profiles))
    more += [found for found in of if found]
    return stable_hash([VIEWER_VERSION, *(each.path for each in (*read, *more))])


# -- reading ---------------------------------------------------------------------------------------


def _part(name: str, source: Source, tasks: str | None) -> Part:
    columns = (*NEEDED, *READ, "level")
    frame = source.verdict_rows(columns, columns, NEEDED)
    places = places_of(source.candidates, frame)
    texts = {key: pl.col(key).cast(pl.String) for key in NEEDED}
    frame = _marked(completed(frame, READ).with_columns(**texts), source)
    named = _tasks(source, tasks, set(frame["task_id"]))
    titles = {key: key if title in key else f"{title} ({key})" for key, (title, _) in named.items()}
    timing = pl.col("timing").struct
    frame = frame.with_columns(
        id=pl.coalesce("given_id", "candidate_id"),
        task=pl.col("task_id").replace(titles),
        set=pl.lit(name),
        model=pl.coalesce("generator", "model", pl.lit("unnamed")),
        speedup=timing.field("speedup"),
        lower=timing.field("speedup_lower"),
        upper=timing.field("speedup_upper"),
        share=pl.when(CORRECT).then("custom_kernel_time_share"),
        screened=unconfirmed(frame) & CORRECT,
        tokens="reasoning_tokens",
    )
    told = _told(name, source, {key: code for key, (_, code) in named.items()})
    frame = frame.join(told.select("candidate_id", "key"), on="candidate_id")
    if frame.is_empty():
        raise UsageError(
            f"{source.verdicts.path} has no row with a candidate_id", "give every row one"
        )
    stored = places.select(pl.col("candidate_id").cast(pl.String))
    return Part(source, places, stored.join(frame, on="candidate_id", maintain_order="left"), told)


def _told(name: str, source: Source, codes: Mapping[str, str]) -> pl.DataFrame:
    frame = source.verdicts.read(columns=VERDICTS.names, unique="candidate_id")
    texts = source.candidates
    files = [Path(each).stat() for each in texts.files] if isinstance(texts, Files) else []
    made_of = [VIEWER_VERSION, SYNTHESIS_VERSION, PARSER_VERSION, CANDIDATE_TABLE_VERSION, name]
    made_of += [value for each in files for value in (each.st_mtime_ns, each.st_size)]
    ids = pl.col("candidate_id", "task_id").cast(pl.String)
    frame = frame.with_columns(ids).with_columns(
        reference=pl.col("task_id").replace_strict(codes, default=None, return_dtype=pl.String),
        key=pl.lit(stable_hash(made_of)),
    )
    hashed = (frame.hash_rows(seed).cast(pl.String) for seed in (0, 1))  # 128 bits
    return frame.with_columns(key=pl.concat_str(*hashed, separator="-"))


def _marked(frame: pl.DataFrame, source: Source) -> pl.DataFrame:
    schema = {"candidate_id": pl.String(), "strategies": pl.String()}
    taken = [
        each.read(columns=["candidate_id"]).with_columns(strategies=pl.lit(name))
        for name, each in _training_sets(source).items()
    ]
    took = (
        pl.concat([pl.DataFrame(schema=schema), *taken]).group_by("candidate_id").agg("strategies")
    )
    flags = _trace_flags(source) or pl.DataFrame()
    frame = with_flags(frame.unique("candidate_id", keep="first", maintain_order=True), flags)
    frame = frame.join(took, on="candidate_id", how="left", maintain_order="left")
    frame = with_profiles(frame, _profiles(source))
    absent = {name: pl.lit(None) for name in PROFILED if name not in frame.columns}
    frame = frame.with_columns(**absent)
    both = pl.concat_list(pl.col(each).fill_null([]) for each in ("flags", "trace_flags"))
    return frame.with_columns(
        each.list.eval(pl.element().str.replace(":.*", ""))
        .list.unique()
        .list.sort()
        .list.join("\t")
        for each in (both.alias("flags"), pl.col("strategies"))
    )


def _tasks(source: Source, tasks: str | None, wanted: set[str]) -> dict[str, tuple[str, str]]:
    if tasks:
        return {task.task_id: (task.name, task.code) for task in load(tasks, wanted)}
    if source.tasks is None:
        return {}
    rows = source.tasks.read(columns=("task_id", "name", "code"), unique="task_id").iter_rows()
    return {key: (name, code) for key, name, code in rows}


def _details(parts: Sequence[Part], keys: pl.Series) -> Iterator[Json]:
    for part in parts:
        number = {key: row for row, key in enumerate(part.told["candidate_id"])}
        told, texts = part.told.drop("key"), list(CANDIDATES.names)
        if part.source.candidates.has_column("answer"):
            texts = [each for each in texts if each not in LARGE]
        places = part.places.filter(part.frame["key"].is_in(keys.implode()))
        for row in part.source.candidates.rows_of(places, texts):
            yield row | told.row(number[str(row["candidate_id"])], named=True)


# -- scores ----------------------------------------------------------------------------------------


def _scores(parts: Sequence[Part]) -> Json:
    models, notes = [], list[str]()
    for name in dict.fromkeys(part.frame["set"][0] for part in parts):
        of_set = f"{name}: " if name else ""
        frame = pl.concat(
            [part.frame for part in parts if part.frame["set"][0] == name], how="diagonal_relaxed"
        )
        resamples = affordable_resamples(frame["task_id"].n_unique())
        try:
            # what was only screened counts: a refresh confirms no more than its training set
            rows = scores(frame.drop("level", strict=False), resamples=resamples)
        except UsageError as error:
            notes.append(f"{of_set}No scores: {error}")
            continue
        if frame["screened"].any():
            notes.append(f"{of_set}{SCREENED}")
        for model in frame["model"].unique(maintain_order=True):
            of = rows.filter(model=model).rows_by_key(
                "metric", named=True, unique=True, include_key=True
            )
            facts = {name: of["exec"][name] for name in ("tasks", "samples")}
            own = frame.filter(CORRECT, model=model)["screened"]
            facts |= {"screened": f"{own.sum():,} of {len(own):,}" if own.any() else ""}
            numbers = {label(each, of[each]["k"]): scored(of[each]) for each in HEADLINE_METRICS}
            models.append({"set": name, "model": model, **facts, **numbers})
    return {"models": models, "notes": notes}
