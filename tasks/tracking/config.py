"""Where results are compared, and addresses of MLflow's pages."""

from __future__ import annotations

from urllib.parse import urlencode

from kernels_eval.records import Record

PARENTS = "tags.`profile` LIKE '%'"
"""MLflow's query of runs that are compared: their children, stages, have no profile."""


class TrackingConfig(Record):
    """MLflow. A tracking server that is down never stops or fails a run."""

    enabled: bool = True
    """write runs to MLflow"""
    uri: str | None = None
    """tracking URI; default: $MLFLOW_TRACKING_URI, else SQLite in the root"""
    experiment: str = "concur"
    """MLflow experiment that holds the runs"""


def page_of(served: str, experiment: str, place: str, view: str = "") -> str:
    """The address of a page of an experiment in MLflow. `place` is `runs`, `runs/ID` or
    `runs/ID/artifacts/FILE`; `view` is `scores`, or an ablation's run: its branches. Without the
    workflow MLflow opens its pages for traces."""
    path = "/".join((served.rstrip("/"), "#/experiments", experiment, place))
    query = {"workflowType": "machine_learning"}
    if view:
        query |= {"viewStateShareKey": view, "compareRunsMode": "CHART"}
    return f"{path}?{urlencode(query)}"
