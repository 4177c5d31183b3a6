"""prefect.yaml: what it registers can be imported, its parameters are a configuration, and nothing
runs by itself until asked."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import yaml
from prefect import Flow

import flows
from flows.config import load_profile, profile_names
from flows.forms import RunForm, configuration
from kernels_eval.records import Language

ROOT = Path(flows.__file__).parent.parent
FILE = ROOT / "prefect.yaml"
SCHEDULED = {"nightly", "ablations", "watchdog"}


def deployments() -> list[dict[str, Any]]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))["deployments"]


def each() -> Any:
    return pytest.mark.parametrize(
        "deployment", deployments(), ids=lambda deployment: deployment["name"]
    )


def each_form() -> Any:
    """All but the watchdog, which nobody fills in."""
    forms = [deployment for deployment in deployments() if deployment["name"] != "watchdog"]
    return pytest.mark.parametrize("deployment", forms, ids=lambda deployment: deployment["name"])


def test_the_file_is_a_project_with_deployments_of_distinct_names() -> None:
    data = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    assert data["name"] == "concur"
    names = [deployment["name"] for deployment in data["deployments"]]
    assert names and len(set(names)) == len(names)
    assert not data.get("push") and not data.get(
        "pull"
    )  # workers run what is installed, they fetch no code


@each()
def test_the_entrypoint_is_a_module_path_to_a_flow_whose_form_takes_the_parameters(
    deployment: dict[str, Any],
) -> None:
    """A file entrypoint would put flows/ first on sys.path, where its module names shadow installed
    packages."""
    entrypoint = deployment["entrypoint"]
    assert "/" not in entrypoint and ":" not in entrypoint and not entrypoint.endswith(".py")
    found = flow_of(deployment)
    assert set(deployment["parameters"]) <= set(found.parameters.properties)
    found.validate_parameters(deployment["parameters"])
    assert len(json.dumps(deployment["parameters"])) < 512 * 1024  # Prefect's limit


def flow_of(deployment: dict[str, Any]) -> Flow:
    module, name = deployment["entrypoint"].rsplit(".", 1)
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, Flow)
    return found


def fields_of(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of every form of a flow's parameters, with what it refers to."""
    definitions = schema["definitions"]
    for form in schema["properties"].values():
        for name, field in definitions[form["$ref"].rsplit("/", 1)[1]]["properties"].items():
            yield (
                name,
                field
                | (definitions[field["$ref"].rsplit("/", 1)[1]] if "$ref" in field else {})
                | {"description": field.get("description")},
            )


@each_form()
def test_a_person_can_read_the_form(deployment: dict[str, Any]) -> None:
    """Groups with a headline and a sentence; in them fields with a title, a sentence and a default,
    numbers with bounds."""
    schema = flow_of(deployment).parameters.model_dump()
    assert not schema["required"]
    for name, group in schema["properties"].items():
        assert name.isalpha()  # Prefect heads a group with the parameter's name
        assert schema["definitions"][group["$ref"].rsplit("/", 1)[1]]["description"].endswith(".")
    fields = list(fields_of(schema))
    assert {"profile", "root", "overrides"} <= {name for name, _ in fields}
    for name, field in fields:
        assert field["title"] and field["description"] and field["description"].endswith("."), name
        assert "anyOf" not in field, f"{name}: the UI shows a choice of types before the field"
        assert field["type"] != "integer" or {"minimum", "maximum"} <= set(field), name
    assert next(field["enum"] for name, field in fields if name == "profile") == profile_names()


def test_nightly_is_the_nightly_profile_and_needs_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CONCUR_ROOT", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    nightly = next(deployment for deployment in deployments() if deployment["name"] == "nightly")
    config = configuration(RunForm.model_validate(nightly["parameters"]["run"]))
    assert config == load_profile("nightly", (f"root={tmp_path}",))
    assert (config.language, config.tasks.source, config.synthesis.sampler) == (
        Language.CPP,
        "bundled",
        "recorded",
    )


