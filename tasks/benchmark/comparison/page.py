"""An ablation in one page: the best strategy, its lead and its certainty.

Guarantees: `comparison.html` is self-contained without scripts; `.md` and `.json` have the same
numbers; "better" needs a corrected test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kernels_eval.grouping import grouped
from kernels_eval.records import Json, Row
from tasks.benchmark.comparison.figures import SCORES, figures
from tasks.benchmark.comparison.numbers import Compared
from tasks.benchmark.comparison.records import Ablation, Branch
from tasks.benchmark.shown import (
    CORRECT_MEANS,
    FEW_TASKS,
    OWN_TRACK,
    difference_sentence,
    differences_parts,
    judged,
    pivoted,
    shown_metric,
)
from tasks.files import atomic_write, explain_write_errors
from tasks.reporting.page import write_page
from tasks.reporting.parts import (
    Bullets,
    Cell,
    Link,
    Links,
    Part,
    Picture,
    Section,
    fields_table,
    table_of,
)
from tasks.reporting.text import clean, cut, moment, number, plural
from tasks.scores import EXEC, GEOMETRIC_MEAN, KERNEL_SHARE, TRACKS

HTML, MARKDOWN, JSON = "comparison.html", "comparison.md", "comparison.json"
ERROR_CHARS = 600


def write_comparison(found: Compared, out: Path) -> list[Path]:
    """Write `comparison.html`, `.md` and `.json` to `out`, made if missing, and return their paths.
    Raises UsageError where it cannot be written."""
    page: Json = {
        "title": f"Comparison: {found.ablation.name}",
        "facts": (found.ablation.base_model, *found.devices, moment(found.ablation.created_at)),
        "sentence": headline(found),
        "drawn": figures(found),
        "sections": sections(found),
    }
    texts = {
        HTML: write_page("html", **page),
        MARKDOWN: write_page("md", **page),
        JSON: json.dumps(as_data(found), indent=2, allow_nan=False) + "\n",
    }
    with explain_write_errors(out, "choose another directory, or free some disk"):
        return [Path(atomic_write(out / name, text)) for name, text in texts.items()]


def as_data(found: Compared) -> Json:
    ablation = found.ablation.model_dump(
        mode="json", exclude={"references": True, "branches": {"__all__": {"answers"}}}
    )
    numbers = {name: value for name, value in vars(found).items() if name != "ablation"}
    return {
        **ablation,
        "headline": headline(found),
        "verdict": verdict_of(found),
        "best": found.strategies[0]["name"] if found.strategies else None,
        **numbers,
        "trust": list(trust(found)),
    }


# -- who won ---------------------------------------------------------------------------------------


def verdict_of(found: Compared) -> str:
    """Certainty of the first place, against the baseline or the next best: `nothing`,
    `no_correct_kernel`, `one_strategy`, or a key of READS."""
    if not found.strategies:
        return "nothing"
    if not any(row["exec_at_1"] for row in found.strategies):
        return "no_correct_kernel"
    row = _decisive(found)
    return judged(row) if row else "one_strategy"


def headline(found: Compared) -> str:
    """One sentence: which strategy is best, by how much, and whether that is more than chance."""
    return clean(_headline(found), one_line=True)


def _headline(found: Compared) -> str:
    if not found.strategies:
        failed = len(found.ablation.branches)
        return f"No branch finished ({failed} failed): nothing to compare."
    best, count = found.strategies[0], len(found.strategies)
    if not best["exec_at_1"]:
        whose = f"any of {count} strategies" if count > 1 else best["name"]
        return f"No correct kernel from {whose} on {plural(found.tasks, 'task')}."
    first = (
        f"{best['name']} has the highest Exec@1 on {plural(best['tasks'], 'task')}:"
        f" {shown_metric(best, 'exec_at_1')}"
    )
    row = _decisive(found)
    return f"{first}; {difference_sentence(row) if row else 'no other strategy finished.'}"


def _decisive(found: Compared) -> Row | None:
    rows = {
        row["model"]: row
        for row in found.differences
        if (row["metric"], row["track"]) == (EXEC, OWN_TRACK)
    }
    best = found.strategies[0]["name"]
    if best in rows:
        return rows[best]
    others = (rows[each["name"]] for each in found.strategies if each["name"] in rows)
    return next((row for row in others if row["baseline"] == best), None)


# -- what limits it --------------------------------------------------------------------------------


def trust(found: Compared) -> Iterator[str]:
    strategies = found.strategies
    if not strategies:
        return
    if found.tasks < FEW_TASKS:
        yield (
            f"{plural(found.tasks, 'task')}: too few to rank strategies. Below {FEW_TASKS}, an"
            " interval is wider than most differences."
        )
    yield from found.remarks
    names = {row["name"] for row in strategies}
    silent = [
        row["model"]
        for row in found.scores
        if (row["metric"], row["track"], row["value"]) == (EXEC, "any", 0) and row["model"] in names
    ]
    if silent:
        yield f"Not one correct answer: {', '.join(silent)}. The zero is measured, not missing."
    single = [row["name"] for row in strategies if row["seeds"] == 1]
    if single:
        yield (
            f"One seed only: {', '.join(single)}. The result of another training run of the same"
            " recipe is unknown."
        )
    if spread := _widest_spread(found):
        yield (
            f"Widest spread of seeds, Exec@1: {spread}. No interval here includes it, because"
            " intervals pool seeds and draw tasks. The p of seeds tests whether the spread alone"
            " explains a difference; with few seeds it can rarely exclude this."
        )
    if len(strategies) > 2:
        yield (
            f"The best of {len(strategies)} strategies was chosen by its score, so its lead is"
            " biased upwards. p values are corrected for all comparisons of a track (Holm),"
            " intervals are not. Strategies are compared with the baseline, not with each other."
        )
    rows = [row["rows"] for row in strategies if row["rows"]]
    if rows and max(rows) > 1.1 * min(rows):
        yield (
            f"Strategies were trained on different numbers of rows ({min(rows):,.0f} to"
            f" {max(rows):,.0f}), which is another explanation of a difference."
        )
    yield CORRECT_MEANS


def _widest_spread(found: Compared) -> str:
    seeds = grouped(
        (row["arm"], row["value"])
        for row in found.scores_by_seed
        if (row["metric"], row["track"]) == (EXEC, OWN_TRACK)
    )
    spreads = {arm: max(values) - min(values) for arm, values in seeds.items() if len(values) > 1}
    if not spreads:
        return ""
    name = max(spreads, key=lambda arm: spreads[arm])
    return f"{100 * spreads[name]:.1f} points ({name})"


# -- the page --------------------------------------------------------------------------------------


STRATEGY_COLUMNS: Mapping[str, Callable[[Row], Cell]] = {
    "strategy": lambda row: row["name"],
    "Exec@1": lambda row: shown_metric(row, "exec_at_1"),
    "fast_1@1": lambda row: shown_metric(row, "fast_1_at_1"),
    "speedup of correct": lambda row: shown_metric(row, GEOMETRIC_MEAN, ".2x"),
    "time in own kernels": lambda row: shown_metric(row, KERNEL_SHARE),
    "Exec@1 by seed": lambda row: row["exec_by_seed_percent"],
    "seeds": lambda row: str(row["seeds"] or ""),
    "rows": lambda row: number(row["rows"], ",.0f"),
    "loss": lambda row: number(row["loss_last"], ".3f"),
    "held-out loss": lambda row: number(row["held_out_loss_last"], ".3f"),
}


def sections(found: Compared) -> list[Section]:
    ablation = found.ablation
    head: tuple[Part, ...] = (
        Links(_links(ablation, "The ablation in MLflow", "its run in Prefect")),
    )
    if found.strategies:
        caption = (
            "Exec@1 and fast_1@1 on the track 'custom kernel'. A filled point with its line is a"
            " strategy with all seeds pooled and its 95 % interval over tasks; hollow points are"
            " single seeds; the dashed line is the baseline."
        )
        head = (*head, Picture(SCORES, caption))
    against = found.baseline if found.differences else "the untuned model"
    return [
        Section("Scores by strategy", head),
        Section("Strategies", _strategies(found)),
        Section(f"Against {against}, task by task", _differences(found)),
        Section("What to trust, and what not", (Bullets((*trust(found), *ablation.cautions)),)),
        Section("Branches", _branches(found)),
    ]


def _strategies(found: Compared) -> tuple[Part, ...]:
    if not found.strategies:
        return ()
    tables = {
        track: pivoted(
            {"strategy": lambda row: row["model"]},
            [row for row in found.scores if row["track"] == track],
        )
        for track in TRACKS
    }
    other: Part = Section("The same counting any correct answer", (tables["any"],))
    if tables["any"] == tables[OWN_TRACK]:
        other = (
            "Counting every correct answer, with or without a custom kernel, gives the same"
            " numbers."
        )
    about = (
        "Exec@1 is the share of tasks solved with one answer, fast_1@1 the share solved with a"
        " kernel faster than PyTorch, both with a custom kernel that did the work. In brackets:"
        " 95 % intervals over tasks. The speedup is the geometric mean over correct, timed kernels."
        " Losses are those at the end of training, averaged over seeds; each strategy has data of"
        " its own, so they are not comparable."
    )
    table = table_of([*found.strategies, *found.references], STRATEGY_COLUMNS)
    return table, about, other


def _differences(found: Compared) -> tuple[Part, ...]:
    if not (found.differences or found.against_untuned):
        return ()
    untuned: tuple[Part, ...] = ()
    if found.against_untuned:
        question = (
            f"Did training help? Against {found.untuned_model}, the untuned model, corrected"
            " separately:"
        )
        untuned = (question, *differences_parts(found.against_untuned))
    about = (
        "Percentage points over the tasks that both models answered, with 95 % intervals over task"
        " pairs. p: sign-flip permutation test over tasks, corrected by Holm's method for all rows"
        " of a track of this question. p of seeds: t test of the difference against the spread"
        " between seeds, which all strategies share, corrected for all strategies. Both must be"
        " below 0.05."
    )
    return (*differences_parts(found.differences), *untuned, about)


def _branches(found: Compared) -> tuple[Part, ...]:
    branches = [
        branch.model_dump()
        | dict(zip(("MLflow", "Prefect"), _links(branch, "run", "run"), strict=True))
        for branch in found.ablation.branches
    ]
    lost = [branch for branch in branches if branch["state"] != "done"]
    done = [branch for branch in branches if branch["state"] == "done"]
    for branch in lost:
        branch["error"] = cut(branch["error"], ERROR_CHARS)
    facts = ("name", "seed", "rows", "loss_last", "seconds", "MLflow", "Prefect")
    return (
        fields_table(lost, "name", "error", "MLflow", "Prefect"),
        Section("Those that finished", (fields_table(done, *facts),)),
        Section(
            "Fingerprints",
            (
                f"The ablation: {found.ablation.fingerprint}",
                fields_table(done, "name", "curated", "trained", "scores"),
            ),
        ),
    )


def _links(of: Ablation | Branch, *names: str) -> tuple[Link | None, ...]:
    urls = (of.mlflow_url, of.prefect_url)
    return tuple(Link(name, url) if url else None for name, url in zip(names, urls, strict=True))
