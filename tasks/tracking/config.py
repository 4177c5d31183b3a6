"""Where results are compared, and the addresses of MLflow's pages."""

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


def page_of(served: str, experiment: str = "", place: str = "", view: str = "") -> str:
    """The address of MLflow's list of experiments, or of a page of one (`runs`, `runs/ID`,
    `runs/ID/artifacts/FILE`), as its pages of training show it: without `workflowType` MLflow opens
    the page of GenAI traces, and no setting changes that. `view` is one of
    `tasks.tracking.connection.VIEWS`."""
    path = "/".join(filter(None, (served.rstrip("/"), "#/experiments", experiment, place)))
    return f"{path}?workflowType=machine_learning" + (f"&viewStateShareKey={view}" if view else "")
