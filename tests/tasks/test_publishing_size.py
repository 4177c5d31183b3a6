"""A set of 200,000 rows in a shuffled order: memory does not grow with the texts."""

import json

import polars as pl
import pytest

from tasks.publishing.lineage import CURATION, SYNTHESIS, TASKS, VERIFICATION
from tasks.store.snapshot import Snapshot
from tests.support.processes import python

TEXT_BYTES = 1000
PER_PART = 5000
PROGRAM = """
import json, resource, sys
from pathlib import Path
from tasks.publishing.config import PublishOptions
from tasks.publishing.publish import publish
from tasks.store.snapshot import SnapshotRef
made = publish(SnapshotRef.model_validate_json(sys.argv[1]), Path(sys.argv[2]), \
PublishOptions(shard_bytes=2**19))
peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"peak_mib": peak_mib, "shards": len(made.shards), "rows": \
made.rows["concur"]["train"]}))
"""


def write_part(snapshot, number, rows, **columns):
    path = snapshot.local_dir() / f"part-{number:020d}-x.parquet"
    rows.select(**columns).write_parquet(path, compression="lz4")


def large_line(root, rows):
    """The snapshots of a line with so many curated rows, written part by part."""
    snapshots = {
        name: Snapshot(str(root), name, f"{name}{rows}")
        for name in (TASKS, SYNTHESIS, VERIFICATION, CURATION)
    }
    order = pl.Series(range(rows)).shuffle(seed=1)
    number, task = pl.col("number"), pl.format("t/{}", pl.col("number") // 5)
    candidate = pl.format("{}-{}", task, number)
    text = pl.format("{} ", number.hash(3)).repeat_by(TEXT_BYTES // 20).list.join("")
    for part in range(-(-rows // PER_PART)):
        chosen = pl.DataFrame({"number": order[part * PER_PART : (part + 1) * PER_PART]})
        named = {"candidate_id": candidate, "task_id": task}
        texts = dict.fromkeys(("reasoning", "code", "answer", "task_code"), text)
        words = dict.fromkeys(("generator", "criterion", "language"), pl.lit("x"))
        facts = {
            CURATION: {**texts, **words, "speedup": pl.lit(1.5), "reasoning_tokens": number},
            SYNTHESIS: {"sample_index": number % 5, "prompt_hash": candidate},
            VERIFICATION: {"verdict_key": candidate, "device": pl.lit("GPU")},
        }
        for stage, columns in facts.items():
            write_part(snapshots[stage], part, chosen, **named, **columns)
    tasks = pl.DataFrame({"number": range(0, rows, 5)})
    write_part(snapshots[TASKS], 0, tasks, task_id=task, source=pl.lit("user"))
    above = [snapshots[stage].fingerprint for stage in (VERIFICATION, SYNTHESIS, TASKS)]
    for stage, snapshot in snapshots.items():
        upstream = above if stage == CURATION else []
        snapshot.publish(config={"strategy": "concur"}, upstream=upstream)
    return snapshots[CURATION].ref


def published(tmp_path, rows):
    ref = large_line(tmp_path / "root", rows)
    done = python(PROGRAM, ref.model_dump_json(), tmp_path / f"out{rows}", timeout_s=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_texts_of_200_000_rows(tmp_path):
    small, large = published(tmp_path, 20_000), published(tmp_path, 200_000)
    print(small, large)
    assert (small["rows"], large["rows"]) == (20_000, 200_000) and large["shards"] > 5
    texts_mib = 180_000 * 4 * TEXT_BYTES / 2**20  # what there is more of
    assert large["peak_mib"] - small["peak_mib"] < 150 < texts_mib / 4, (small, large)
    ids = (
        pl.scan_parquet(tmp_path / "out200000/data/*.parquet")
        .select("task_id", "candidate_id", "sample_index", "reasoning_tokens")
        .collect()
    )
    assert (
        ids.equals(ids.sort("task_id", "sample_index", "candidate_id"))
        and ids["candidate_id"].n_unique() == 200_000
    )
    assert (
        ids["candidate_id"] == ids["task_id"] + "-" + ids["reasoning_tokens"].cast(pl.String)
    ).all()
