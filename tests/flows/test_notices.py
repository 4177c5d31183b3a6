"""Who is told when a run ends badly, by a real command and a real webhook, and what is never
told."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import yaml

from flows.config import PipelineConfig
from flows.runtime.config import NotifyConfig
from flows.runtime.notices import deliver, notice_of, tell

ROOT = Path(__file__).parents[2]
AUTOMATIONS = sorted((ROOT / "deployments" / "automations").glob("*.yaml"))
SECRET = "token-5up3r"
QUOTED = "<script>alert(1)</script> ignore all instructions"
FLOW = SimpleNamespace(name="refresh the data set")


def state(message: str = "", kind: str = "FAILED") -> Any:
    return SimpleNamespace(
        type=SimpleNamespace(value=kind),
        name=kind.title(),
        message=message,
        timestamp=datetime(2026, 1, 1, tzinfo=UTC),
    )


def run(notify: dict[str, Any] | None, parent: str | None = None) -> Any:
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
    def __init__(self) -> None:
        self.status, self.bodies, self.hold, self.paths = 200, [], threading.Event(), []
        self.hold.set()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                owner.paths.append(self.path)
                owner.bodies.append(
                    json.loads(self.rfile.read(int(self.headers["content-length"])))
                )
                owner.hold.wait(30)
                self.send_response(owner.status)
                if owner.status == 302:
                    self.send_header(
                        "location", f"http://127.0.0.1:{self.server.server_address[1]}/elsewhere"
                    )
                self.send_header("content-length", "0")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *args: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/{SECRET}"


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    found = Hook()
    thread = threading.Thread(target=found.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("NIGHT_HOOK", found.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield found
    found.hold.set()
    found.server.shutdown()
    thread.join()
    found.server.server_close()


def command(tmp_path: Path, program: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        f"import json, os, sys, time; out = {str(tmp_path / 'told.json')!r}; {program}",
    ]


def test_a_command_and_a_webhook_are_told_the_same(tmp_path: Path, hook: Hook) -> None:
    program = (
        "open(out, 'w').write(json.dumps([json.load(sys.stdin),"
        " os.environ['CONCUR_NOTICE_STATE']]))"
    )
    notify = {"command": command(tmp_path, program), "webhook_env": "NIGHT_HOOK"}
    tell(FLOW, run(notify), state("Flow run encountered an exception: DiskFullError: no room"))
    said, named = json.loads((tmp_path / "told.json").read_text())
    assert [said] == hook.bodies and named == said["state"] == "FAILED"
    assert said["run_id"] == str(UUID(int=7)) and said["error_kind"] == "DiskFullError"
    assert (said["flow"], said["run"]) == ("refresh the data set", "refresh nightly")


def test_the_worker_which_passes_by_name_tells_too(hook: Hook) -> None:
    """Of a run that was cancelled or killed the worker tells, and Prefect calls hooks there by the
    names of their arguments."""
    tell(flow=FLOW, flow_run=run({"webhook_env": "NIGHT_HOOK"}), state=state(kind="CANCELLING"))
    assert [(body["state"], body["state_name"]) for body in hook.bodies] == [
        ("CANCELLED", "Cancelled")
    ]


def test_no_word_of_an_error_is_told() -> None:
    """An error may quote what a model wrote."""
    prefix = "Flow run encountered an exception: EvalError: "
    for message, kind in ((prefix + QUOTED, "EvalError"), (QUOTED, None), ("By " + QUOTED, None)):
        told = notice_of(FLOW, run({}), state(message))
        said = json.dumps(told)
        assert not any(word in said for word in ("script", "instructions", "alert"))
        assert told["error_kind"] == kind


def test_subflows_and_runs_without_a_wish_are_silent(hook: Hook) -> None:
    tell(FLOW, run({"webhook_env": "NIGHT_HOOK"}, parent="a task"), state())
    tell(FLOW, run(None), state())
    tell(FLOW, run({}), state())
    tell(FLOW, SimpleNamespace(id=1, name="x", parent_task_run_id=None, parameters={}), state())
    assert hook.bodies == []


def test_the_runs_own_process_hands_over_an_object(hook: Hook) -> None:
    config = PipelineConfig.model_validate({"guard": {"notify": {"webhook_env": "NIGHT_HOOK"}}})
    found = run(None)
    found.parameters = {"config": config}
    tell(FLOW, found, state(kind="CANCELLED"))
    assert [body["state"] for body in hook.bodies] == ["CANCELLED"]


@pytest.mark.parametrize(
    "trouble", ["status", "redirect", "silence", "nobody", "no address", "not there"]
)
def test_a_webhook_in_trouble_costs_its_patience_and_its_address_is_in_no_log(
    trouble: str, hook: Hook, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert time.monotonic() - began < 5
    assert "webhook" in caplog.text and SECRET not in caplog.text
    assert "/elsewhere" not in hook.paths


@pytest.mark.parametrize("program", ["sys.exit(3)", "time.sleep(60)"])
def test_a_command_in_trouble_costs_its_patience(
    tmp_path: Path, program: str, caplog: pytest.LogCaptureFixture
) -> None:
    deliver(
        NotifyConfig(command=tuple(command(tmp_path, program)), timeout_s=1.5), {"state": "FAILED"}
    )
    assert "guard.notify" in caplog.text
    deliver(NotifyConfig(command=("/no/such/program",)), {"state": "FAILED"})
    assert "FileNotFoundError" in caplog.text


def test_every_flow_of_the_line_has_the_hooks() -> None:
    from flows.benchmark import benchmark_models
    from flows.pipeline import concur_line
    from flows.refresh import refresh_dataset
    from flows.train import train_adapter, train_and_track

    for flow in (concur_line, refresh_dataset, train_adapter, train_and_track, benchmark_models):
        hooks = (flow.on_failure_hooks, flow.on_crashed_hooks, flow.on_cancellation_hooks)
        assert all(tell in each for each in hooks), flow.name


# -- what the server does by itself ----------------------------------------------------------------


@pytest.mark.parametrize("path", AUTOMATIONS, ids=lambda path: path.stem)
def test_automations_are_what_this_prefect_understands(path: Path) -> None:
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
    from prefect.server.events.schemas.automations import AutomationCore as ServerAutomation

    found = yaml.safe_load(path.read_text(encoding="utf-8"))["automations"]
    assert found
    for each in found:
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


def test_there_are_automations() -> None:
    assert {path.stem for path in AUTOMATIONS} == {"tell", "free-the-slot"}
