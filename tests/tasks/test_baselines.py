"""Scores against two baselines: eager PyTorch always, torch.compile where verdicts were timed
against it, nothing guessed."""

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.benchmark import Benchmarked
from flows.cli.benchmark import score_table
from flows.track import model_records
from kernels_eval.records import CompiledBaseline, Language, Status, Timing, Verdict
from tasks.benchmark.report.files import to_markdown
from tasks.benchmark.report.records import ReportContext
from tasks.benchmark.samples import BASELINES, baselines_of, uncompiled_tasks
from tasks.benchmark.score_table import table_of
from tasks.benchmark.scoring import GEOMETRIC_MEAN, score
from tasks.benchmark.stage import Answers, scores_of
from tasks.store.snapshot import Snapshot
from tasks.tables import SCORES, VERDICTS
from tests.support.verdict_rows import find

ASKED = {"ks": (1,), "ps": (0.0, 1.0), "resamples": 100}
NO_BASELINE = CompiledBaseline(
    mode="default", compile_s=3.0, unavailable_reason="it does not compile"
)


def against(speedup):
    if speedup is None:
        return NO_BASELINE
    numbers = {
        "reference_ms": speedup,
        "speedup": speedup,
        "speedup_lower": 0.9 * speedup,
        "speedup_upper": 1.1 * speedup,
    }
    return CompiledBaseline(mode="default", graphs=1, compile_s=3.0, drift=0.0, **numbers)


def verdict(task, number, eager, compiled=None):
    """Correct with this speedup against eager PyTorch; wrong where it is None."""
    status = (Status.CORRECT, "ok") if eager else (Status.INCORRECT, "wrong_output")
    timing = eager and Timing(
        reference_ms=eager,
        candidate_ms=1.0,
        speedup=eager,
        speedup_lower=eager,
        speedup_upper=eager,
        pairs=9,
        calls_per_sample=1,
        clock_bound_ms=1.0,
        compiled=compiled,
    )
    return Verdict(
        candidate_id=f"{task}#{number}",
        task_id=task,
        language=Language.CPP,
        status=status[0],
        reason=status[1],
        timing=timing,
        device="cpu",
    )


def stored(path, verdicts, schema=VERDICTS):
    pq.write_table(
        pa.Table.from_pylist([each.model_dump(mode="json") for each in verdicts], schema=schema),
        path,
    )
    return path


def frame(tmp_path, **models):
    return pl.concat(
        pl.read_parquet(stored(tmp_path / f"{name}.parquet", verdicts)).with_columns(
            pl.lit(name).alias("model")
        )
        for name, verdicts in models.items()
    )


def both(tmp_path):
    made = frame(tmp_path, m=BOTH)
    return [row for baseline in BASELINES for row in score(made, baseline=baseline, **ASKED)]


def kept(tmp_path, name, rows, schema):
    snapshot = Snapshot(str(tmp_path), "benchmark", name)
    snapshot.append(rows, schema)
    return snapshot.publish(config={}, rows=len(rows)).ref


def value(rows, metric, model="m"):
    k = None if metric == GEOMETRIC_MEAN else 1
    return find(rows, metric, k, "custom_kernel", model=model).value


BOTH = [
    verdict("a", 0, 4.0, against(2.0)),  # faster than both
    verdict("b", 0, 2.0, against(0.5)),  # faster than eager, slower than compiled
    verdict("c", 0, 3.0, against(None)),  # no compiled baseline
    verdict("d", 0, None),  # wrong: slower than any
]


def test_each_baseline_counts_its_own_speedups(tmp_path):
    made = frame(tmp_path, m=BOTH)
    assert baselines_of(made) == ("eager", "compile") and uncompiled_tasks(made) == ["c"]
    eager, compiled = (score(made, baseline=baseline, **ASKED) for baseline in baselines_of(made))
    assert value(eager, "fast_1") == value(eager, "exec") == pytest.approx(3 / 4)
    # of a, b and d; c has no such baseline and counts for nobody
    assert value(compiled, "fast_1") == pytest.approx(1 / 3)
    assert value(compiled, GEOMETRIC_MEAN) == pytest.approx((2.0 * 0.5) ** 0.5)
    assert value(eager, GEOMETRIC_MEAN) == pytest.approx(24 ** (1 / 3))
    metrics = {row.metric for row in compiled}
    assert metrics == {"fast_1", GEOMETRIC_MEAN}, "being right has no baseline"
    assert {row.baseline for row in eager} == {"eager"}
    assert {(row.baseline, row.tasks) for row in compiled} == {("compile", 3)}


