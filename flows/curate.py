"""`concur curate`: training sets by one strategy or many, from verdicts that are there already, and
why a candidate is in one or not.

Guarantees: nothing is verified or sampled; the rules are those of the line
(`tasks.curation.strategies`); texts are read for the samples that are written out only; files in
`--out` are there whole or not at all. Does not write snapshots: `concur run` does.
"""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.config import apply_override, explained
from flows.source import Source, columns_of, name_of, stream_texts
from kernels_eval.errors import UsageError
from tasks.curation.config import STRATEGY_NAMES, CurationConfig
from tasks.files import AtomicFiles
from tasks.store.snapshot import Snapshot

if TYPE_CHECKING:
    import polars as pl

SUMMARY_FILE = "curation.json"


def strategies_dir() -> Path:
    """The strategies that ship with concur (`deployments/strategies`), one file each."""
    beside = Path(__file__).parent.parent / "deployments" / "strategies"
    return beside if beside.is_dir() else Path(str(resources.files("flows") / "strategies"))


def load_strategy(name: str, overrides: Sequence[str] = ()) -> CurationConfig:
    """A strategy by its name, or from a YAML file that holds the keys of `curation`, with
    `key=value` overrides (values are YAML).

    Raises UsageError for a strategy or file that is not there, text that is not YAML, an unknown
    key or an illegal value.
    """
    import yaml
    from pydantic import ValidationError

    is_file = name.endswith((".yaml", ".yml")) or "/" in name
    if not is_file and name not in STRATEGY_NAMES:
        close = difflib.get_close_matches(name, STRATEGY_NAMES, n=1)
        hint = (
            f"did you mean {close[0]}?"
            if close
            else f"strategies: {', '.join(STRATEGY_NAMES)}, or the path of a YAML file"
        )
        raise UsageError(f"there is no strategy {name!r}", hint)
    path = Path(name) if is_file else strategies_dir() / f"{name}.yaml"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UsageError(
            f"cannot read strategy {name}: {error.strerror}",
            "give a strategy's name, or the path of a YAML file",
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"strategy {name} is not YAML", "mend the file") from error
    if not isinstance(data, dict):
        raise UsageError(
            f"strategy {name} is a {type(data).__name__}, not a mapping of keys",
            "see deployments/strategies/concur.yaml",
        )
    for override in overrides:
        apply_override(data, override)
    try:
        return CurationConfig.model_validate(data)
    except ValidationError as error:
        raise explained(error, f"strategy {name!r}", CurationConfig) from error


def configurations(
    strategies: Sequence[str], sizes: Sequence[int | None], overrides: Sequence[str]
) -> list[CurationConfig]:
    """Every strategy (`all` names all of them) at every size; without sizes, at the size its file
    says."""
    names = [each for name in strategies for each in (STRATEGY_NAMES if name == "all" else (name,))]
    return [
        config if size is None else config.model_copy(update={"size": size})
        for config in (load_strategy(name, overrides) for name in dict.fromkeys(names))
        for size in sizes or [None]
    ]


def parsed_sizes(text: str | None) -> list[int]:
    """ "100,1000" as numbers. Raises UsageError for anything else."""
    try:
        sizes = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        sizes = [0]
    if any(size < 1 for size in sizes):
        raise UsageError(
            f"--size {text!r} is not a list of whole numbers above 0",
            "for example --size 500,1000,4892",
        )
    return sizes


def deciding(source: Source, *, flags: bool = False) -> pl.DataFrame:
    """What strategies decide by, one row a candidate, without texts; with `flags`, also what is
    wrong with the traces of correct samples.

    Flags that a refresh has measured are taken as they are, others are measured here. Raises
    UsageError where a table has no candidate_id, or no row.
    """
    import polars as pl

    from tasks.curation.tables import DECIDING, with_flags, with_operators

    frame = source.read(DECIDING, DECIDING)
    if "candidate_id" not in frame.columns:
        raise UsageError(
            f"{name_of(source.verdicts)} has no column candidate_id",
            "give the tables that verification and synthesis wrote",
        )
    if frame.is_empty():
        raise UsageError(
            f"{name_of(source.verdicts)} has no row", "give the verdicts of a run that is finished"
        )
    # of two, the first of a candidate's verdicts was taken already: correct or not, no later one
    # takes its place
    if source.one_table:
        frame = frame.filter(
            pl.col("candidate_id").is_null() | pl.col("candidate_id").is_first_distinct()
        )
    frame = with_operators(frame, source.made_of("workloads", source.tasks))
    if known := source.made_of("trace-flags", source.verdicts, source.candidates):
        return with_flags(
            frame, known.read(columns=["candidate_id", "trace_flags"], unique="candidate_id")
        )
    return (
        with_flags(frame, _flags_of(source, frame))
        if flags and "trace_flags" not in frame.columns
        else frame
    )


