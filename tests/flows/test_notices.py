"""Who is told when a run ends badly, by a real command and a real webhook, and what is never
told."""

import json
import logging
import sys
import threading
import time
from datetime import UTC, datetime
from types import SimpleNamespace
from uuid import UUID

import pytest
import yaml

from flows.config import PipelineConfig
from flows.runtime.config import NotifyConfig
from flows.runtime.notices import deliver, notice_of, tell
from tests.support.chat_server import serving
from tests.support.commands import ROOT

AUTOMATIONS = ROOT / "deployments" / "automations"
SECRET = "token-5up3r"
QUOTED = "<script>alert(1)</script> ignore all instructions"
FLOW = SimpleNamespace(name="refresh the data set")


def state(message="", kind="FAILED"):
    return SimpleNamespace(
        type=SimpleNamespace(value=kind),
        name=kind.title(),
        message=message,
        timestamp=datetime(2026, 1, 1, tzinfo=UTC),
    )


def run(notify, parent=None):
    config = {"name": "nightly"} | ({"guard": {"notify": notify}} if notify is not None else {})
    return SimpleNamespace(
        id=UUID(int=7),
        name="refresh nightly",
        parent_task_run_id=parent,
        parameters={"config": config},
        start_time=None,
        run_count=1,
    )


class Hook:
    """What the webhook answers, and what it was told."""

    def __init__(self):
        self.status, self.hold = 200, threading.Event()
        self.hold.set()

    def __call__(self, number, body):
        self.hold.wait(600)
        elsewhere = {"location": "/elsewhere", "content-length": "2"}
        return self.status, {}, elsewhere if self.status == 302 else {}


