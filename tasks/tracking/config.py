"""Where results are compared."""

from __future__ import annotations

from kernels_eval.records import Record


class TrackingConfig(Record):
    """MLflow. A tracking server that is down never stops or fails a run."""

    enabled: bool = True
    """write runs to MLflow"""
    uri: str | None = None
    """tracking URI; default: $MLFLOW_TRACKING_URI, else SQLite in the root"""
    experiment: str = "concur"
    """MLflow experiment that holds the runs"""
