"""A refresh by the stack of `concur up`, while one of the stack's parts is killed: it ends
complete, once, and nothing is lost. And when all of the stack is stopped or killed under it: it is
over in Prefect too, and the same run again goes on.

One stack, one deployment, one run for each part, each under a root of its own so that it has all of
its work to do. The process manager alone brings the part back, the run's own process alone copes
with its absence: nothing here helps either.
"""

import os
import shutil
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from kernels_eval.toolchain import default_cache
from tests.support import commands
from tests.support.chat_server import Server, serving
from tests.support.night import ENDED
from tests.support.recordings import Recordings, rows_there, written
from tests.support.stacks import Stack, stack
from tests.support.waiting import until

TASKS, SAMPLES = 6, 2
ALL = TASKS * SAMPLES
ANSWERED_FIRST = 2
HEALTHY_S = 180.0
"""From the kill until `concur status` says healthy. Measured with five times the work that two
cores can do: 17 to 72 s."""
END_S = 900.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Endpoint(Recordings):
    """Answers with the bundled recordings, and counts; while it is not `open`, only the first
    few."""

    def __init__(self):
        super().__init__()
        self.numbers = iter(range(10**9))

    def forget(self, held):
        self.answered.clear()
        self.numbers = iter(range(10**9))
        (self.open.clear if held else self.open.set)()

    def __call__(self, _, body):
        if next(self.numbers) >= ANSWERED_FIRST:
            self.open.wait(600)
        return self.recorded(body)


class Site(NamedTuple):
    stack: Stack
    deployment: str
    endpoint: Endpoint
    server: Server
    cache: Path


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    home = tmp_path_factory.mktemp("killed")
    endpoint, cache = Endpoint(), home / "cache"
    # compiled once for a version of torch: minutes on a busy machine
    if (headers := default_cache() / "headers").is_dir():
        shutil.copytree(headers, cache / "headers", ignore_dangling_symlinks=True)
    told = {
        "CONCUR_CACHE": str(cache),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "OPENAI_API_KEY": "none",
    }
    with serving(endpoint) as server, stack(home / "root", **told) as running:
        try:
            yield Site(running, running.deploy("nightly refresh/nightly"), endpoint, server, cache)
        finally:
            endpoint.open.set()


class Refresh:
    """One run of the deployment, under a root of its own."""

    def __init__(self, site, name, root):
        self.site, self.name, self.root = site, name, root
        self.runs = []
        self.most_engines, self._looked = 0, 0.0

    def start(self):
        # another measurement for each test: MLflow knows a refresh by what it was made of, wherever
        # it lies
        longest_s = 0.2 + int.from_bytes(self.name.encode()) % 997 / 1e5
        overrides = [
            "tasks.source=bundled",
            "synthesis.sampler=openai",
            "synthesis.model=m",
            f"synthesis.base_url={self.site.server.url}",
            "synthesis.tokenizer=small",
            f"verification.eval.timing.max_s={longest_s}",
            "decontamination.enabled=false",
            "tracking.enabled=true",
        ]
        parameters = {
            "run": {"profile": "local", "root": str(self.root), "name": self.name},
            "candidates": {"tasks": TASKS, "samples_per_task": SAMPLES},
            "advanced": {"overrides": overrides},
        }
        self.runs.append(self.site.stack.start(self.site.deployment, **parameters))
        return self.runs[-1]

    def state(self, run):
        """Of a run as the server has it; none while the server is away."""
        if time.monotonic() - self._looked > 1.0:
            self.most_engines = max(self.most_engines, len(self.site.stack.engines()))
            self._looked = time.monotonic()
        with suppress(OSError):
            return self.site.stack.ask(f"flow_runs/{run}")["state"]
        return {"type": ""}

    def ended(self, run):
        def over():
            state = self.state(run)
            return state if state["type"] in ENDED else None

        return until(
            over,
            lambda: (
                f"the end of run {run}: {self.state(run)}\n{self.site.stack.log('worker')[-4000:]}"
            ),
            END_S,
            every_s=0.5,
        )

    def there(self, stage):
        return sum(key[0] == stage for key in rows_there(self.root))


def fresh(site, name, folder, held=False):
    """A refresh that has all of its work to do: builds of the test before would leave it less."""
    shutil.rmtree(site.cache / "extensions", ignore_errors=True)
    site.server.bodies.clear()
    site.endpoint.forget(held=held)
    return Refresh(site, name, folder / "root")


def test_the_example_automations_are_made_by_the_command_of_the_docs(site):
    running = site.stack
    declared = []
    for name in ("free-the-slot", "tell"):
        file = f"deployments/automations/{name}.yaml"
        if name == "tell":  # the worker of `concur up` has made the others
            running.prefect_done("automation", "create", "--from-file", file)
        text = (commands.ROOT / file).read_text(encoding="utf-8")
        declared += [one["name"] for one in yaml.safe_load(text)["automations"]]
    made = running.ask("automations/filter", {})
    assert all(one["enabled"] for one in made)
    assert sorted(one["name"] for one in made) == sorted(declared) and len(made) == 5


