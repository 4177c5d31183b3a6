"""Training sets and scores once more, by plain polars and numpy: of the product, only the reader of
snapshots is used."""

from math import comb

import numpy as np
import polars as pl
from scipy.stats import t

from tasks.store import snapshots


def joined(root, name):
    stages = [snapshots(str(root), stage) for stage in ("verification", "synthesis")]
    verdicts, candidates = (next(s for s in found if s.fingerprint == name) for found in stages)
    rows = verdicts.read().join(candidates.read().drop("task_id"), on="candidate_id")
    speed = pl.col("timing").struct.field("speedup").fill_null(0.0).alias("speed")
    return rows.with_columns(speed, model=pl.lit(name)).sort("task_id", "sample_index").to_dicts()


def test_three_training_sets(recomputed):
    pool = [r for r in joined(recomputed, "line") if r["status"] == "correct"]
    pool = [r for r in pool if r["reasoning_tokens"] and r["finish_reason"] != "length"]
    tasks = {}
    for row in pool:
        tasks.setdefault(row["task_id"], []).append(row)
    short = {name: min(own, key=lambda r: r["reasoning_tokens"]) for name, own in tasks.items()}
    fast = {name: max(r["speed"] for r in own) for name, own in tasks.items()}
    both = [r for name, r in short.items() if r["speed"] == fast[name] > 0]
    taken = {(r["task_id"], r["code"]): (r, "concise_and_fast") for r in both}
    for row in (r for r in pool if r["speed"] > 5):
        taken.setdefault((row["task_id"], row["code"]), (row, "high_speedup"))
    for name, own in tasks.items():
        left = [r for r in own if (name, r["code"]) not in taken]
        single = sum(len(r["reference_operators"]) == 1 for r, _ in taken.values())
        if left and len(own[0]["reference_operators"]) == 1 and 2 * single < len(taken):
            row = min(left, key=lambda r: r["reasoning_tokens"])
            taken[name, row["code"]] = (row, "single_operator")
    made = snapshots(str(recomputed), "curation")
    sets = {s.manifest["config"]["strategy"]: s.read() for s in made}
    ids = {(row["candidate_id"], criterion) for row, criterion in taken.values()}
    assert set(sets["concur"].select("candidate_id", "criterion").iter_rows()) == ids
    first = sorted(short.values(), key=lambda r: r["reasoning_tokens"])[: len(ids)]
    assert set(sets["min_length"]["candidate_id"]) == {r["candidate_id"] for r in first}
    quickest = sorted(((v, name) for name, v in fast.items() if v), reverse=True)[: len(ids)]
    assert set(sets["speedup"].select("speedup", "task_id").iter_rows()) == set(quickest)


def test_scores(recomputed):
    rows = [row for name in ("base", "tuned") for row in joined(recomputed, name)]
    failed = {}
    for row in (r for r in rows if r["status"] not in ("compile_error", "no_code")):
        failed.setdefault(row["task_id"], []).append(row["status"] == "task_error")
    kept = [r for r in rows if np.mean(failed[r["task_id"]]) <= 0.5]
    (scores,) = snapshots(str(recomputed), "benchmark")
    for told in scores.read().filter(pl.col("k") > 0, track="custom_kernel").iter_rows(named=True):
        least, k = float(told["metric"].removeprefix("fast_").replace("exec", "0")), told["k"]
        passes = {}
        for r in (r for r in kept if r["model"] == told["model"]):
            right = r["status"] == "correct"
            passes.setdefault(r["task_id"], []).append(right and (not least or r["speed"] > least))
        each = [1 - comb(len(own) - sum(own), k) / comb(len(own), k) for own in passes.values()]
        added = np.array([*each, 0, 0, 1, 1])
        margin = t.ppf(0.975, len(added) - 1) * added.std(ddof=1) / len(added) ** 0.5
        expected = (np.mean(each), max(0, added.mean() - margin), len(each))
        assert np.allclose((told["value"], told["lower"], told["tasks"]), expected)