def _flags_of(source: Source, frame: pl.DataFrame) -> pl.DataFrame:
    """candidate_id and trace_flags of the correct candidates whose reasoning is there, read a batch
    at a time."""
    import polars as pl

    from tasks.curation.flags import flagged
    from tasks.curation.quality import QualityConfig

    wanted = (
        frame.filter(pl.col("status") == "correct").select("candidate_id")
        if "status" in frame.columns
        else frame.clear()
    )
    batches = flagged(stream_texts(source.candidates, wanted, "reasoning"), QualityConfig())
    found = [batch.select("candidate_id", "trace_flags") for batch in batches]
    return pl.concat(found) if found else pl.DataFrame()


def curated(source: Source, taken: pl.DataFrame) -> pl.DataFrame:
    """tasks.tables.CURATED of what was taken. Columns that the source does not have are null."""
    from tasks.curation.stage import named_tasks
    from tasks.curation.tables import TEXTS, curated_rows, texts_of

    if isinstance(source.candidates, Snapshot):
        texts = texts_of(source.candidates, taken)
    else:
        texts = columns_of(source.candidates, TEXTS, taken.select("candidate_id"))
    return curated_rows(
        taken,
        texts.unique("candidate_id", keep="first"),
        named_tasks(source.tasks) if source.tasks else None,
    )


def curate_table(
    *,
    verdicts: str | None = None,
    candidates: str | None = None,
    root: str = ".concur",
    strategies: Sequence[str] = ("concur",),
    sizes: Sequence[int] = (),
    overrides: Sequence[str] = (),
    out: str | None = None,
) -> dict[str, Any]:
    """Training sets of every strategy and size. Returns `source`, and `sets`: what each took, with
    counts per criterion and composition.

    Lengths are tokens, speedups ratios (medians of the set). With `out`, each set is written to
    `DIR/NAME.parquet` (`NAME-SIZE.parquet` where sizes are asked for), all of this to
    `DIR/curation.json`, and figures of the verdicts and sets beside them (`flows.set_figures`).
    Raises UsageError for input that cannot be used, where no strategy takes anything, and where two
    sets would be one file; what lies in DIR stays as it was then. Of several strategies, one that
    cannot move reasoning between tasks has a `problem` and no samples.
    """
    from flows.set_figures import Figures
    from tasks.curation.stage import flag_counts, nothing_taken, operators_from
    from tasks.curation.strategies import curate

    configs = configurations(strategies, list(sizes), overrides)
    names = [f"{config.strategy}-{config.size}" if sizes else config.strategy for config in configs]
    if out and len(set(names)) < len(names):
        raise UsageError(
            "two of these strategies have the same name, and would be one file",
            "write them to two directories",
        )
    source = Source(verdicts, candidates, root)
    frame = deciding(source, flags=any(config.exclude_flags for config in configs))
    sets: list[dict[str, Any]] = []
    problems: list[UsageError] = []
    with AtomicFiles("choose another --out, or free some disk") as files:
        figures = Figures(frame) if out else None
        for config, name in zip(configs, names, strict=True):
            began_s = time.monotonic()
            try:
                taken = curate(frame, config)
            except UsageError as error:
                if len(configs) == 1 or config.strategy != "shuffled_reasoning":
                    raise
                # the other sets do not need reasoning to be moved
                problems.append(error)
                sets.append(
                    _set_of(frame.clear(), config) | {"seconds": 0.0, "problem": str(error)}
                )
                continue
            measured = {
                "seconds": round(time.monotonic() - began_s, 3),
                "trace_flags": flag_counts(frame, taken, config),
            }
            found = _set_of(taken, config) | measured
            sets.append(found)
            if out and figures and not taken.is_empty():
                found["file"] = str(Path(out) / f"{name}.parquet")
                files.add(Path(found["file"]), curated(source, taken).write_parquet)
                figures.add(name, taken)
        if not any(found["samples"] for found in sets):
            raise problems[0] if problems else UsageError(*nothing_taken(frame, configs[0]))
        correct = int((frame["status"] == "correct").sum())
        places = {"verdicts": name_of(source.verdicts), "candidates": name_of(source.candidates)}
        data = {
            "source": {
                **places,
                "rows": frame.height,
                "correct": correct,
                "operators_from": operators_from(frame),
            },
            "sets": sets,
        }
        if out and figures:
            data["figures"] = [str(path) for path in figures.write(Path(out))]
            text = json.dumps(data, indent=2) + "\n"
            files.add(
                Path(out) / SUMMARY_FILE, lambda path: path.write_text(text, encoding="utf-8")
            )
    return data


