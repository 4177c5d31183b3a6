"""Compare what two checkouts make of the same data: verdicts, training sets, scores, reports.

    python -m tests.support.same_results --before DIR --after DIR --root ROOT [--fresh ROOT]

`ROOT` is a finished root (`concur run --profile local`) written by the checkout before; it is
copied, never changed. Both checkouts curate with every strategy, analyse, score and run a small
ablation on its verdicts, through their `concur` command. `--fresh` is a root that the checkout
after filled by itself: its verdicts are compared with those of `ROOT`, candidate by candidate, and
the shape and the scores of its report with those of `ROOT`'s. Exits with 1 at any difference.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

ABLATION = ("ablate", "--strategies", "concur,random", "--seeds", "0")
# What differs from run to run by its nature: times, places, identities of runs.
VOLATILE = (
    "seconds",
    "_s",
    "elapsed",
    "path",
    "out",
    "page",
    "url",
    "snapshot",
    "root",
    "fingerprint",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name in ("--before", "--after", "--root"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--fresh", type=Path)
    parser.add_argument("--skip-ablation", action="store_true")
    asked = parser.parse_args()
    differences = list(compared(asked))
    print("\n".join(differences) if differences else "the same")
    return 1 if differences else 0


def compared(asked: argparse.Namespace) -> Iterator[str]:
    """Yield one line a difference."""
    with tempfile.TemporaryDirectory() as scratch:
        results = [
            results_of(checkout.resolve(), asked.root.resolve(), Path(scratch) / name, asked)
            for name, checkout in (("before", asked.before), ("after", asked.after))
        ]
    for name, before in results[0].items():
        yield from (f"{name}: {line}" for line in differences_of(before, results[1][name]))
    if asked.fresh:
        yield from compared_verdicts(asked.root, asked.fresh)


def results_of(
    checkout: Path, root: Path, scratch: Path, asked: argparse.Namespace
) -> dict[str, Any]:
    """What one checkout says of a copy of the root, by the name of the question."""
    shutil.copytree(root, scratch / "root", symlinks=True)
    verdicts = largest(scratch / "root", "verification")

    def concur(*words: str) -> Any:
        command = [sys.executable, "-m", "flows.cli", *words]
        done = subprocess.run(
            command,
            cwd=scratch,
            env=os.environ | {"PYTHONPATH": str(checkout)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{checkout.name}: {' '.join(words)}: {done.stderr[-2000:]}")
        return json.loads(done.stdout.replace(str(scratch), "."))

    place = ("--root", "root", "--verdicts", str(verdicts))
    found = {
        "curate": concur("curate", *place, "--strategy", "all", "--out", "sets", "--json"),
        "analyze": concur("analyze", *place, "--out", "analysis", "--json"),
        "benchmark": concur("benchmark", *place, "--resamples", "500", "--json"),
        "rows": {
            str(file.relative_to(scratch / "sets")): pl.read_parquet(file)["candidate_id"].to_list()
            for file in sorted((scratch / "sets").rglob("*.parquet"))
        },
    }
    if not asked.skip_ablation:
        found["ablate"] = concur(
            *ABLATION, "--set", "root=root", "--verdicts", verdicts.name, "--json"
        )
    return found


def largest(root: Path, stage: str) -> Path:
    """The finished snapshot of a stage with the most rows."""
    manifests = (root / stage).glob("*/manifest.json")
    return max(manifests, key=lambda file: json.loads(file.read_text())["rows"]).parent


def differences_of(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Walk two JSON values. What only the newer one holds is no difference."""
    if path.rpartition(".")[2].endswith(VOLATILE):
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            if key in after:
                yield from differences_of(value, after[key], f"{path}.{key}")
            elif not key.endswith(VOLATILE):
                yield f"{path}.{key} is gone"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from differences_of(*pair, f"{path}[{index}]")
    elif before != after:
        yield f"{path}: {str(before)[:200]} is now {str(after)[:200]}"


def compared_verdicts(before: Path, after: Path) -> Iterator[str]:
    """Verdicts of the same candidates in two roots, and the models' scores in their reports."""
    tables = [
        pl.read_parquet(largest(root, "verification") / "part-*.parquet").select(
            "candidate_id", "task_id", "status", "reason"
        )
        for root in (before, after)
    ]
    joined = tables[0].join(tables[1], on="candidate_id", how="full", suffix="_after")
    for row in joined.iter_rows(named=True):
        if (row["status"], row["reason"]) != (row["status_after"], row["reason_after"]):
            yield f"verdict {row}"
    pages = [
        json.loads(next((largest(root, "benchmark") / "report").glob("*.json")).read_text())
        for root in (before, after)
    ]
    yield from (f"report: {key} is gone" for key in sorted(keys_of(pages[0]) - keys_of(pages[1])))


def keys_of(value: Any, path: str = "") -> set[str]:
    """Every path of keys in a JSON value, positions in lists left out."""
    if isinstance(value, dict):
        return {path}.union(*(keys_of(inner, f"{path}.{key}") for key, inner in value.items()))
    if isinstance(value, list):
        return {path}.union(*(keys_of(inner, f"{path}[]") for inner in value))
    return {path}


if __name__ == "__main__":
    sys.exit(main())
