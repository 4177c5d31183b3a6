"""A night that is cancelled in the Prefect UI, or killed, in each stage in turn: nothing is left
running, nothing is lost, nothing twice.

One root, one deployment, one process worker. Each test starts the same run, waits until it is in
its stage and stops it; the last lets the run end. The tests of one stage therefore also show that
what was stopped before goes on.
"""

import os
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import yaml

from tests.support.chat_server import Server, serving
from tests.support.night import ENDED, ROOT, Night, Watched, night, worker
from tests.support.recordings import Recordings, rows_there, written
from tests.support.vllm_servers import FAKE
from tests.support.waiting import until

GONE_S = 30.0
"""What is promised: so long after the button, no process of the run is left."""
STAGE_S = 900.0
CONFIG = yaml.safe_load((ROOT / "tests/data/cancelled_line.yaml").read_text(encoding="utf-8"))
SAMPLES, TASKS = CONFIG["synthesis"]["samples_per_task"], CONFIG["tasks"]["limit"]
ANSWERED_FIRST = 2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Endpoint(Recordings):
    """Answers with the bundled recordings; while `held`, only the first few."""

    def __call__(self, number, body):
        if number >= ANSWERED_FIRST and not self.open.is_set():
            self.open.wait(600)
            return 503, {}  # who asked may be gone by now, and would not have had the answer
        return self.recorded(body)


class Line(NamedTuple):
    night: Night
    worker: Watched
    endpoint: Endpoint
    server: Server
    root: Path
    deployment: str
    config: dict[str, Any]

    def unfinished(self, stage):
        return [
            path
            for path in self.root.glob(f"{stage}/*")
            if path.is_dir() and not (path / "manifest.json").exists()
        ]

    def finished(self, stage):
        return [path.parent for path in self.root.glob(f"{stage}/*/manifest.json")]


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    home = tmp_path_factory.mktemp("cancel")
    endpoint, root = Endpoint(), home / "root"
    with (
        serving(endpoint) as server,
        night(
            home,
            CONCUR_CACHE=str(home / "cache"),
            OMP_NUM_THREADS="1",
            HF_HUB_OFFLINE="1",
            OPENAI_API_KEY="none",
        ) as stack,
        worker(stack) as watched,
    ):
        config = dict(CONFIG, root=str(root))
        config["synthesis"] = CONFIG["synthesis"] | {"base_url": server.url}
        deployment = stack.deployment(
            "line", "concur line", "flows.pipeline.concur_line", parameters={"config": config}
        )
        try:
            yield Line(stack, watched, endpoint, server, root, deployment, config)
        finally:
            endpoint.open.set()


def some(line, name):
    for process in line.worker.left():
        with suppress(psutil.Error):
            if process.name() == name:
                return True
    return False


IN = {
    "workloads": lambda line: line.unfinished("workloads"),
    "synthesis": (
        lambda line: (
            line.unfinished("synthesis")
            and len(line.server.bodies) > ANSWERED_FIRST
            and line.endpoint.answered
        )
    ),
    "verification": lambda line: line.unfinished("verification") and some(line, "cc1plus"),
    "training": (
        lambda line: (
            line.unfinished("training")
            and list(line.root.glob("training/*/checkpoint*"))
            and some(line, "ray::_events")
        )
    ),
    "benchmark": (
        lambda line: (
            line.finished("training")
            and (line.unfinished("synthesis") or line.unfinished("verification"))
        )
    ),
}
ORDER = [
    ("workloads", "cancel"),
    ("synthesis", "cancel"),
    ("synthesis", "kill"),
    ("verification", "cancel"),
    ("verification", "kill"),
    ("training", "cancel"),
    ("training", "kill"),
    ("benchmark", "cancel"),
]


