"""An ablation in one page: which strategy won, by how much, and how sure that is.

Guarantees: `comparison.html` loads nothing and runs no script, is readable on light and dark and on
a telephone; `comparison.md` and `comparison.json` hold the same numbers; whatever a task, a
candidate or a branch is called, it is text; the same ablation gives the same bytes; a file is there
whole or not at all. Reads the verdicts of the branches and nothing else. Does not train, score or
judge anything anew, and does not make a strategy better than the numbers do.

What a comparison says: what won and how sure that is, what to trust, and the tables of
`comparison.j2`.

Guarantees: everything follows from the numbers; no strategy is called better where a corrected test
does not say so, and a difference that seeds overlap in is said to be one. Strings are raw.
"""

from __future__ import annotations

import json
import statistics
from functools import partial
from pathlib import Path
from typing import Literal

from kernels_eval.records import Json
from tasks.benchmark.comparing import ComparisonRow
from tasks.benchmark.comparison.figures import figures
from tasks.benchmark.comparison.numbers import EXEC, FAST, TRACK, Arm, Compared, compared
from tasks.benchmark.comparison.records import Ablation, Branch, Written
from tasks.benchmark.scoring import GEOMETRIC_MEAN
from tasks.benchmark.tables import (
    FEW_TASKS,
    PAPER,
    PUBLISHED,
    TEMPLATES,
    Caveat,
    caveats_of,
    difference_points,
    label,
    published_table,
    scored,
)
from tasks.files import atomic_write, explain_write_errors
from tasks.reporting.page import Cell, Link, page_of
from tasks.reporting.text import clean, hours, interval, number, p_value, plural

SCHEMA_VERSION = 1
HTML, MARKDOWN, JSON = "comparison.html", "comparison.md", "comparison.json"
NAMES = ("name", "fingerprint", "created_at", "base_model", "mlflow_url", "prefect_url", "cautions")


def write_comparison(ablation: Ablation, out: Path, *, resamples: int = 2000) -> Written:
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