def test_the_default_is_eager_whatever_else_verdicts_hold(tmp_path):
    plain = [
        each.model_copy(
            update={"timing": each.timing and each.timing.model_copy(update={"compiled": None})}
        )
        for each in BOTH
    ]
    with_it, without = (score(frame(tmp_path, m=verdicts), **ASKED) for verdicts in (BOTH, plain))
    assert with_it == without


def test_verdicts_without_it_give_no_rows_against_it(tmp_path):
    plain = frame(tmp_path, m=[verdict("a", 0, 2.0), verdict("b", 0, None)])
    assert baselines_of(plain) == ("eager",) and uncompiled_tasks(plain) == []
    old = VERDICTS.set(
        VERDICTS.get_field_index("timing"),
        pa.field(
            "timing", pa.struct([f for f in VERDICTS.field("timing").type if f.name != "compiled"])
        ),
    )
    before = pl.read_parquet(
        stored(tmp_path / "old.parquet", [verdict("a", 0, 2.0)], old)
    ).with_columns(pl.lit("m").alias("model"))
    assert baselines_of(before) == ("eager",), "a table from before there was a second baseline"
    assert value(score(before, **ASKED), "fast_1") == 1.0
    bare = pl.DataFrame({"model": ["m"], "task_id": ["a"], "status": ["correct"], "timing": [None]})
    assert baselines_of(bare) == ("eager",)


def test_a_model_that_was_not_timed_against_it_has_no_such_numbers(tmp_path):
    made = frame(tmp_path, m=BOTH, other=[verdict("a", 1, 9.0), verdict("b", 1, 9.0)])
    rows = score(made, baseline="compile", **ASKED)
    assert value(rows, "fast_1") is not None and value(rows, "fast_1", "other") is None
    assert {row.why_not for row in rows if row.model == "other"} == {
        "2 of its timed samples were not timed against torch.compile"
    }


def test_a_verdict_with_it_survives_the_table(tmp_path):
    rows = pl.read_parquet(stored(tmp_path / "v.parquet", BOTH)).to_dicts()
    again = [
        Verdict.model_validate(
            {
                name: value
                for name, value in row.items()
                if value is not None and name != "verdict_key"
            }
        )
        for row in rows
    ]
    assert again == BOTH
    assert again[0].timing.compiled == against(2.0)
    assert again[2].timing.compiled.unavailable_reason == "it does not compile"


def test_the_table_of_scores_keeps_the_baseline_and_old_ones_are_eager(tmp_path):
    rows = both(tmp_path)
    ref = kept(tmp_path, "new", [row.model_dump() for row in rows], SCORES)
    assert scores_of(ref) + scores_of(ref, "compile") == rows
    old = pa.schema([field for field in SCORES if field.name != "baseline"])
    eager = [row.model_dump(exclude={"baseline"}) for row in scores_of(ref)]
    before = kept(tmp_path, "old", eager, old)
    assert scores_of(before) == scores_of(ref) and scores_of(before, "compile") == []


def test_the_command_names_the_baseline_of_every_row(tmp_path):
    path = str(stored(tmp_path / "v.parquet", BOTH))
    data = score_table(path, ks=(1,), ps=(0.0, 1.0), resamples=50)
    header, lines = table_of(data)
    assert header[3] == "against"
    assert [line[3] for line in lines] == ["eager"] * 2 + ["torch.compile"] * 2
    assert lines[2][5] == "-", "Exec stands in the row of eager PyTorch"
    assert (
        "Scores against torch.compile leave out 1 tasks without such a baseline: c."
        in data["notes"]
    )


def test_the_report_shows_both_with_their_names(tmp_path):
    rows = {name: [r for r in both(tmp_path) if r.baseline == name] for name in BASELINES}
    alone = ReportContext(
        run_name="r", language="cpp", tasks=4, candidates=4, scores=tuple(rows["eager"])
    )
    assert "torch.compile" not in to_markdown(alone)
    text = to_markdown(alone.model_copy(update={"against_compile": tuple(rows["compile"])}))
    lines = [line for line in text.splitlines() if line.startswith("| m | custom kernel")]
    assert "against torch.compile" in text
    assert "33" in next(line for line in lines if "1.00" in line)


def test_mlflow_keeps_both_apart(tmp_path):
    ref = kept(tmp_path, "both", [row.model_dump() for row in both(tmp_path)], SCORES)
    answers = (Answers(model="m", candidates=ref, verdicts=ref),)
    (record,) = model_records(Benchmarked(suite=ref, answers=answers, scores=ref))
    assert record.metrics["fast_1_at_1"] == pytest.approx(3 / 4)
    assert record.metrics["fast_1_at_1_vs_compile"] == pytest.approx(1 / 3)
    assert "exec_at_1" in record.metrics and "exec_at_1_vs_compile" not in record.metrics