@pytest.mark.parametrize("stage, how", ORDER, ids=lambda value: value)
def test_a_run_that_is_stopped_leaves_nothing_running(line, stage, how, record_property):
    if stage not in ("workloads", "synthesis"):
        line.endpoint.open.set()
    asked = len(line.server.bodies)
    run = line.night.start(line.deployment)

    def there():
        state = line.night.state(run)
        assert state["type"] not in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"), state
        began = (
            stage != "synthesis" or len(line.server.bodies) > asked
        )  # what an earlier run has left is no sign of this one
        return state["type"] == "RUNNING" and began and bool(IN[stage](line))

    until(there, f"a run in {stage}", STAGE_S, every_s=0.1)
    before = rows_there(line.root)
    stopped(line, run, how, record_property, stage)
    assert before.keys() <= rows_there(line.root).keys()


def gone(worker):
    """Wait until nothing is left of its runs."""
    until(lambda: not worker.left(), lambda: f"the end of {worker.names()}", GONE_S, every_s=0.1)


def stopped(line, run, how, record_property, stage):
    """Stop a run, and wait until nothing of it is left."""
    began = time.monotonic()
    if how == "cancel":
        line.night.set_state(run, "CANCELLING", "Cancelling")
    else:
        engine = next(
            child
            for child in psutil.Process(line.worker.worker.pid).children()
            if "prefect.engine" in child.cmdline()
        )
        os.kill(engine.pid, signal.SIGKILL)
    gone(line.worker)
    took_s = time.monotonic() - began
    record_property("seconds_until_gone", round(took_s, 1))
    print(f"{stage} {how}: no process left after {took_s:.1f} s")
    state = line.night.ended(run, 60)
    assert state["type"] == ("CANCELLED" if how == "cancel" else "CRASHED"), state


@pytest.mark.parametrize("how", ["cancel", "kill"])
def test_servers_of_ours_are_gone_with_the_run(line, how, tmp_path, record_property):
    """vLLM's stand-in holds every answer, and its engine is a process of a session of its own that
    ignores SIGTERM."""
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "hold").touch()
    server = {"command": f"env FAKE_VLLM_DIR={fake} {FAKE}"}
    synthesis = {
        "sampler": "vllm",
        "model": "served",
        "tokenizer": "small",
        "samples_per_task": SAMPLES,
        "server": server,
    }
    config = line.config | {"root": str(tmp_path / "root"), "synthesis": synthesis}
    run = line.night.start(line.deployment, config=config)
    until((fake / "starts.jsonl").exists, "a server", STAGE_S)
    stopped(line, run, how, record_property, "vllm")
    (fake / "hold").unlink()
    again = line.night.start(line.deployment, config=config)
    until(lambda: list(tmp_path.glob("root/synthesis/*/manifest.json")), "all answers", STAGE_S)
    snapshot = next(tmp_path.glob("root/synthesis/*/manifest.json")).parent
    keys = [row["request_key"] for row in written(snapshot, ["request_key"])]
    assert len(keys) == len(set(keys)) == TASKS * SAMPLES
    if line.night.state(again)["type"] not in ENDED:
        line.night.set_state(again, "CANCELLING", "Cancelling")
    line.night.ended(again, 120)
    gone(line.worker)


def test_the_same_run_again_completes_with_no_row_lost_or_twice(line):
    line.endpoint.open.set()
    state = line.night.ended(line.night.start(line.deployment), STAGE_S)
    assert state["type"] == "COMPLETED", state
    gone(line.worker)
    wanted = {
        "synthesis": "candidate_id",
        "verification": "candidate_id",
        "workloads": "task_id",
        "curation": "candidate_id",
    }
    for stage, key in wanted.items():
        for snapshot in line.finished(stage):
            rows = [row[key] for row in written(snapshot, [key])]
            assert rows and max(Counter(rows).values()) == 1, (stage, Counter(rows).most_common(3))
            assert not [*snapshot.glob(".*.tmp"), *snapshot.glob(".journal-*")]
        assert line.finished(stage) and not line.unfinished(stage)
    steps = [row["step"] for row in written(line.finished("training")[0], ["step"])]
    assert max(Counter(steps).values()) == 1 and sorted(steps) == list(
        range(min(steps), max(steps) + 1)
    )
    asked = line.endpoint.answered
    assert len(asked) == TASKS * SAMPLES
    assert set(asked.values()) == {1}, "what was answered once is never asked for again"