@each()
def test_schedules_wait_for_a_person_and_say_where_and_when(deployment: dict[str, Any]) -> None:
    from prefect.client.schemas.schedules import CronSchedule

    schedules = deployment.get("schedules", [])
    assert schedules or deployment["name"] not in SCHEDULED
    slugs = [schedule["slug"] for schedule in schedules]
    assert all(slugs) and len(set(slugs)) == len(
        slugs
    )  # a slug is what a second deploy finds the schedule by
    for schedule in schedules:
        assert schedule["active"] is False
        assert ZoneInfo(schedule["timezone"]).key == schedule["timezone"]
        CronSchedule(
            cron=schedule["cron"], timezone=schedule["timezone"]
        )  # raises for what Prefect cannot schedule


@each()
def test_runs_do_not_pile_up(deployment: dict[str, Any]) -> None:
    """The next waits; the slot of a run that never came to start is free again after the grace
    period."""
    assert deployment["concurrency_limit"] == {
        "limit": 1,
        "collision_strategy": "ENQUEUE",
        "grace_period_seconds": 600,
    }
    assert deployment["work_pool"]["name"] == "concur"


@each()
def test_what_may_use_a_gpu_says_so_in_its_queue_and_its_tags(deployment: dict[str, Any]) -> None:
    queue = deployment["work_pool"]["work_queue_name"]
    assert queue == ("cpu" if deployment["name"] in {"curate", "watchdog"} else "gpu")
    assert (
        queue in deployment["tags"]
        and deployment["version"]
        and deployment["description"].startswith("# ")
    )


# -- a real server ---------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


@pytest.fixture
def server(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Prefect server of its own, on a free port, stopped at the end with all it started. Yields
    the environment of its clients."""
    port = free_port()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")
    } | {
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLI_PROMPT": "false",
        "DO_NOT_TRACK": "1",
        "PYTHONPATH": str(ROOT),
    }
    log = tmp_path / "server.log"
    command = [
        sys.executable,
        "-m",
        "prefect",
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=tmp_path,
        )
    try:
        deadline = time.monotonic() + 180
        while not answers(f"{environment['PREFECT_API_URL']}/health"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(
                errors="replace"
            )[-3000:]
            time.sleep(0.3)
        yield environment
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=20)
    assert not answers(f"{environment['PREFECT_API_URL']}/health")


def prefect(*arguments: str, environment: dict[str, str]) -> str:
    command = [sys.executable, "-m", "prefect", *arguments]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def asked(environment: dict[str, str], path: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(
        f"{environment['PREFECT_API_URL']}/{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.loads(response.read())


@pytest.mark.slow
def test_prefect_deploy_registers_everything_and_starts_nothing(server: dict[str, str]) -> None:
    pools = {deployment["work_pool"]["name"] for deployment in deployments()}
    for pool in pools:
        prefect("work-pool", "create", pool, "--type", "process", environment=server)
    for _ in range(2):  # the second time changes nothing: schedules are found by their slug
        prefect("--no-prompt", "deploy", "--all", environment=server)
    registered = asked(server, "deployments/filter", {})
    assert sorted(found["name"] for found in registered) == sorted(
        deployment["name"] for deployment in deployments()
    )
    for found in registered:
        wanted = next(
            deployment for deployment in deployments() if deployment["name"] == found["name"]
        )
        assert (
            found["entrypoint"] == wanted["entrypoint"]
            and found["work_pool_name"] == wanted["work_pool"]["name"]
        )
        assert found["parameters"] == wanted["parameters"]
        assert (
            not found["pull_steps"]
            and found["work_queue_name"] == wanted["work_pool"]["work_queue_name"]
        )
        kept = [
            (schedule["slug"], schedule["active"], schedule["schedule"])
            for schedule in found["schedules"]
        ]
        assert [(slug, active) for slug, active, _ in kept] == [
            (schedule["slug"], False) for schedule in wanted.get("schedules", [])
        ]
        for (_, _, schedule), declared in zip(kept, wanted.get("schedules", []), strict=True):
            assert (schedule["cron"], schedule["timezone"]) == (
                declared["cron"],
                declared["timezone"],
            )
        limit = found["global_concurrency_limit"]
        assert limit is not None and limit["limit"] == wanted["concurrency_limit"]["limit"]
    assert asked(server, "flow_runs/count", {}) == 0
