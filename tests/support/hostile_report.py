"""A report in which everything that a candidate, a task, a model or a profile can name would act on a page if it were taken for markup."""

from __future__ import annotations

from tasks.benchmark.errors import ErrorGroup
from tasks.benchmark.report import CandidatePoint, Example, ReportContext
from tests.support.payloads import HOSTILE


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
        errors=[ErrorGroup(reason=HOSTILE, signature=HOSTILE, count=1, tasks=1, models={HOSTILE: 1}, names=[HOSTILE], example=HOSTILE)],
        findings=[HOSTILE],
        findings_bounded_by=[HOSTILE],
        points=[CandidatePoint(task_name=HOSTILE, generator=HOSTILE, status=HOSTILE, reason=HOSTILE, reasoning_tokens=5, speedup=2.0)],
        examples=[Example(task_name=HOSTILE, generator=HOSTILE, status=HOSTILE, reason=HOSTILE, detail=HOSTILE, code=HOSTILE)],
        fingerprints={HOSTILE: HOSTILE},
        tool_versions={HOSTILE: HOSTILE},
        hardware={HOSTILE: HOSTILE},
        config={HOSTILE: [HOSTILE]},
        notes=[HOSTILE],
    )
