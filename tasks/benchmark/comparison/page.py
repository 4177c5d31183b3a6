"""An ablation in one page: which strategy won, by how much, and how sure that is.

Guarantees: `comparison.html` loads nothing and runs no script; `comparison.md` and
`comparison.json` hold the same numbers; whatever a task, a candidate or a branch is called, it is
text; the same ablation gives the same bytes; a file is there whole or not at all; no strategy is
called better where a corrected test does not say so. Reads the verdicts of the branches and nothing
else.
"""

from __future__ import annotations

import json
import statistics
from functools import partial
from pathlib import Path
from typing import Literal

from kernels_eval.records import Json, Row
from tasks.benchmark.comparison.figures import figures
from tasks.benchmark.comparison.numbers import TRACK, Arm, Compared, compared
from tasks.benchmark.comparison.records import Ablation, Branch, Written
from tasks.benchmark.shown import (
    FEW_TASKS,
    HEADLINE_METRICS,
    TEMPLATES,
    Caution,
    cautions_of,
    difference_points,
    label,
    scored,
)
from tasks.files import atomic_write, explain_write_errors
from tasks.reporting.page import Cell, Link, page_of
from tasks.reporting.text import clean, interval, number, p_value, plural
from tasks.scores import EXEC, RESAMPLES

SCHEMA_VERSION = 2
HTML, MARKDOWN, JSON = "comparison.html", "comparison.md", "comparison.json"
NAMES = ("name", "fingerprint", "created_at", "base_model", "mlflow_url", "prefect_url", "cautions")
NUMBERS = (
    *("references", "baseline", "untuned_model", "scores", "scores_by_seed", "differences"),
    *("against_untuned", "tasks", "excluded_tasks", "devices"),
)


def write_comparison(ablation: Ablation, out: Path, *, resamples: int = RESAMPLES) -> Written:
    """Write `comparison.html`, `.md` and `.json` into the directory `out`, which is made where it
    is not there.

    Raises UsageError for a directory that cannot be written, verdicts that are not there, or that
    scoring refuses (two devices, say).
    """
    found = compared(Ablation.model_validate(ablation.model_dump()), resamples=resamples)
    page: Json = {
        "title": f"Comparison: {ablation.name}",
        "facts": (ablation.base_model, *found.devices, ablation.created_at),
        "sentence": headline(found),
        "drawn": figures(found),
        **content(found),
    }
    template = TEMPLATES / "comparison.j2"
    data = json.dumps(as_data(found, resamples=resamples), indent=2, allow_nan=False)
    with explain_write_errors(out, "choose another directory, or free some disk"):
        atomic_write(out / HTML, page_of(template, "html", **page))
        atomic_write(out / MARKDOWN, page_of(template, "md", **page))
        atomic_write(out / JSON, f"{data}\n")
    return Written(
        html=out / HTML, markdown=out / MARKDOWN, json_file=out / JSON, headline=page["sentence"]
    )


def as_data(found: Compared, *, resamples: int = RESAMPLES) -> Json:
    """Return the comparison for a machine: shares in [0, 1], speedup ratios, times in seconds."""
    ablation = found.ablation.model_dump(
        mode="json", exclude={"branches": {"__all__": {"answers"}}}
    )
    least, most = found.samples_per_task_and_seed
    return {
        "schema_version": SCHEMA_VERSION,
        **{name: ablation[name] for name in (*NAMES, "branches")},
        "headline": headline(found),
        "verdict": verdict_of(found),
        "best": found.strategies[0].name if found.strategies else None,
        "strategies": [arm.model_dump(mode="json") for arm in found.strategies],
        "samples_per_task_and_seed": {"least": least, "most": most},
        **{name: getattr(found, name) for name in NUMBERS},
        "resamples": resamples,
        "seed": 0,
        "trust": [caution._asdict() for caution in trust(found)],
    }


Verdict = Literal[
    "nothing",
    "one_strategy",
    "no_correct_kernel",
    "not_distinguishable",
    "seed_spread_unknown",
    "within_seed_spread",
    "distinguishable",
]

READS: dict[Verdict, str] = {
    "distinguishable": "more than chance",
    "within_seed_spread": "within the spread between seeds",
    "seed_spread_unknown": "more than chance between tasks; spread between seeds unknown",
    "not_distinguishable": "not distinguishable from chance",
}
SIGNIFICANT = 0.05
ERROR_CHARS = 600