WHEN = {
    "synthesis": (
        lambda refresh: (
            refresh.there("synthesis") and len(refresh.site.server.bodies) > ANSWERED_FIRST
        )
    ),
    "verification": lambda refresh: 2 <= refresh.there("verification") <= ALL - 4,
    "tracking": lambda refresh: refresh.site.stack.is_being_tracked(),
}


KILLED = (
    "ray-verification worker-verification prefect-synthesis prefect-verification mlflow-tracking"
)


@pytest.mark.parametrize("case", KILLED.split())
def test_a_refresh_outlives_a_part_that_is_killed(site, case, tmp_path, record_property):
    part, stage = case.split("-")
    refresh = fresh(site, case, tmp_path, held=stage == "synthesis")
    began = time.monotonic()
    run = refresh.start()

    def ready():
        if not WHEN[stage](refresh):
            assert time.monotonic() - began < 5 or refresh.state(run)["type"] not in ENDED, (
                refresh.state(run)
            )
            return False
        return refresh.state(run)["type"] == "RUNNING"

    until(
        ready, lambda: f"a run in {stage}\n{site.stack.log('worker')[-4000:]}", END_S, every_s=0.1
    )
    before, pid = rows_there(refresh.root), site.stack.status()[part]["pid"]
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)

    def healthy_again():
        row = site.stack.status().get(part, {})
        return row.get("health") == "healthy" and row["pid"] != pid

    until(
        healthy_again,
        lambda: f"{part} is healthy again\n{site.stack.log(part)[-2000:]}",
        HEALTHY_S,
        every_s=0.5,
    )
    back = time.monotonic() - killed
    site.endpoint.open.set()
    state = refresh.ended(run)
    took = {
        "healthy_s": round(back, 1),
        "end_s": round(time.monotonic() - killed, 1),
        "whole_s": round(time.monotonic() - began, 1),
    }
    print(f"{part} killed in {stage}: {took}, {state['type']} {state.get('message') or ''}")
    for name, value in took.items():
        record_property(name, value)
    assert before.keys() <= rows_there(refresh.root).keys(), (
        "what was on the disk when the part died is still there"
    )
    assert state["type"] == "COMPLETED", (state, site.stack.log("worker")[-6000:])
    assert refresh.most_engines == 1
    assert refresh.state(run)["type"] == "COMPLETED"
    exactly_once(refresh)


@pytest.mark.parametrize("how", ["down", "power cut"])
def test_a_refresh_whose_stack_ends_goes_on_when_it_is_started_again(site, how, tmp_path):
    running, refresh = site.stack, fresh(site, how.replace(" ", "-"), tmp_path)
    run = refresh.start()
    until(
        lambda: WHEN["verification"](refresh),
        lambda: f"verification\n{running.log('worker')[-4000:]}",
        END_S,
        every_s=0.1,
    )
    before, began = rows_there(refresh.root), time.monotonic()
    if how == "down":
        done = running.command("down")
        assert done.returncode == 0, done.stderr
        assert not running.engines()
    else:
        running.kill_all()
    stopped_s = time.monotonic() - began
    assert before.keys() <= rows_there(refresh.root).keys()
    running.up()
    if how == "power cut":  # as the automation does after a quarter of an hour without a heartbeat
        assert running.set_state(run, "CRASHED")["status"] == "ACCEPT"
    state = refresh.state(run)
    print(f"{how}: stopped in {stopped_s:.1f} s, then {state['type']}: {state['message']}")
    assert state["type"] == "CRASHED"
    again = refresh.start()
    assert refresh.ended(again)["type"] == "COMPLETED", running.log("worker")[-6000:]
    exactly_once(refresh)


def exactly_once(refresh):
    stack = refresh.site.stack
    for stage, key in (
        ("synthesis", "candidate_id"),
        ("verification", "candidate_id"),
        ("curation", "candidate_id"),
    ):
        (snapshot,) = [path for path in refresh.root.glob(f"{stage}/*") if path.is_dir()]
        assert (snapshot / "manifest.json").exists()
        rows = Counter(row[key] for row in written(snapshot, [key]))
        assert rows and max(rows.values()) == 1, (stage, rows.most_common(3))
        assert stage == "curation" or len(rows) == ALL
        assert not [path.name for path in snapshot.rglob(".*")], (
            "no journal and no temporary file in a finished snapshot"
        )
    asked = refresh.site.endpoint.answered
    assert len(asked) == ALL and set(asked.values()) == {1}, (
        "what was answered once is never asked for again"
    )
    tracked = stack.tracked(refresh.name)
    assert [run["status"] for run in tracked] == ["FINISHED"], tracked
    assert tracked[0]["metrics"]["candidates"] == ALL and tracked[0]["metrics"]["tasks"] == TASKS
    assert {child["status"] for child in tracked[0]["children"]} == {"FINISHED"}
    asked = {"flows": {"name": {"any_": ["nightly refresh"]}}, "limit": 200}
    mine = [
        run
        for run in stack.ask("flow_runs/filter", asked)
        if run["parameters"]["run"]["name"] == refresh.name
    ]
    assert {run["id"] for run in mine} == set(refresh.runs)
    assert stack.ask("v2/concurrency_limits/devices")["active_slots"] == 0, (
        "the devices are free for the next run"
    )
