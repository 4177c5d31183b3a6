"""Run as a program whose environment holds secrets: a refresh with Prefect and a run in MLflow, as
`concur run` does them."""

import os
import sys

from flows.config import load_profile
from flows.track import refresh_and_track
from tasks.tracking.connection import Destination
from tasks.tracking.mlflow_sink import log_run
from tasks.tracking.records import DatasetRef, RunRecord, StageRecord
from tasks.tracking.stages import analysis_record, verification_record


def main():
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
    refreshed, _ = refresh_and_track(config)
    curated = refreshed.curated.open()
    record = RunRecord(
        run_fingerprint=curated.fingerprint,
        name="secrets",
        params=config,
        stages=(
            StageRecord(name="synthesis", params=config.synthesis),
            verification_record(config.verification, refreshed.verdicts),
            *([analysis_record(found)] if (found := refreshed.analysis) else []),
        ),
        datasets=(
            DatasetRef(
                "candidates",
                str(refreshed.candidates.open().path),
                refreshed.candidates.fingerprint,
            ),
        ),
    )
    log_run(record, Destination(os.environ["MLFLOW_TRACKING_URI"], config.root, "concur"))
    print("rows", refreshed.verdicts.open().manifest["rows"])


if __name__ == "__main__":
    main()
