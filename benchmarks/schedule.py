"""A schedule that fires every minute, against the stack of `concur up`: does the second refresh
reuse the first's snapshots?

    python -m benchmarks.schedule --root /abs/root [--tasks 2] [--every-s 60] [--runs 2]

Takes the stack that `concur up --root ROOT` started (`eval "$(concur env --root ROOT)"` first) and
its deployment `nightly`, gives the deployment an interval schedule of its own, waits until so many
of its runs have ended one after the other, takes the schedule away again, and what it left waiting.
Prints for each run when it was due, when it began and how long it took, and what the morning report
says. Exit status 1 unless every run completed and all but the first had nothing new.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import Any

ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
SLUG = "every-so-often"
POLL_S = 2.0
PATIENCE_S = 3600.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--root", required=True, help="the root of the stack, absolute; the refreshes go there too"
    )
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--every-s", type=float, default=60.0)
    parser.add_argument("--runs", type=int, default=2)
    asked = parser.parse_args()
    parameters = {
        "run": {
            "profile": "local",
            "root": asked.root,
            "name": f"scheduled {datetime.now(UTC):%H%M%S}",
        },
        "candidates": {"tasks": asked.tasks, "samples_per_task": asked.samples},
        "advanced": {"overrides": ["verification.eval.timing.max_s=0.2"]},
    }
    runs = fired(parameters, asked.every_s, asked.runs)
    from flows.morning.history import before, refreshes
    from flows.morning.report import report_of
    from flows.morning.text import headline

    of_these = [each for each in refreshes(asked.root) if each.name == parameters["run"]["name"]]
    reports = [report_of(each, *before(asked.root, each)) for each in of_these]
    told = [
        {
            "name": run.name,
            "state": run.state_name,
            "due": stamp(run.expected_start_time),
            "began": stamp(run.start_time),
            "late_s": (
                round((run.start_time - run.expected_start_time).total_seconds(), 1)
                if run.start_time
                else None
            ),
            "took_s": round(run.total_run_time.total_seconds(), 1),
        }
        for run in runs
    ]
    data = {
        "runs": told,
        "refreshes": [
            {
                "headline": headline(report),
                "wall_s": report.refresh.seconds,
                "nothing_new": report.nothing_new,
            }
            for report in reports
        ],
        "same_snapshots": (
            len(
                {
                    json.dumps(each.model_dump(mode="json")["snapshots"], sort_keys=True)
                    for each in of_these
                }
            )
            == 1
        ),
    }
    print(json.dumps(data, indent=2))
    fine = all(run.state_name == "Completed" for run in runs) and len(reports) >= asked.runs
    return (
        0
        if fine and data["same_snapshots"] and all(report.nothing_new for report in reports[1:])
        else 1
    )


def fired(parameters: dict[str, Any], every_s: float, wanted: int) -> list[Any]:
    """The first so many runs that the schedule started, ended, oldest first."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.client.schemas.schedules import IntervalSchedule

    began = datetime.now(UTC)
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("nightly refresh/nightly")
        kept = {
            "name": SLUG,
            "schedule": IntervalSchedule(interval=timedelta(seconds=every_s), anchor_date=began),
        }
        schedule = create(client, deployment.id, kept["schedule"], parameters)
        mine = FlowRunFilter.model_validate(
            {"deployment_id": {"any_": [deployment.id]}, "expected_start_time": {"after_": began}}
        )
        try:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                runs = sorted(
                    client.read_flow_runs(flow_run_filter=mine, limit=200),
                    key=lambda run: run.expected_start_time,
                )
                ended = [run for run in runs if run.state_type and run.state_type.value in ENDED]
                if len(ended) >= wanted:
                    return ended[:wanted]
                if time.monotonic() > deadline:
                    raise SystemExit(f"only {len(ended)} runs ended in {PATIENCE_S:.0f} s")
                time.sleep(POLL_S)
        finally:
            client.delete_deployment_schedule(deployment.id, schedule)
            for run in client.read_flow_runs(flow_run_filter=mine, limit=200):
                if run.state_type and run.state_type.value in ("SCHEDULED", "PENDING"):
                    client.delete_flow_run(run.id)


def create(client: Any, deployment: Any, schedule: Any, parameters: dict[str, Any]) -> Any:
    """The id of a new active schedule with parameters of its own."""
    body = [
        {
            "schedule": schedule.model_dump(mode="json"),
            "active": True,
            "parameters": parameters,
            "slug": SLUG,
        }
    ]
    made = (
        client.request(
            "POST", "/deployments/{id}/schedules", path_params={"id": deployment}, json=body
        )
        .raise_for_status()
        .json()
    )
    from uuid import UUID

    return UUID(made[0]["id"])


def stamp(moment: datetime | None) -> str | None:
    return moment.astimezone(UTC).strftime("%H:%M:%S") if moment else None


if __name__ == "__main__":
    sys.exit(main())
