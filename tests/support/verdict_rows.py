"""Tables of verdicts as scoring reads them, made by hand."""

import itertools

import polars as pl

from kernels_eval.records import STATUS_OF

NUMBER = itertools.count()
WRONG, CHEAT, BROKEN = "wrong_output", "no_custom_kernel", "reference_failed"
TYPES = {
    "timing": pl.Struct(dict.fromkeys(("speedup", "speedup_lower", "speedup_upper"), pl.Float64)),
    "correctness": pl.Struct(dict.fromkeys(("kernelbench_1e4", "kernelbench_1e2"), pl.Boolean)),
    "custom_kernels": pl.List(pl.String),
    "outputs_match": pl.Boolean,
}


def row(model, task, outcome, **facts):
    """One verdict: an outcome is a speedup (then correct) or a reason, whose status is looked
    up."""
    timed = not isinstance(outcome, str)
    speeds = [outcome * x if timed else None for x in (1.0, 0.9, 1.1)]
    found = {
        "model": model,
        "candidate_id": f"c{next(NUMBER)}",
        "task_id": task,
        "status": "correct" if timed else str(STATUS_OF[outcome]),
        "reason": "ok" if timed else outcome,
        "outputs_match": timed,
        "timing": dict(zip(TYPES["timing"].to_schema(), speeds, strict=True)) if timed else None,
        "correctness": {"kernelbench_1e4": timed, "kernelbench_1e2": timed},
        "custom_kernels": ["k"] if timed else [],
        "device": "a GPU",
        "detail": "",
        "log_tail": "",
    }
    return found | facts


def frame(*rows):
    types = {name: kind for name, kind in TYPES.items() if name in rows[0]}
    return pl.DataFrame(list(rows), schema_overrides=types, infer_schema_length=None)


def outcomes(model, **tasks):
    """Rows of one model: the outcomes of each task's samples."""
    return [row(model, task, outcome) for task, found in tasks.items() for outcome in found]


def scored_row(scores, metric, k=1, **facts):
    """The one row of a table of scores with this metric and k."""
    wanted = {"metric": metric, "k": k, **facts}
    found = scores.filter(pl.col(name).eq_missing(value) for name, value in wanted.items())
    assert found.height == 1, found
    return found.row(0, named=True)