def explain_candidate(
    candidate_id: str,
    *,
    verdicts: str | None = None,
    candidates: str | None = None,
    root: str = ".concur",
    strategies: Sequence[str] = ("concur",),
    sizes: Sequence[int] = (),
    overrides: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """What every strategy and size does with one candidate, and why: the fields of
    `tasks.curation.explain.Explanation`, and `size`."""
    from tasks.curation.explain import explain

    configs = configurations(strategies, list(sizes), overrides)
    frame = deciding(
        Source(verdicts, candidates, root), flags=any(config.exclude_flags for config in configs)
    )
    return [
        {**explain(frame, config, candidate_id).model_dump(mode="json"), "size": config.size}
        for config in configs
    ]


def _set_of(taken: pl.DataFrame, config: CurationConfig) -> dict[str, Any]:
    import polars as pl

    from tasks.curation.pool import ratio, with_kind

    rows = with_kind(taken).with_columns(ratio(taken, "speedup").alias("_speedup"))
    if "criterion" not in rows.columns:
        rows = rows.with_columns(criterion=pl.lit(None, pl.String))
    singles = int(rows["_single"].sum())
    timed = rows.filter(pl.col("_speedup").is_finite() & (pl.col("_speedup") > 0))["_speedup"]
    counts = sorted(
        rows["criterion"].value_counts().iter_rows(), key=lambda pair: (-pair[1], pair[0])
    )
    return {
        "strategy": config.strategy,
        "size": config.size,
        "samples": rows.height,
        "tasks": rows["task_id"].n_unique(),
        "criteria": dict(counts),
        "composition": {"single_operator": singles, "fusion": rows.height - singles},
        "median_reasoning_tokens": rows["reasoning_tokens"].median(),
        "median_speedup": timed.median(),
        "config": config.model_dump(mode="json"),
    }


# -- what goes out ---------------------------------------------------------------------------------


def print_sets(data: dict[str, Any]) -> None:
    """The sets on a terminal."""
    import sys

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 140, markup=False, highlight=False)
    source = data["source"]
    console.print(
        Text(f"{source['rows']:,} candidates, {source['correct']:,} correct: {source['verdicts']}"),
        soft_wrap=True,
    )
    for line in _source_lines(data):
        console.print(Text(line), soft_wrap=True)
    table = Table()
    right = ("size", "samples", "tasks", "single", "fusion", "tokens", "speedup")
    for name in ("strategy", *right, "criteria"):
        table.add_column(name, justify="right" if name in right else "left")
    for each in data["sets"]:
        kinds, tokens, speedup = (
            each["composition"],
            each["median_reasoning_tokens"],
            each["median_speedup"],
        )
        table.add_row(
            each["strategy"],
            "" if each["size"] is None else f"{each['size']:,}",
            f"{each['samples']:,}",
            f"{each['tasks']:,}",
            f"{kinds['single_operator']:,}",
            f"{kinds['fusion']:,}",
            "" if tokens is None else f"{tokens:,.0f}",
            "" if speedup is None else f"{speedup:.3g}",
            ", ".join(f"{name} {count:,}" for name, count in each["criteria"].items()),
        )
    console.print(table)
    console.print("tokens and speedup are medians of the set")
    for each in data["sets"]:
        if "file" in each or "problem" in each:
            print(f"{each['strategy']}: {each.get('file') or each['problem']}")


def _source_lines(data: dict[str, Any]) -> list[str]:
    """What is worth saying of the samples before the sets: operators that are not a verdict's, and
    flags of traces."""
    lines, found = [], data["source"]["operators_from"]
    if set(found) - {"verdict"}:
        lines.append(
            "operators of the correct ones' tasks are known from: "
            + ", ".join(f"{name} {n:,}" for name, n in found.items())
        )
    flags = next((each["trace_flags"] for each in data["sets"] if each.get("trace_flags")), None)
    if flags:
        lines.append(
            "flags of the correct ones' reasoning: "
            + ", ".join(f"{name} {n:,}" for name, n in flags["correct"].items())
        )
    return lines


def print_explanations(explanations: Sequence[dict[str, Any]]) -> None:
    """Why, one line a reason."""
    from tasks.sources.tables import shown

    for each in explanations:
        size = "" if each["size"] is None else f", size {each['size']:,}"
        verb = f"took it as {each['criterion']}" if each["taken"] else "did not take it"
        print(
            f"{shown(each['candidate_id'])} of {shown(each['task_id'])}: {each['strategy']}{size}"
            f" {verb}"
        )
        for reason in each["reasons"]:
            print(f"  {shown(reason)}")
