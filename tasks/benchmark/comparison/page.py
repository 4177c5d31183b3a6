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
from tasks.benchmark.comparison.content import content, headline, trust, verdict_of
from tasks.benchmark.comparison.figures import figures
from tasks.benchmark.comparison.numbers import Compared, compared
from tasks.benchmark.comparison.records import Ablation, Written
from tasks.benchmark.tables import PUBLISHED, TEMPLATES
from tasks.files import atomic_write
from tasks.reporting.page import page_of

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
    page: dict[str, Any] = {
        "title": f"Comparison: {ablation.name}",
        "facts": (ablation.base_model, *found.devices, ablation.created_at),
        "sentence": headline(found),
        "drawn": figures(found),
        **content(found),
    }
    template = TEMPLATES / "comparison.j2"
    data = json.dumps(as_data(found, resamples=resamples), indent=2, allow_nan=False)
    try:
        atomic_write(out / HTML, page_of(template, "html", **page))
        atomic_write(out / MARKDOWN, page_of(template, "md", **page))
        atomic_write(out / JSON, f"{data}\n")
    except OSError as error:
        raise UsageError(
            f"cannot write {out}: {error.strerror or error}",
            "choose another directory, or free some disk",
        ) from error
    return Written(
        html=out / HTML, markdown=out / MARKDOWN, json_file=out / JSON, headline=page["sentence"]
    )


def as_data(found: Compared, *, resamples: int = 2000) -> dict[str, Any]:
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
