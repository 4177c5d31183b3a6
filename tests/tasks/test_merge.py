"""Verdict sets of several GPUs as one table: one row per candidate and GPU, conflicts refused; and
what curation may demand of it."""

from __future__ import annotations

import json
import re

import polars as pl
import pytest
from click.testing import CliRunner

from flows.cli.main import main
from kernels_eval.errors import UsageError
from tasks.curation.config import CurationConfig
from tasks.curation.pool import eligible_samples
from tasks.curation.source import Source
from tasks.verification.merge import merged

A, B = "NVIDIA A100", "NVIDIA H100"


def verdict(name: str, status: str = "correct", device: str = "", **more) -> dict:
    speedup = more.pop("speedup", 2.0) if status == "correct" else None
    return {
        "candidate_id": name,
        "task_id": "t/1",
        "status": status,
        "reason": "ok" if status == "correct" else "build_failed",
        "device": device,
        "verdict_key": f"{name}{device}",
        "timing": {"speedup": speedup},
        **more,
    }


def rows(*of: dict) -> pl.DataFrame:
    return pl.DataFrame(list(of), infer_schema_length=None)


def test_each_candidate_has_one_row_for_each_gpu():
    first = rows(verdict("x", device=A), verdict("y", "compile_error"))
    second = rows(
        verdict("x", device=B, speedup=3.0), verdict("y", device=B), verdict("z", device=B)
    )
    found = merged({"one": first, "two": second, "again": first})
    assert found.select("candidate_id", "device", "status").rows() == [
        ("x", A, "correct"),
        ("y", A, "compile_error"),  # never on a device: that of its set
        ("x", B, "correct"),
        ("y", B, "correct"),
        ("z", B, "correct"),
    ]
    assert found.columns == first.columns
    again = merged({"merged": found, "two": second})
    assert again.rows() == found.rows()


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ([[verdict("x", device=A)], [verdict("x", "incorrect", A)]],
         "candidate x has two verdicts on NVIDIA A100: status correct in s0, incorrect in s1"),
        ([[verdict("x", device=A)], [verdict("x", device=A, speedup=2.5)]],
         "speedup 2.0 in s0, speedup 2.5 in s1"),
        ([[verdict("x", device=A)], [verdict("x", device=A, verdict_key="other")]],
         "verdict_key xNVIDIA A100 in s0"),
        ([[verdict("x", device=A, code="1")], [verdict("x", device=B, code="2")]],
         "candidate x stands for two candidates: code 1 in s0, code 2 in s1"),
        ([[verdict("x", "compile_error")], [verdict("x", device=B)]],
         "s0 has verdicts without a device and names no GPU"),
        ([[verdict("x", device=A), verdict("y", device=B), verdict("z", "compile_error")]],
         "s0 has verdicts without a device and names 2 GPUs"),
        ([[{"candidate_id": "x"}]], "s0 has no column status"),
    ],
)  # fmt: skip
def test_conflicts_name_the_candidate_the_gpu_and_the_sets(sets, says):
    says = says.replace(", incorrect in s1", ", status incorrect in s1")
    with pytest.raises(UsageError, match=re.escape(says)):
        merged({f"s{n}": rows(*each) for n, each in enumerate(sets)})


def test_the_command_merges_and_counts_by_gpu(tmp_path):
    texts = {"code": "x", "generator": "m", "sample_index": 0}
    paths = []
    for device in (A, B):
        paths.append(tmp_path / f"{device}.parquet")
        rows(verdict("x", device=device, **texts)).write_parquet(paths[-1])
    out = tmp_path / "all.parquet"
    asked = ["export", *map(str, paths), "--as", "table", "--out", str(out)]
    done = CliRunner().invoke(main, [*asked, "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["devices"] == [[A, "correct", 1], [B, "correct", 1]] and told["candidates"] == 1
    assert pl.read_parquet(out)["generator"].to_list() == ["m", "m"]
    assert A in CliRunner().invoke(main, asked).stdout
    scored = ["benchmark", "--verdicts", str(out), "--json"]
    assert "choose one with --device" in CliRunner().invoke(main, scored).stderr
    done = CliRunner().invoke(main, [*scored, "--device", B])
    assert done.exit_code == 0 and json.loads(done.stdout)["scores"], done.output
    rows(verdict("x", "incorrect", B, **texts)).write_parquet(paths[0])
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 2 and "has two verdicts on NVIDIA H100" in done.stderr
    done = CliRunner().invoke(main, [*asked[:3], "--as", "sol", "--out", str(tmp_path / "no")])
    assert done.exit_code == 2 and "takes one SOURCE" in done.stderr


def test_curation_may_demand_correct_on_every_gpu_that_judged(tmp_path):
    both, one, unjudged = "both", "one", "unjudged"
    told = [
        *(verdict(both, device=device) for device in (A, B)),
        *(verdict(one, *said) for said in (("correct", A), ("incorrect", B))),
        *(verdict(unjudged, *said) for said in (("task_error", A), ("correct", B))),
    ]
    extra = {"generator": "m", "sample_index": 0, "reasoning_tokens": 9, "reasoning": "r"}
    operators = {"reference_operators": ["aten.add"], "schema_version": 2}
    table = rows(*({**row, **extra, **operators} for row in told))
    table.write_parquet(tmp_path / "all.parquet")
    frame = Source(str(tmp_path / "all.parquet"), None, ".").deciding()
    assert frame["candidate_id"].to_list() == [both, one, unjudged]

    def sure(**config):
        pool = eligible_samples(frame, CurationConfig(**config))
        return set(pool.filter(pl.col("_unmet").is_null())["candidate_id"])

    assert sure() == {both, one}
    assert sure(require_correct_on_every_gpu=True) == {both}
    plain = frame.drop("correct_on_every_gpu")
    strict = CurationConfig(require_correct_on_every_gpu=True)
    assert eligible_samples(plain, strict)["_unmet"].null_count() == 2
    assert "require_correct_on_every_gpu" not in CurationConfig().model_dump()