def as_data(found: Compared, *, resamples: int = 2000) -> Json:
    """Return the comparison for a machine: shares in [0, 1], speedup ratios, times in seconds."""
    numbers = found.model_dump(
        mode="json", exclude={"ablation": {"branches": {"__all__": {"answers"}}}}
    )
    ablation = numbers.pop("ablation")
    return {
        "schema_version": SCHEMA_VERSION,
        **{name: ablation[name] for name in (*NAMES, "branches")},
        "headline": headline(found),
        "verdict": verdict_of(found),
        "best": found.strategies[0].name if found.strategies else None,
        **numbers,
        "resamples": resamples,
        "seed": 0,
        "trust": [caveat._asdict() for caveat in trust(found)],
        "published": PUBLISHED,
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
    if all(row is None or not row.value for row in rows):
        return "no_correct_kernel"
    row = _decisive(found)
    return judged(found, row) if row else "one_strategy"


def judged(found: Compared, row: ComparisonRow) -> Verdict:
    """A difference against both kinds of chance: which tasks, and which seeds of training."""
    if row.p_holm is None or row.p_holm >= SIGNIFICANT:
        return "not_distinguishable"
    # the best may stand as the baseline's row turned round: its test is the same one
    test = found.seed_test(row) or found.seed_test(turned(row))
    if test is None or test.p_holm is None:
        return "seed_spread_unknown"
    return "distinguishable" if test.p_holm < SIGNIFICANT else "within_seed_spread"


def headline(found: Compared) -> str:
    """What won, by how much, and whether that can be told from chance, in one sentence."""
    return clean(_headline(found), one_line=True)


def _headline(found: Compared) -> str:
    verdict, branches = verdict_of(found), found.ablation.branches
    if verdict == "nothing":
        failed = sum(branch.state == "failed" for branch in branches)
        left = len(branches) - failed
        return f"No branch finished ({failed} failed, {left} left out): nothing to compare."
    best, count = found.strategies[0].name, len(found.strategies)
    score = found.score(best, EXEC)
    if score is None or not score.value:
        whose = f"any of {count} strategies" if count > 1 else best
        return f"No correct kernel from {whose} on {plural(found.tasks, 'task')}."
    value = interval(score.value, score.lower, score.upper, ".1%")
    said = f"{best} has the highest Exec@1 on {plural(score.tasks, 'task')}: {value}"
    row = _decisive(found)
    if row is None:
        return f"{said}; no other strategy finished."
    role = "the baseline" if found.difference(best) else "the next best,"
    points = interval(row.difference, row.lower, row.upper, "+.1p")
    return (
        f"{said}; {points} points against {role} {row.baseline}, corrected p"
        f" {p_value(row.p_holm) or 'not known'}: {READS[judged(found, row)]}."
    )


def _decisive(found: Compared) -> ComparisonRow | None:
    """The best strategy minus the one it is measured against.

    That is its baseline; where the best is the baseline, the best of the others.
    """
    best, *others = (arm.name for arm in found.strategies)
    rows = (found.difference(name) for name in others)
    turned_rows = (turned(row) for row in rows if row and row.baseline == best)
    return found.difference(best) or next(turned_rows, None)


def turned(row: ComparisonRow) -> ComparisonRow:
    """The same difference seen from the other side."""
    change: dict[str, object] = {
        "model": row.baseline,
        "baseline": row.model,
        "difference": -row.difference,
    }
    if row.lower is not None and row.upper is not None:
        change |= {"lower": -row.upper, "upper": -row.lower}
    return row.model_copy(update=change)


def trust(found: Compared) -> list[Caveat]:
    """Return what limits the comparison, from the numbers."""
    arms = found.strategies
    if not arms:
        return []
    spreads = {arm.name: found.by_seed(arm.name, EXEC) for arm in arms}
    spread = {name: 100 * (max(values) - min(values)) for name, values in spreads.items()}
    widest = max(arms, key=lambda arm: spread[arm.name])
    wanted = found.ablation.baseline or "random"
    pairs = [
        (found.arm(row.model), found.arm(row.baseline))
        for row in found.differences
        if (row.metric, row.track) == (EXEC, TRACK)
    ]
    return caveats_of(
        "trust.toml",
        found=found,
        few=FEW_TASKS,
        samples=sorted(set(found.samples_per_task_and_seed.values())),
        missing=[
            f"{row.model} {row.missing}"
            for row in found.scores
            if row.missing and (row.metric, row.track) == (EXEC, TRACK)
        ],
        silent=[
            arm.name
            for arm in arms
            if (score := found.score(arm.name, EXEC, "any")) and score.value == 0
        ],
        one_seed=[arm.name for arm in arms if len(arm.seeds) == 1],
        widest=widest,
        spread=spread[widest.name],
        rows=[arm.rows for arm in arms if arm.rows],
        wanted=wanted,
        strategy=_baseline(found) or wanted,
        sizes=[f"{arm.name} with {other.name}" for arm, other in pairs if arm.size != other.size],
        lost=sum(branch.state != "done" for branch in found.ablation.branches),
    )


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
        "reads": lambda row: READS[judged(found, row)],
        "trust": trust(found),
        "lost": [branch for branch in branches.values() if branch.state != "done"],
        "done": [branches[name] for arm in found.strategies for name in arm.branches],
        "links": _links,
        "linked": any(branch.mlflow_url or branch.prefect_url for branch in branches.values()),
        "rates": {(row.branch, row.metric, row.track): row.value for row in found.scores_by_seed},
        "published": {"paper": PAPER, "table": published_table()},
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
    return (name, *_cells(found, arm.name), seeds, *counts, *means, hours(arm.gpu_hours))


def _cells(found: Compared, model: str, track: str = TRACK) -> list[str]:
    return [scored(found.score(model, metric, track)) for metric in (EXEC, FAST, GEOMETRIC_MEAN)]


def _links(of: Ablation | Branch, *names: str) -> list[Link | None]:
    """A link to the run in MLflow and one in Prefect, where it has a page there."""
    urls = (of.mlflow_url, of.prefect_url)
    return [Link(name, url) if url else None for name, url in zip(names, urls, strict=True)]


def _baseline(found: Compared) -> str | None:
    return found.arm(found.baseline).strategy if found.baseline else None
