"""Run as a program against a Prefect and an MLflow server: shows hostile text in every way that our
flows show something there.

Prints one JSON object: the ids of what was made. `raw_*` are what our edge would escape, unescaped:
what the user interfaces do with it.
"""

import json
import sys
from pathlib import Path

import polars as pl
from prefect import flow
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from kernels_eval.errors import UsageError
from tasks.benchmark.report.content import summary_table
from tasks.benchmark.report.files import build_report, to_markdown
from tasks.decontamination.decontamination import Decontaminated, removed_frame
from tasks.reporting.text import as_text, cells
from tasks.tracking.connection import Destination
from tasks.tracking.mlflow_sink import log_run
from tasks.tracking.records import RunRecord, StageRecord
from tests.support.hostile_ablation import hostile_comparison
from tests.support.hostile_report import hostile_report
from tests.support.payloads import HOSTILE, LINES


@flow(name="refresh the data set", flow_run_name="refresh {name}")
def hostile_refresh(name: str, comparison: str) -> dict[str, str]:
    """What `flows.refresh`, `flows.pipeline` and `flows.ablation.flow` show, made by the same
    functions of hostile records."""
    report, frame = hostile_report(), removed_frame([])
    rows = [
        {column: HOSTILE if frame.schema[column] == pl.String else 1.0 for column in frame.columns}
        | {"level": "exact"}
    ]
    known = Decontaminated(
        ("kept",), pl.DataFrame(rows, schema=frame.schema), ("exact",), (HOSTILE,)
    )
    made = {
        "report": create_markdown_artifact(key="report", markdown=to_markdown(report)),
        "comparison": create_markdown_artifact(key="comparison", markdown=comparison),
        "decontamination": create_markdown_artifact(
            key="decontamination", markdown=known.markdown()
        ),
        "caution": create_markdown_artifact(key="observations", markdown=as_text(LINES)),
        "summary": create_table_artifact(
            key="summary",
            table=cells({"what": name, "value": value} for name, value in summary_table(report)),
        ),
        "table": create_table_artifact(
            key="refresh", table=cells([{"snapshot": HOSTILE, "counts": LINES, HOSTILE: HOSTILE}])
        ),
        "raw_table": create_table_artifact(key="raw-table", table=[{"raw": HOSTILE}]),
        "raw_markdown": create_markdown_artifact(key="raw", markdown=LINES),
    }
    get_run_logger().error("%s", HOSTILE)
    return {what: str(one) for what, one in made.items()} | {"run": str(flow_run.id)}


@flow(name="fails", flow_run_name="train {name}")
def hostile_failure(name: str) -> None:
    raise UsageError(HOSTILE, LINES)


def track(folder, uri):
    report = hostile_report()
    files = {
        "report.html": build_report(report),
        "report.md": to_markdown(report),
        "raw.html": LINES,
        "raw.md": LINES,
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    record = RunRecord(
        run_fingerprint="hostile",
        name=HOSTILE,
        tags={"strategy": HOSTILE, "mlflow.note.content": as_text(LINES)},
        params={"tasks": {"location": HOSTILE}, "model": HOSTILE},
        metrics={"curated": 1.0},
        stages=(StageRecord(name=HOSTILE, tables={"errors": ({"error": HOSTILE, "count": 1},)}),),
        artifacts=tuple(folder / name for name in files),
    )
    return log_run(record, Destination(uri, str(folder), "concur"))


def main():
    folder, uri = Path(sys.argv[1]), sys.argv[2]
    made = hostile_refresh(
        HOSTILE, hostile_comparison(folder / "ablation").markdown.read_text(encoding="utf-8")
    )
    failed = hostile_failure(HOSTILE, return_state=True)
    print(
        json.dumps(
            made | {"failed": str(failed.state_details.flow_run_id), "mlflow": track(folder, uri)}
        )
    )


if __name__ == "__main__":
    main()
