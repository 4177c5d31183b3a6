"""Where results are compared."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TrackingConfig(BaseModel):
    """MLflow. Off the line: a tracking server that is down never stops or fails a run.

    Attributes:
        enabled: write runs to MLflow
        experiment: MLflow experiment that holds the runs
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = True
    uri: str | None = Field(
        default=None,
        description="tracking URI; default: $MLFLOW_TRACKING_URI, else SQLite in the root",
    )
    experiment: str = "concur"
