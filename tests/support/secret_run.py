"""Run as a program whose environment holds secrets: a refresh with Prefect and a run in MLflow, as
`concur run` does them."""

from __future__ import annotations

import os
import sys

from flows.config import load_profile
from flows.refresh import Refreshed, refresh_dataset
from flows.track import analysis_records, verification_record
from tasks.tracking.mlflow_sink import log_run
from tasks.tracking.records import DatasetRef, RunRecord, StageRecord


def main() -> None:
    root, endpoint = sys.argv[1:]
    wanted = (
        f"root={root}",
        "tasks.limit=1",
        "synthesis.sampler=openai",
        f"synthesis.base_url={endpoint}",
        "synthesis.model=m",
    )
    more = (
        "synthesis.samples_per_task=4",
        "verification.workers=1",
        "verification.eval.timing.max_s=0.2",
        "curation.min_speedup=0.01",
    )
    config = load_profile("local", (*wanted, *more))
    refreshed: Refreshed = refresh_dataset(config)
    curated = refreshed.curated.open()
    record = RunRecord(
        run_fingerprint=curated.fingerprint,
        run_name="secrets",
        params=config.model_dump(mode="json"),
        stages=(
            StageRecord(name="synthesis", params=config.synthesis.model_dump(mode="json")),
            verification_record(config, refreshed.verdicts),
            *analysis_records(config, refreshed),
        ),
        datasets=(
            DatasetRef(
                "candidates",
                str(refreshed.candidates.open().path),
                refreshed.candidates.fingerprint,
            ),
        ),
    )
    log_run(
        record,
        tracking_uri=os.environ["MLFLOW_TRACKING_URI"],
        artifact_root=None,
        experiment="concur",
    )
    print("rows", refreshed.verdicts.open().manifest["rows"])


if __name__ == "__main__":
    main()
