"""Verified samples as frames of the real schemas, small enough to decide by hand, and a strategy of
hypothesis for any of them."""

import polars as pl
import pyarrow as pa
from hypothesis import strategies as st

from tasks.curation.config import CurationConfig
from tasks.curation.decisions import curate
from tasks.samples import Samples
from tasks.store import Snapshot
from tasks.tables import CANDIDATES, TASKS, VERDICTS

SINGLE, FUSION = (
    ["torch.nn.functional.linear"],
    ["torch.nn.functional.linear", "torch.nn.functional.gelu"],
)
SCHEMA = pa.schema(
    [*VERDICTS, *(field for field in CANDIDATES if field.name not in VERDICTS.names)]
)


def sample(
    task,
    index,
    tokens,
    speedup,
    *,
    status="correct",
    ops=FUSION,
    lower=None,
):
    timing = None
    if speedup is not None and status == "correct":
        low = speedup * 0.9 if lower is None else lower
        timing = {
            "reference_ms": speedup,
            "candidate_ms": 1.0,
            "speedup": speedup,
            "speedup_lower": low,
            "speedup_upper": speedup * 1.1,
        }
        timing |= {"pairs": 50, "calls_per_sample": 1, "clock_bound_ms": 1.0}
    return {
        "candidate_id": f"{task}-{index}",
        "task_id": task,
        "status": status,
        "timing": timing,
        "reference_operators": ops,
        "generator": "org/writer",
        "sample_index": index,
        "reasoning_tokens": tokens,
        "response": "kept as it is",
        "reasoning": f"thoughts of {task}-{index}",
        "turn": 1,
    }


def samples(text):
    """Samples of a table, a line (or a part up to ";") each: "TASK-INDEX TOKENS SPEEDUP", "-" for
    none, then any of "single" (operator), "lower=BOUND" and "status=STATUS"."""
    made = []
    for line in filter(None, map(str.strip, text.replace(";", "\n").splitlines())):
        name, tokens, speedup, *more = line.split()
        task, _, index = name.partition("-")
        known = dict(word.split("=") for word in more if word != "single")
        made.append(
            sample(
                *(task, int(index)),
                None if tokens == "-" else int(tokens),
                None if speedup == "-" else float(speedup),
                status=known.get("status", "correct"),
                ops=SINGLE if "single" in more else FUSION,
                lower=float(known["lower"]) if "lower" in known else None,
            )
        )
    return made


def frame(*rows):
    read = pl.from_arrow(pa.Table.from_pylist(list(rows), schema=SCHEMA))
    assert isinstance(read, pl.DataFrame)
    return read


def taken(*rows, **config):
    """candidate_id and criterion of what a configuration takes of these samples."""
    result = curate(frame(*rows), CurationConfig(**config))
    return list(result.select("candidate_id", "criterion").iter_rows())


def listed(*rows, **config):
    """`taken` as text: "a-0 concise_and_fast; b-1 high_speedup"."""
    return "; ".join(map(" ".join, taken(*rows, **config)))


def finished(root, stage, rows, schema, name="x", upstream=(), config=None, **manifest):
    """The finished snapshot of these rows."""
    snapshot = Snapshot(str(root), stage, name)
    snapshot.append(rows, schema)
    return snapshot.publish(config=config or {}, upstream=list(upstream), extra=manifest).ref


def line_of(root, samples, name="x"):
    """Finished samples: verdicts, candidates (the other way round) and tasks."""
    tasks = [
        {"task_id": task, "name": f"name {task}", "code": f"code {task}", "entry_point": "Model"}
        for task in sorted({row["task_id"] for row in samples})
    ]
    return Samples(
        verdicts=finished(root, "verification", samples, VERDICTS, name),
        candidates=finished(root, "synthesis", samples[::-1], CANDIDATES, name),
        tasks=finished(root, "tasks", tasks, TASKS, name),
    )


SPEEDUPS = (None, float("nan"), 0.5, 1.0, 1.05, 6.0, 8.0)  # few, so that ties are common


@st.composite
def any_samples(draw, max_size=24):
    """Samples of up to six tasks, each task of one kind, with ties in length and speedup, untimed
    and incorrect ones among them."""
    drawn = draw(
        st.lists(
            st.tuples(
                st.sampled_from("abcdef"),
                st.integers(1, 4),
                st.sampled_from(SPEEDUPS),
                st.booleans(),
            ),
            min_size=1,
            max_size=max_size,
        )
    )
    kinds = {task: draw(st.booleans()) for task in sorted({task for task, *_ in drawn})}
    return [
        sample(
            task,
            index,
            tokens,
            speedup,
            status="correct" if ok else "incorrect",
            ops=SINGLE if kinds[task] else FUSION,
        )
        for index, (task, tokens, speedup, ok) in enumerate(drawn)
    ]
