"""What flagging traces costs a refresh: seconds, processor time and peak memory of the stage on as
many samples as a night has.

    python -m benchmarks.trace_flags --responses qwq32b_candidates.parquet --rows 90810 [--correct
    0.5] [--dir SCRATCH]

Samples are the recorded responses, again and again, as finished snapshots of verdicts and
candidates; --correct is the share that a verdict calls correct, which are the ones that are
measured. The stage runs in a process of its own; then once more with one sample in a hundred new,
which is what a later night pays. The seconds include reading the texts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.store.snapshot import Snapshot, SnapshotRef
from tasks.tables import CANDIDATES, VERDICTS

NEW_SHARE = 0.01


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--responses", required=True, help="Parquet with a column `response`")
    parser.add_argument("--rows", type=int, default=90_810)
    parser.add_argument(
        "--correct", type=float, default=1.0, help="share of the samples that are correct"
    )
    parser.add_argument(
        "--dir", help="where the snapshots go and go away again  [default: a temporary directory]"
    )
    parser.add_argument("--one", nargs=2, metavar=("ROOT", "NAME"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(*arguments.one)))
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.dir) as root:
        new = max(1, int(arguments.rows * NEW_SHARE))
        for name, first in (("first", 0), ("later", new)):
            plant(
                root,
                name,
                arguments.responses,
                range(first, first + arguments.rows),
                arguments.correct,
            )
            command = [
                sys.executable,
                "-m",
                "benchmarks.trace_flags",
                "--responses",
                "",
                "--one",
                root,
                name,
            ]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            print(
                json.dumps(
                    {
                        "night": name,
                        "rows": arguments.rows,
                        "cpus": os.cpu_count(),
                        **json.loads(done.stdout),
                    }
                ),
                flush=True,
            )
    return 0


def plant(root: str, name: str, responses: str, numbers: range, correct: float) -> None:
    """Finished verdicts and candidates; a sample has the same id and text in every night that it is
    in."""
    import polars as pl

    texts = pl.read_parquet(responses, columns=["response"])["response"].to_list()

    def rows() -> Iterator[dict[str, Any]]:
        for number in numbers:
            right = (number * 7919) % 1000 < 1000 * correct
            ids = {
                "candidate_id": f"{number:032d}",
                "task_id": f"t{number // 5}",
                "status": "correct" if right else "incorrect",
            }
            yield ids | {"reasoning": texts[number % len(texts)], "reasoning_tokens": 7000}

    for stage, schema in (("verification", VERDICTS), ("synthesis", CANDIDATES)):
        snapshot = Snapshot(root, stage, name)
        snapshot.append(rows(), schema)
        snapshot.publish(config={}, rows=len(numbers))


def measured(root: str, name: str) -> dict[str, Any]:
    from tasks.curation.config import QualityConfig
    from tasks.curation.flags import run

    verdicts, candidates = (
        SnapshotRef(root=root, stage=stage, fingerprint=name)
        for stage in ("verification", "synthesis")
    )
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    manifest = run(verdicts, candidates, QualityConfig()).open().manifest
    return {
        "wall_s": round(time.perf_counter() - began_s, 1),
        "cpu_s": round(time.process_time() - began_cpu_s, 1),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "snapshot_mib": round(
            sum(path.stat().st_size for path in Path(root, "trace-flags").glob("*/*.parquet"))
            / 2**20,
            1,
        ),
        "load": [round(value, 1) for value in os.getloadavg()],
        "flags": manifest["flag_counts"],
    }


if __name__ == "__main__":
    sys.exit(main())