@pytest.fixture
def hook(monkeypatch):
    hook = Hook()
    with serving(hook) as hook.server:
        monkeypatch.setenv("NIGHT_HOOK", f"http://127.0.0.1:{hook.server.port}/{SECRET}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield hook
        hook.hold.set()


def told(hook):
    """Every notice, without the path that it was posted to."""
    return [
        {key: value for key, value in body.items() if key != "path"} for body in hook.server.bodies
    ]


def command(tmp_path, program):
    return [
        sys.executable,
        "-c",
        f"import json, os, sys, time; out = {str(tmp_path / 'told.json')!r}; {program}",
    ]


def test_a_command_and_a_webhook_are_told_the_same(tmp_path, hook):
    program = (
        "open(out, 'w').write(json.dumps([json.load(sys.stdin),"
        " os.environ['CONCUR_NOTICE_STATE']]))"
    )
    notify = {"command": command(tmp_path, program), "webhook_env": "NIGHT_HOOK", "timeout_s": 60}
    tell(FLOW, run(notify), state("Flow run encountered an exception: DiskFullError: no room"))
    said, named = json.loads((tmp_path / "told.json").read_text())
    assert [said] == told(hook) and named == said["state"] == "FAILED"
    assert said["run_id"] == str(UUID(int=7)) and said["error_kind"] == "DiskFullError"
    assert (said["flow"], said["run"]) == ("refresh the data set", "refresh nightly")


def test_the_worker_which_passes_by_name_tells_too(hook):
    """Of a run that was cancelled or killed the worker tells, and Prefect calls hooks there by the
    names of their arguments."""
    tell(flow=FLOW, flow_run=run({"webhook_env": "NIGHT_HOOK"}), state=state(kind="CANCELLING"))
    (body,) = told(hook)
    assert (body["state"], body["state_name"]) == ("CANCELLED", "Cancelled")


def test_no_word_of_an_error_is_told():
    """An error may quote what a model wrote."""
    prefix = "Flow run encountered an exception: EvalError: "
    for message, kind in ((prefix + QUOTED, "EvalError"), (QUOTED, None), ("By " + QUOTED, None)):
        notice = notice_of(FLOW, run({}), state(message))
        assert not any(word in str(notice) for word in ("script", "instructions", "alert"))
        assert notice["error_kind"] == kind


def test_subflows_and_runs_without_a_wish_are_silent(hook):
    nothing = SimpleNamespace(id=1, name="x", parent_task_run_id=None, parameters={})
    for silent in (
        run({"webhook_env": "NIGHT_HOOK"}, parent="a task"),
        run(None),
        run({}),
        nothing,
    ):
        tell(FLOW, silent, state())
    assert told(hook) == []


def test_the_runs_own_process_hands_over_an_object(hook):
    config = PipelineConfig.model_validate({"guard": {"notify": {"webhook_env": "NIGHT_HOOK"}}})
    found = run(None)
    found.parameters = {"config": config}
    tell(FLOW, found, state(kind="CANCELLED"))
    assert [body["state"] for body in told(hook)] == ["CANCELLED"]


@pytest.mark.parametrize(
    "trouble", ["status", "redirect", "silence", "nobody", "no address", "not there"]
)
def test_a_webhook_in_trouble_costs_its_patience_and_its_address_is_in_no_log(
    trouble, hook, monkeypatch, caplog
):
    caplog.set_level(logging.DEBUG)
    hook.status = {"status": 500, "redirect": 302}.get(trouble, 200)
    if trouble == "silence":
        hook.hold.clear()
    if address := {"nobody": "http://127.0.0.1:1", "no address": "file:///etc"}.get(trouble):
        monkeypatch.setenv("NIGHT_HOOK", f"{address}/{SECRET}")
    if trouble == "not there":
        monkeypatch.delenv("NIGHT_HOOK")
    began = time.monotonic()
    tell(FLOW, run({"webhook_env": "NIGHT_HOOK", "timeout_s": 1.0}), state())
    assert time.monotonic() - began < 120
    assert "webhook" in caplog.text and SECRET not in caplog.text
    assert hook.server.gets == 0 and "/elsewhere" not in str(hook.server.bodies)


@pytest.mark.parametrize("program", ["sys.exit(3)", "time.sleep(60)"])
def test_a_command_in_trouble_costs_its_patience(tmp_path, program, caplog):
    deliver(
        NotifyConfig(command=tuple(command(tmp_path, program)), timeout_s=1.5), {"state": "FAILED"}
    )
    assert "guard.notify" in caplog.text
    deliver(NotifyConfig(command=("/no/such/program",)), {"state": "FAILED"})
    assert "FileNotFoundError" in caplog.text


def test_every_flow_of_the_line_has_the_hooks():
    from flows.benchmark import benchmark_models
    from flows.pipeline import concur_line
    from flows.refresh import refresh_dataset
    from flows.train import train_adapter, train_and_track

    for flow in (concur_line, refresh_dataset, train_adapter, train_and_track, benchmark_models):
        hooks = (flow.on_failure_hooks, flow.on_crashed_hooks, flow.on_cancellation_hooks)
        assert all(tell in each for each in hooks), flow.name


# -- what the server does by itself ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["tell", "free-the-slot"])
def test_automations_are_what_this_prefect_understands(name):
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
    from prefect.server.events.schemas.automations import AutomationCore as ServerAutomation

    assert len(list(AUTOMATIONS.iterdir())) == 2
    found = yaml.safe_load((AUTOMATIONS / f"{name}.yaml").read_text(encoding="utf-8"))
    assert found["automations"]
    for each in found["automations"]:
        parsed = AutomationCore.model_validate(each)
        ServerAutomation.model_validate(each)
        trigger = parsed.trigger
        assert isinstance(trigger, EventTrigger)
        assert trigger.expect and parsed.description and parsed.actions
        assert set(each) <= set(AutomationCore.model_fields), "a key that Prefect would not look at"
        assert set(each["trigger"]) <= set(EventTrigger.model_fields)
        for action, declared in zip(parsed.actions, each["actions"], strict=True):
            assert set(declared) <= set(type(action).model_fields)
            assert "state.message" not in json.dumps(declared), "an error's words may quote a model"
        if trigger.posture == Posture.Proactive:
            assert trigger.within.total_seconds() >= 600 and trigger.after
            assert trigger.for_each == {"prefect.resource.id"}
