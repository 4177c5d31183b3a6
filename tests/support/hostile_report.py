"""A report in which everything that a candidate, a task, a model or a profile can name would act on
a page if it were taken for markup."""

from tasks.benchmark.errors import ErrorGroup
from tasks.benchmark.report.records import CandidatePoint, Example, ReportContext
from tests.support.payloads import HOSTILE

COUNTED = ("status", "reason", "criterion")
NAMED = ("fingerprints", "tool_versions", "hardware")


def hostile_report(text=HOSTILE):
    shown = dict.fromkeys(("task_name", "generator", "status", "reason"), text)
    error = dict.fromkeys(("reason", "signature", "example"), text)
    counts = {f"{name}_counts": {text: 1} for name in COUNTED}
    named = {name: {text: text} for name in NAMED}
    said = dict.fromkeys(("findings", "findings_bounded_by", "notes"), (text,))
    return ReportContext(
        run_name=text,
        language="cpp",
        device=text,
        base_model=text,
        tasks=1,
        candidates=1,
        trace_flags={text: (1, 1)},
        errors=(ErrorGroup(**error, count=1, tasks=1, models={text: 1}, names=(text,)),),
        points=(CandidatePoint(**shown, reasoning_tokens=5, speedup=2.0),),
        examples=(
            Example(
                **shown,
                **dict.fromkeys(("candidate_id", "detail", "reasoning", "code", "reference"), text),
            ),
        ),
        config={text: [text]},
        **counts,
        **named,
        **said,
    )