def verdict_of(found: Compared) -> Verdict:
    """How sure the first place is, in one word.

    It is of the best against the baseline, or of the baseline against the next best.
    """
    if not found.strategies:
        return "nothing"
    rows = [found.score(arm.name, EXEC) for arm in found.strategies]
    if all(row is None or not row["value"] for row in rows):
        return "no_correct_kernel"
    row = _decisive(found)
    return judged(row) if row else "one_strategy"


def judged(row: Row) -> Verdict:
    """A difference against both kinds of chance: which tasks, and which seeds of training."""
    if row["p_holm"] is None or row["p_holm"] >= SIGNIFICANT:
        return "not_distinguishable"
    if row["p_seeds_holm"] is None:
        return "seed_spread_unknown"
    return "distinguishable" if row["p_seeds_holm"] < SIGNIFICANT else "within_seed_spread"


def headline(found: Compared) -> str:
    """What won, by how much, and whether that can be told from chance, in one sentence."""
    return clean(_headline(found), one_line=True)


def _headline(found: Compared) -> str:
    verdict, branches = verdict_of(found), found.ablation.branches
    if verdict == "nothing":
        return f"No branch finished ({len(branches)} failed): nothing to compare."
    best, count = found.strategies[0].name, len(found.strategies)
    score = found.score(best, EXEC)
    if score is None or not score["value"]:
        whose = f"any of {count} strategies" if count > 1 else best
        return f"No correct kernel from {whose} on {plural(found.tasks, 'task')}."
    tasks = plural(score["tasks"], "task")
    said = f"{best} has the highest Exec@1 on {tasks}: {scored(score)}"
    row = _decisive(found)
    if row is None:
        return f"{said}; no other strategy finished."
    role = "the baseline" if found.difference(best) else "the next best,"
    points = interval(row["difference"], row["lower"], row["upper"], "+.1p")
    return (
        f"{said}; {points} points against {role} {row['baseline']}, corrected p"
        f" {p_value(row['p_holm']) or 'not known'}: {READS[judged(row)]}."
    )


def _decisive(found: Compared) -> Row | None:
    """The best strategy minus the one it is measured against.

    That is its baseline; where the best is the baseline, the best of the others.
    """
    best, *others = (arm.name for arm in found.strategies)
    rows = (found.difference(name) for name in others)
    turned_rows = (turned(row) for row in rows if row and row["baseline"] == best)
    return found.difference(best) or next(turned_rows, None)


def turned(row: Row) -> Row:
    """The same difference seen from the other side."""
    change: Json = {
        "model": row["baseline"],
        "baseline": row["model"],
        "difference": -row["difference"],
    }
    if row["lower"] is not None:
        change |= {"lower": -row["upper"], "upper": -row["lower"]}
    return {**row, **change}


def trust(found: Compared) -> list[Caution]:
    """What limits the comparison, from the numbers."""
    arms = found.strategies
    if not arms:
        return []
    tasks = plural(found.tasks, "task")
    samples = " to ".join(map(str, sorted(set(found.samples_per_task_and_seed))))
    execs = [row for row in found.scores if (row["metric"], row["track"]) == (EXEC, TRACK)]
    never = [
        arm.name
        for arm in arms
        if (row := found.score(arm.name, EXEC, "any")) and row["value"] == 0
    ]
    single = [arm.name for arm in arms if len(arm.seeds) == 1]
    rows = [arm.rows for arm in arms if arm.rows]
    uneven = bool(rows) and max(rows) > 1.1 * min(rows)
    wanted = found.ablation.baseline or "random"
    baseline = _baseline(found) or wanted
    lost = sum(branch.state != "done" for branch in found.ablation.branches)
    return cautions_of(
        (
            "basis of the scores",
            f"{tasks} with {samples} samples each from every seed",
            "Every seed answered each of these tasks with this number of samples.",
        ),
        (
            "few tasks",
            tasks if found.tasks < FEW_TASKS else "",
            f"Too few to rank strategies: below {FEW_TASKS}, an interval is wider than most"
            " differences.",
        ),
        (
            "measured on",
            ", ".join(found.devices),
            "On another device, speedups may rank the strategies differently.",
        ),
        (
            "tasks left out",
            ", ".join(found.excluded_tasks),
            "They are left out for every model, because the reference fails or is degenerate.",
        ),
        (
            "tasks without a sample",
            ", ".join(f"{row['model']} {row['missing']}" for row in execs if row["missing"]),
            "Another model answered these tasks; differences are over shared tasks.",
        ),
        ("not one correct answer", ", ".join(never), "The zero is measured, not missing."),
        (
            "one seed only",
            "; ".join(single),
            "The result of another training run of the same recipe is unknown.",
        ),
        (
            "widest spread of seeds, Exec@1",
            _widest_spread(found),
            "No interval here includes this spread, because intervals pool seeds and draw tasks."
            " The p of seeds tests whether the spread alone explains a difference. With few seeds"
            " it can rarely exclude this.",
        ),
        (
            "strategies compared",
            len(arms) if len(arms) > 2 else "",
            "The best of several was chosen by its score, so its lead is biased upwards. p values"
            " are corrected for all comparisons of a track (Holm), intervals are not. Strategies"
            " are compared with the baseline, not with each other.",
        ),
        (
            "different numbers of rows",
            f"{min(rows):,.0f} to {max(rows):,.0f}" if uneven else "",
            "Strategies were trained on different numbers of rows, which is another explanation of"
            " a difference.",
        ),
        (
            "training losses",
            "shown" if any(arm.loss_last for arm in arms) else "",
            "They are measured on different data for each strategy and are not comparable. Neither"
            " are losses on tasks held out of different sets.",
        ),
        (
            "another baseline",
            f"{baseline} in place of {wanted}" if baseline != wanted else "",
            "The strategy that should be the baseline has no finished branch.",
        ),
        (
            "compared with another size",
            "; ".join(_unlike_sizes(found)),
            "No branch of the baseline with the same size finished.",
        ),
        (
            "'correct'",
            "always",
            "Outputs matched on all inputs that were tried, and the checks for known cheats found"
            " nothing. This is evidence, not proof.",
        ),
        (
            "branches that did not finish",
            f"{lost} of {len(found.ablation.branches)}" if lost else "",
            "No number includes them. The table of branches gives the reason.",
        ),
    )


