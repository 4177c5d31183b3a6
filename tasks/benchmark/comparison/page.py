"""An ablation in one page: which strategy won, by how much, and how sure that is.

Guarantees: `comparison.html` loads nothing and runs no script, is readable on light and dark and on
a telephone; `comparison.md` and `comparison.json` hold the same numbers; whatever a task, a
candidate or a branch is called, it is text; the same ablation gives the same bytes; a file is there
whole or not at all. Reads the verdicts of the branches and nothing else. Does not train, score or
judge anything anew, and does not make a strategy better than the numbers do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kernels_eval.errors import UsageError
from tasks.benchmark.comparison.figures import figures
from tasks.benchmark.comparison.findings import headline, trust, verdict_of
from tasks.benchmark.comparison.numbers import Arm, Compared, compared
from tasks.benchmark.comparison.records import Ablation, Written
from tasks.benchmark.comparison.sections import sections
from tasks.benchmark.published import PUBLISHED
from tasks.files import atomic_write
from tasks.reporting.page import markdown_of, page_of
from tasks.reporting.text import address, masked

SCHEMA_VERSION = 1
HTML, MARKDOWN, JSON = "comparison.html", "comparison.md", "comparison.json"


def write_comparison(
    ablation: Ablation, out: Path, *, resamples: int = 2000, seed: int = 0
) -> Written:
    """Write `comparison.html`, `.md` and `.json` into the directory `out`, which is made where it
    is not there.

    Raises UsageError for a directory that cannot be written, verdicts that are not there, or that
    scoring refuses (two devices, say).
    """
    found = compared(_without_passwords(ablation), resamples=resamples, seed=seed)
    drawn = figures(found)
    content = sections(found, tuple(drawn))
    title, facts, sentence = f"Comparison: {ablation.name}", _facts(found), headline(found)
    texts = {
        HTML: page_of(title, facts, sentence, content, drawn),
        MARKDOWN: markdown_of(title, facts, sentence, content),
        JSON: (
            json.dumps(as_data(found, resamples=resamples, seed=seed), indent=2, allow_nan=False)
            + "\n"
        ),
    }
    try:
        for name, text in texts.items():
            atomic_write(out / name, text)
    except OSError as error:
        raise UsageError(
            f"cannot write {out}: {error.strerror or error}",
            "choose another directory, or free some disk",
        ) from error
    return Written(
        html=out / HTML, markdown=out / MARKDOWN, json_file=out / JSON, headline=sentence
    )


def as_data(found: Compared, *, resamples: int = 2000, seed: int = 0) -> dict[str, Any]:
    """Return the comparison for a machine: shares in [0, 1], speedup ratios, times in seconds."""
    ablation, data = found.ablation, found.model_dump(mode="json")
    own = ablation.model_dump(mode="json", exclude={"branches": {"__all__": {"answers"}}})
    least, most = found.samples
    names = ("name", "fingerprint", "created_at", "base_model", "mlflow_url", "prefect_url")
    return {
        "schema_version": SCHEMA_VERSION,
        **{name: own[name] for name in (*names, "branches")},
        "headline": headline(found),
        "verdict": verdict_of(found),
        "best": found.arms[0].name if found.arms else None,
        "untuned_model": found.base,
        "samples_per_task_and_seed": {"least": least, "most": most},
        "excluded_tasks": data["excluded"],
        "resamples": resamples,
        "seed": seed,
        "strategies": [_arm_data(arm) for arm in found.arms],
        "scores_by_seed": data["seeds"],
        "against_untuned": data["against_base"],
        "trust": list(trust(found)),
        "published": [row.model_dump(mode="json") for row in PUBLISHED],
        **{
            name: data[name]
            for name in ("baseline", "tasks", "devices", "references", "scores", "differences")
        },
        "seed_tests": data["seed_tests"],
    }


def _arm_data(arm: Arm) -> dict[str, Any]:
    losses = {name: list(arm.loss(name)) for name in ("loss_last", "held_out_loss_last")}
    return {
        **arm.model_dump(include={"name", "strategy", "size"}),
        "branches": [branch.name for branch in arm.branches],
        "seeds": [branch.seed for branch in arm.branches],
        "rows": arm.rows,
        "gpu_hours": arm.gpu_hours,
        **losses,
    }


def _facts(found: Compared) -> tuple[str, ...]:
    return (found.ablation.base_model, *found.devices, found.ablation.created_at)


def _without_passwords(ablation: Ablation) -> Ablation:
    """Passwords inside URLs masked, in errors too; links that are no http(s) address dropped."""
    plain = masked(
        ablation.model_dump(
            mode="json", exclude={"branches": {"__all__": {"answers"}}, "references": True}
        )
    )
    branches = tuple(
        branch.model_copy(
            update={
                "error": told["error"],
                **{name: _link(told[name]) for name in ("mlflow_url", "prefect_url")},
            }
        )
        for branch, told in zip(ablation.branches, plain["branches"], strict=True)
    )
    links = {name: _link(plain[name]) for name in ("mlflow_url", "prefect_url")}
    return ablation.model_copy(
        update={"branches": branches, "cautions": tuple(plain["cautions"]), **links}
    )


def _link(url: str | None) -> str | None:
    return address(url) if url else None
