"""Write runs to MLflow, each once: pipeline runs with their stages, and ablations with branches as
they end.

Guarantees: tags identify runs, so replays change nothing; killed attempts never look finished, and
are deleted once the run is whole. Two processes that write one run at once delete each other's.
MLflow's errors pass through: see `try_mlflow`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tasks.tracking import writing
from tasks.tracking.config import page_of
from tasks.tracking.connection import Destination, branches_of, view_tag
from tasks.tracking.records import RunRecord, StageRecord

BRANCH_TAG = "concur.branch"


def log_run(record: RunRecord, to: Destination) -> str:
    """Write a run unless a finished one has its fingerprint; return its id.

    Raises UsageError for missing paths, and what `Destination.connected` raises.
    """
    with to.connected() as runs:
        return _write_once(runs, record, {writing.FINGERPRINT_TAG: record.run_fingerprint})


def registered_version(run_id: str, to: Destination) -> str | None:
    """`NAME/VERSION` of the registered model of a run's adapter, or None. Raises what MLflow
    raises."""
    with to.connected() as runs:
        version: str | None = runs.client.get_run(run_id).data.tags.get(writing.VERSION_TAG)
        return version


def _write_once(runs: writing.Runs, record: RunRecord, identity: Mapping[str, str]) -> str:
    """Write a run unless a finished one has its tags; then delete the others and register its
    adapter."""
    attempts = {str(run.info.run_id): run for run in runs.tagged(identity)}
    written = next(
        (
            run_id
            for run_id, run in attempts.items()
            if run.info.status == "FINISHED"
            and run.data.tags.get(writing.FINGERPRINT_TAG) == record.run_fingerprint
        ),
        None,
    )
    if written is None:
        writing.require_paths(record)
        own = {**identity, writing.FINGERPRINT_TAG: record.run_fingerprint}
        written = runs.write(record, own, "FAILED" if record.error else "FINISHED")
    for run_id in attempts.keys() - {written}:
        runs.delete(run_id)
    runs.register(written, record)
    return written


class AblationSink:
    """An ablation's parent run and its children, for use from one thread."""

    def __init__(self, to: Destination) -> None:
        self._to = to
        self.experiment_id = self.run_id = ""

    def open(self, record: RunRecord) -> str:
        """The parent's id, new or an earlier call's, which runs again. Writes name, tags and params
        of `record`. Raises what MLflow raises."""
        with self._to.connected() as runs:
            self.experiment_id = runs.experiment_id
            own = {writing.FINGERPRINT_TAG: record.run_fingerprint}
            known: Mapping[str, str] = {}
            if earlier := runs.tagged(own):
                self.run_id, known = earlier[0].info.run_id, earlier[0].data.params
                runs.client.update_run(self.run_id, status="RUNNING")
            else:
                tags = {writing.key_of(key): text for key, text in record.tags.items()}
                self.run_id = runs.start(record.name, tags | own | {writing.KIND_TAG: "ablation"})
            # under the run's id: what opens the charts of its branches
            for key, text in view_tag(self.run_id, branches_of(self.run_id)).items():
                runs.client.set_experiment_tag(self.experiment_id, key, text)
            # some are missing where an earlier call died on its way; MLflow refuses another value
            missing = [key for key in record.params if writing.key_of(key) not in known]
            runs.values(self.run_id, {key: record.params[key] for key in missing})
            return self.run_id

    def child(self, branch: str, record: RunRecord) -> str:
        """Write a branch once; return the child's id. A branch with an error ends FAILED, and is
        replaced when it runs again. Raises UsageError for missing files, and what MLflow raises."""
        tags = record.tags | {writing.KIND_TAG: "branch"}
        if record.error:
            tags["concur.error"] = record.error
        record = record.model_copy(update={"tags": tags})
        with self._to.connected() as runs:
            identity = {writing.PARENT_TAG: self.run_id, BRANCH_TAG: branch}
            return _write_once(runs, record, identity)

    def close(self, record: StageRecord) -> None:
        """End the parent with its summary. Written values stay; files and tables are replaced,
        since earlier calls knew fewer branches."""
        with self._to.connected() as runs:
            known = runs.client.get_run(self.run_id).data.metrics
            changed = {
                name: value for name, value in record.metrics.items() if known.get(name) != value
            }
            runs.values(self.run_id, metrics=changed, tags=record.tags)
            runs.add_points(self.run_id, record.series)
            runs.files(self.run_id, record.artifacts)
            runs.tables(self.run_id, record.tables)
            runs.client.set_terminated(self.run_id, "FINISHED")

    def url(self, run_id: str) -> str | None:
        uri = self._to.tracking_uri
        if not uri.startswith(("http://", "https://")) or not self.experiment_id:
            return None
        return page_of(uri, self.experiment_id, f"runs/{run_id}")