def _widest_spread(found: Compared) -> str:
    spreads = []
    for arm in found.strategies:
        values = found.by_seed(arm.name, EXEC)
        if len(values) > 1:
            spreads.append((max(values) - min(values), arm.name))
    if not spreads:
        return ""
    spread, name = max(spreads, key=lambda each: each[0])
    return f"{100 * spread:.1f} points ({name})"


def _unlike_sizes(found: Compared) -> list[str]:
    rows = [row for row in found.differences if (row["metric"], row["track"]) == (EXEC, TRACK)]
    pairs = [(found.arm(row["model"]), found.arm(row["baseline"])) for row in rows]
    return [f"{arm.name} with {other.name}" for arm, other in pairs if arm.size != other.size]


def content(found: Compared) -> Json:
    """Return what `comparison.j2` shows, by name."""
    branches = {branch.name: branch for branch in found.ablation.branches}
    arms = {arm.name: _strategy(found, arm) for arm in found.strategies}
    models = (*arms, *found.references)
    return {
        **{"found": found, "label": label, "points": difference_points},
        "arms": arms,
        "cells": partial(_cells, found),
        "same": all(_cells(found, name, "any") == _cells(found, name) for name in models),
        "models": models,
        "baseline": _baseline(found) if found.differences else None,
        "reads": lambda row: READS[judged(row)],
        "trust": trust(found),
        "lost": [branch for branch in branches.values() if branch.state != "done"],
        "done": [branches[name] for arm in found.strategies for name in arm.branches],
        "links": _links,
        "linked": any(branch.mlflow_url or branch.prefect_url for branch in branches.values()),
        "rates": {
            (row["branch"], row["metric"], row["track"]): row["value"]
            for row in found.scores_by_seed
        },
        "error_chars": ERROR_CHARS,
    }


def _strategy(found: Compared, arm: Arm) -> tuple[Cell, ...]:
    name = f"{arm.name} (baseline)" if arm.strategy == _baseline(found) else arm.name
    seeds = ", ".join(f"{100 * value:.1f}" for value in found.by_seed(arm.name, EXEC))
    means = [
        number(statistics.fmean(values) if values else None, ".3f")
        for values in (arm.loss_last, arm.held_out_loss_last)
    ]
    counts = (str(len(arm.seeds)), number(arm.rows, ",.0f"))
    return (name, *_cells(found, arm.name), seeds, *counts, *means)


def _cells(found: Compared, model: str, track: str = TRACK) -> list[str]:
    return [scored(found.score(model, metric, track)) for metric in HEADLINE_METRICS]


def _links(of: Ablation | Branch, *names: str) -> list[Link | None]:
    """A link to the run in MLflow and one in Prefect, where it has a page there."""
    urls = (of.mlflow_url, of.prefect_url)
    return [Link(name, url) if url else None for name, url in zip(names, urls, strict=True)]


def _baseline(found: Compared) -> str | None:
    return found.arm(found.baseline).strategy if found.baseline else None
