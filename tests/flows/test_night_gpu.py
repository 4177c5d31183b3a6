"""The stack of `concur up` on a machine with NVIDIA GPUs: refreshes with CUDA kernels, started as
the UI starts them.

What only a GPU shows: the limits are its number, two runs never share it, and a run that is
cancelled leaves nothing on it.
"""

import json
import time
from collections import Counter
from datetime import datetime

import pytest

from kernels_eval.devices import visible_gpus
from tasks.sources import bundled
from tests.support.night import ENDED
from tests.support.recordings import rows_there, written
from tests.support.stacks import stack
from tests.support.waiting import until

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(1800)]

NIGHTLY = "nightly refresh/nightly"
SAMPLES = 2
ANSWERS = SAMPLES * sum(
    bool(bundled.responses(task.name, "cuda")) for task in bundled.load("train")
)
END_S = 600.0
GONE_S = 30.0
"""From the cancellation until nothing of the run is left (flows.runtime.shutdown)."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    home = tmp_path_factory.mktemp("night")
    with stack(home / "root", CONCUR_CACHE=str(home / "cache"), HF_HUB_OFFLINE="1") as running:
        running.deploy(NIGHTLY)
        yield running


def start(site, root, name, longest_s):
    """A run of the deployment on the bundled recordings; another `longest_s` is another
    measurement."""
    overrides = [
        f"verification.eval.timing.max_s={longest_s}",
        "tracking.enabled=true",
        "decontamination.enabled=false",
    ]
    parameters = {
        "run": {"profile": "cuda", "root": str(root), "name": name},
        "candidates": {"tasks": 0, "samples_per_task": SAMPLES},
        "advanced": {"overrides": overrides},
    }
    return site.start(site.deployment(NIGHTLY), **parameters)


def ended(site, run):
    def over():
        found = site.ask(f"flow_runs/{run}")
        return found if found["state_type"] in ENDED else None

    return until(
        over, lambda: f"the end of {run}\n{site.log('worker')[-4000:]}", END_S, every_s=0.2
    )


def completed(site, run):
    """Seconds that a run took that completed."""
    found = ended(site, run)
    assert found["state_type"] == "COMPLETED", (found["state"], site.log("worker")[-6000:])
    return found["total_run_time"]


def used_mb():
    """Memory in use on each GPU, whoever uses it."""
    import pynvml

    pynvml.nvmlInit()
    try:
        count = pynvml.nvmlDeviceGetCount()
        return [
            pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).used / 2**20
            for index in range(count)
        ]
    finally:
        pynvml.nvmlShutdown()


def verdicts(root, columns):
    """Of the snapshot in which what was kept is confirmed; the other one was screened."""
    (confirmed,) = [
        path.parent
        for path in root.glob("verification/*/manifest.json")
        if "confirmation" in json.loads(path.read_text())
    ]
    assert len(list(root.glob("verification/*"))) == 2
    return written(confirmed, columns)


def test_a_refresh_on_the_gpu_and_the_same_again_which_is_nothing_new(site, tmp_path):
    gpus = len(visible_gpus())
    queues = {
        queue["name"]: queue["concurrency_limit"]
        for queue in site.ask("work_pools/concur/queues/filter", {})
    }
    assert queues["devices"] == gpus == site.ask("v2/concurrency_limits/devices")["limit"]
    root = tmp_path / "root"
    first = completed(site, start(site, root, "gpu-first", 0.3))
    rows = verdicts(root, ["candidate_id", "device", "status"])
    assert max(Counter(row["candidate_id"] for row in rows).values()) == 1 and len(rows) == ANSWERS
    assert {row["device"] for row in rows if row["status"] == "correct"} and all(
        "NVIDIA" in row["device"] for row in rows if row["device"]
    )
    statuses = Counter(row["status"] for row in rows)
    assert statuses["correct"] >= ANSWERS / 2 and len(statuses) >= 2, statuses
    (tracked,) = site.tracked("gpu-first")
    assert tracked["status"] == "FINISHED" and tracked["metrics"]["correct"] == statuses["correct"]
    second = completed(site, start(site, root, "gpu-first", 0.3))
    print(f"{gpus} GPUs: refresh {first:.0f} s {dict(statuses)}, the same again {second:.0f} s")
    assert len(verdicts(root, ["candidate_id"])) == ANSWERS
    summary = site.ask(
        "artifacts/filter",
        {"artifacts": {"key": {"any_": ["morning-report"]}}, "sort": "CREATED_DESC"},
    )
    assert summary and "Nothing new" in summary[0]["data"]


def test_runs_of_which_each_may_use_every_gpu_wait_for_each_other(site, tmp_path):
    runs = [
        start(site, tmp_path / name, name, 0.31 + number / 100)
        for number, name in enumerate(("gpu-one", "gpu-two"))
    ]
    for run in runs:
        completed(site, run)
    spans = []
    for run in runs:
        verifying = site.ask(
            "task_runs/filter",
            {
                "flow_runs": {"parent_flow_run_id": {"any_": [run]}},
                "task_runs": {"name": {"like_": "verify"}},
                "limit": 200,
            },
        )
        times = [
            datetime.fromisoformat(task[end])
            for task in verifying
            for end in ("start_time", "end_time")
        ]
        spans.append((min(times), max(times)))
    (_, first_end), (second_begin, _) = sorted(spans)
    print(
        f"two runs at once: the second verifies {(second_begin - first_end).total_seconds():.1f} s"
        " after the first has verified"
    )
    assert second_begin >= first_end


@pytest.mark.parametrize("how", ["cancel", "down"])
def test_a_run_that_is_ended_leaves_nothing_on_the_gpu_and_goes_on_when_it_is_started_again(
    site, tmp_path, how
):
    root = tmp_path / "root"
    idle = used_mb()
    run = start(site, root, f"gpu-{how}", 0.4)

    def used():
        return max(now - then for now, then in zip(used_mb(), idle, strict=True)) > 100

    def works():
        return used() and sum(key[0] == "verification" for key in rows_there(root)) >= 2

    until(
        works,
        lambda: f"a run with verdicts that uses the GPU\n{site.log('worker')[-4000:]}",
        END_S,
        every_s=0.1,
    )
    before, began = rows_there(root), time.monotonic()
    if how == "cancel":
        site.ask(
            f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}}
        )
    else:
        assert site.command("down").returncode == 0
    until(lambda: not site.engines(), "no process of the run")
    until(lambda: not used(), lambda: f"free GPUs: {idle}, {used_mb()}", every_s=0.1)
    took = time.monotonic() - began
    if how == "down":
        site.up()
    state = ended(site, run)["state_type"]
    print(f"{how}: {state}, nothing left on the GPU after {took:.1f} s, {len(before)} rows kept")
    assert state == ("CANCELLED" if how == "cancel" else "CRASHED") and took < GONE_S
    assert before.keys() <= rows_there(root).keys()
    completed(site, start(site, root, f"gpu-{how}", 0.4))
    rows = Counter(row["candidate_id"] for row in verdicts(root, ["candidate_id"]))
    assert len(rows) == ANSWERS and max(rows.values()) == 1
    assert [each["status"] for each in site.tracked(f"gpu-{how}")] == ["FINISHED"]
    assert site.ask("v2/concurrency_limits/devices")["active_slots"] == 0
