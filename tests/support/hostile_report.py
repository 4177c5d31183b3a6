"""A report in which everything that a candidate, a task, a model or a profile can name would act on
a page if it were taken for markup."""

from __future__ import annotations

from typing import Any

from tasks.benchmark.errors import ErrorGroup
from tasks.benchmark.report.records import CandidatePoint, Example, ReportContext
from tests.support.payloads import HOSTILE


def hostile_fields(text: str) -> dict[str, Any]:
    """Fields of a report that hold words of others, all of them `text`."""
    return {
        "errors": [
            ErrorGroup(
                reason=text,
                signature=text,
                count=1,
                tasks=1,
                models={text: 1},
                names=[text],
                example=text,
            )
        ],
        "findings": [text],
        "findings_bounded_by": [text],
        "points": [
            CandidatePoint(
                task_name=text,
                generator=text,
                status=text,
                reason=text,
                reasoning_tokens=5,
                speedup=2.0,
            )
        ],
        "examples": [
            Example(
                task_name=text, generator=text, status=text, reason=text, detail=text, code=text
            )
        ],
        "fingerprints": {text: text},
        "tool_versions": {text: text},
        "hardware": {text: text},
        "config": {text: [text]},
        "notes": [text],
    }


def hostile_report() -> ReportContext:
    return ReportContext(
        run_name=HOSTILE,
        language="cpp",
        device=HOSTILE,
        tasks=1,
        candidates=1,
        status_counts={HOSTILE: 1},
        reason_counts={HOSTILE: 1},
        criterion_counts={HOSTILE: 1},
        trace_flags={HOSTILE: (1, 1)},
        base_model=HOSTILE,
        history=[],
        scores=[],
        **hostile_fields(HOSTILE),
    )
