"""An ablation from a terminal: an embedded Prefect, progress and a final table."""

from __future__ import annotations

import time

from flows.ablation.plan import AblationConfig
from flows.config import PipelineConfig
from flows.launch import embed, start_server_apart
from flows.runtime.terminal import ProgressRows
from kernels_eval.records import Json
from tasks.progress import observed_by


def run_ablation(config: AblationConfig, pipeline: PipelineConfig) -> Json:
    """Run the flow in this process; returns the table's plain data. Raises what the flow raises; an
    interrupt ends the local Ray first, so that no training continues."""
    embed(pipeline)  # before prefect is imported
    started = time.monotonic()
    start_server_apart()
    from flows.ablation.flow import ablate

    progress = AblationProgress(width=28)
    try:
        with progress, observed_by(progress):
            result = ablate(config)
    except KeyboardInterrupt:
        import ray

        ray.shutdown()
        raise
    data = result.model_dump(mode="json")
    ablation = data.pop("ablation")
    return data | {
        **{name: ablation[name] for name in ("name", "fingerprint", "branches", "cautions")},
        "complete": result.complete,
        "seconds": round(time.monotonic() - started, 1),
        "experiment": pipeline.tracking.experiment,
        "tracking_uri": pipeline.tracking_uri,
    }


SHARED = "shared"
"""The row of shared work."""


class AblationProgress(ProgressRows):
    """An observer (tasks.progress) that shows each branch's progress on stderr, and a line when it
    ends."""

    def __call__(self, stage: str, done: int, total: int, note: str) -> None:
        from flows.ablation.branches import BRANCH, ENDED

        if stage == ENDED:
            self.say(f"{ENDED} {done}/{total}  {note}")
        else:
            self.update(BRANCH.get() or SHARED, done, total, note, stage)
