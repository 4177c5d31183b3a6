"""A report in which everything that a candidate, a task, a model or a profile can name would act on
a page if it were taken for markup."""

from tasks.benchmark.errors import ErrorGroup
from tasks.benchmark.report.context import ReportContext
from tasks.benchmark.signs import Sign
from tests.support.payloads import HOSTILE

COUNTED = ("status", "reason", "criterion")
LIMITED = ("speedup", "kernel_share", "sol_score")
NAMED = ("fingerprints", "tool_versions", "hardware")
SCORE = {
    **{"track": "custom_kernel", "baseline": "eager", "metric": "exec", "k": 1, "tasks": 1},
    **{"samples": 1, "missing": 1, "value": 0.5, "lower": 0.1, "upper": 0.9},
}
DIFFERENCE = {
    **{"track": "custom_kernel", "metric": "exec", "k": 1, "tasks": 1, "difference": 0.5},
    **{"lower": 0.1, "upper": 0.9, "p": 0.5, "p_holm": 0.5},
}


def hostile_report(text=HOSTILE):
    error = dict.fromkeys(("reason", "signature", "example"), text)
    counts = {f"{name}_counts": {text: 1} for name in COUNTED}
    named = {name: {text: text} for name in NAMED}
    said = dict.fromkeys(("findings", "findings_bounded_by", "notes"), (text,))
    scores = tuple(
        SCORE | {"model": text, "metric": metric, "why_not": text} for metric in ("exec", "fast_1")
    )
    return ReportContext(
        run_name=text,
        language="cpp",
        device=text,
        base_model=text,
        tasks=1,
        candidates=1,
        timed=1,
        trace_flags={text: (1, 1)},
        scores=scores,
        comparisons=(DIFFERENCE | {"model": text, "baseline": text},),
        groups=tuple(row | {"by": "level", "group": text} for row in scores),
        signs=(Sign(sign=text, model=text, sentence=text),),
        errors=(ErrorGroup(**error, count=1, tasks=1, models={text: 1}, names=(text,)),),
        limits=({"limit": text, "candidates": 1} | dict.fromkeys(LIMITED, 0.5),),
        config={text: [text]},
        **counts,
        **named,
        **said,
    )
