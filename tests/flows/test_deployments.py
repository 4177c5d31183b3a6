"""prefect.yaml: what it registers can be imported, its parameters are a configuration, and nothing
runs by itself until asked."""

import importlib
import json
import sys
from zoneinfo import ZoneInfo

import httpx
import pytest
import yaml
from prefect import Flow

from flows.config import load_profile, profile_names
from flows.forms import RunForm, configuration
from kernels_eval.records import Language
from tests.support import commands
from tests.support.commands import ROOT
from tests.support.servers import prefect_server

FILE = ROOT / "prefect.yaml"
SCHEDULED = {"nightly", "ablations"}


def deployments():
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))["deployments"]


def name_of(deployment):
    return deployment["name"]


each = pytest.mark.parametrize("deployment", deployments(), ids=name_of)
FORMS = deployments()
each_form = pytest.mark.parametrize("deployment", FORMS, ids=name_of)


def test_the_file_is_a_project_with_deployments_of_distinct_names():
    data = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    assert data["name"] == "concur"
    assert f'"prefect{data["prefect-version"]}"' in (ROOT / "pyproject.toml").read_text()
    names = [deployment["name"] for deployment in data["deployments"]]
    assert names and len(set(names)) == len(names)
    assert not data.get("push")
    assert not data.get("pull")  # workers run what is installed, they fetch no code


@each
def test_the_entrypoint_is_a_module_path_to_a_flow_whose_form_takes_the_parameters(deployment):
    """A file entrypoint would put flows/ first on sys.path, where its module names shadow installed
    packages."""
    entrypoint = deployment["entrypoint"]
    assert "/" not in entrypoint and ":" not in entrypoint and not entrypoint.endswith(".py")
    found = flow_of(deployment)
    assert set(deployment["parameters"]) <= set(found.parameters.properties)
    found.validate_parameters(deployment["parameters"])
    assert len(json.dumps(deployment["parameters"])) < 512 * 1024  # Prefect's limit


def flow_of(deployment):
    module, name = deployment["entrypoint"].rsplit(".", 1)
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, Flow)
    return found


def fields_of(schema):
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


@each_form
def test_a_person_can_read_the_form(deployment):
    """Groups with a headline and a sentence; in them fields with a title, a sentence and a default,
    numbers with bounds."""
    schema = flow_of(deployment).parameters.model_dump()
    assert not schema["required"]
    for name, group in schema["properties"].items():
        assert group["title"] and group["title"] != name
        assert schema["definitions"][group["$ref"].rsplit("/", 1)[1]]["description"].endswith(".")
    fields = list(fields_of(schema))
    assert {"profile", "root", "overrides"} <= {name for name, _ in fields}
    for name, field in fields:
        assert field["title"] and field["description"] and field["description"].endswith("."), name
        assert "anyOf" not in field, f"{name}: the UI shows a choice of types before the field"
        assert field["type"] != "integer" or {"minimum", "maximum"} <= set(field), name
    assert next(field["enum"] for name, field in fields if name == "profile") == profile_names()


def test_nightly_is_the_nightly_profile_and_needs_nothing(monkeypatch, tmp_path):
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


@each
def test_schedules_wait_for_a_person_and_say_where_and_when(deployment):
    from prefect.client.schemas.schedules import CronSchedule

    schedules = deployment.get("schedules", [])
    assert schedules or deployment["name"] not in SCHEDULED
    slugs = [schedule["slug"] for schedule in schedules]
    assert all(slugs)
    assert len(set(slugs)) == len(slugs)  # a slug is what a second deploy finds the schedule by
    for schedule in schedules:
        assert schedule["active"] is False
        assert ZoneInfo(schedule["timezone"]).key == schedule["timezone"]
        CronSchedule(
            cron=schedule["cron"], timezone=schedule["timezone"]
        )  # raises for what Prefect cannot schedule


@each
def test_runs_do_not_pile_up(deployment):
    """The next waits; the slot of a run that never came to start is free again after the grace
    period."""
    assert deployment["concurrency_limit"] == {
        "limit": 1,
        "collision_strategy": "ENQUEUE",
        "grace_period_seconds": 600,
    }
    assert deployment["work_pool"]["name"] == "concur"


@each
def test_what_may_use_a_gpu_says_so_in_its_queue_and_its_tags(deployment):
    queue = deployment["work_pool"]["work_queue_name"]
    assert queue == ("cpu" if deployment["name"] == "curate" else "devices")
    assert (
        queue in deployment["tags"]
        and deployment["version"]
        and deployment["description"].startswith("# ")
    )


# -- a real server ---------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path):
    with prefect_server(tmp_path) as served:
        yield served


def asked(server, path):
    return httpx.post(f"{server.api_url}/{path}", json={}, timeout=60).raise_for_status().json()


@pytest.mark.slow
def test_prefect_deploy_registers_everything_and_starts_nothing(server):
    def prefect(*arguments):
        env = commands.environment(**server.environment, PREFECT_CLI_PROMPT="false")
        done = commands.run([sys.executable, "-m", "prefect", *arguments], env)
        assert done.returncode == 0, done.stdout + done.stderr

    wanted = {deployment["name"]: deployment for deployment in deployments()}
    for pool in {deployment["work_pool"]["name"] for deployment in wanted.values()}:
        prefect("work-pool", "create", pool, "--type", "process")
    for _ in range(2):  # the second time changes nothing: schedules are found by their slug
        prefect("--no-prompt", "deploy", "--all")
    registered = asked(server, "deployments/filter")
    assert sorted(found["name"] for found in registered) == sorted(wanted)
    for found in registered:
        declared = wanted[found["name"]]
        pool, schedules = declared["work_pool"], declared.get("schedules", [])
        for name in ("entrypoint", "parameters"):
            assert found[name] == declared[name]
        assert (found["work_pool_name"], found["work_queue_name"], found["pull_steps"] or []) == (
            *(pool["name"], pool["work_queue_name"], []),
        )
        kept = [
            (each["slug"], each["active"], each["schedule"]["cron"], each["schedule"]["timezone"])
            for each in found["schedules"]
        ]
        assert kept == [(each["slug"], False, each["cron"], each["timezone"]) for each in schedules]
        limit = found["global_concurrency_limit"]
        assert limit["limit"] == declared["concurrency_limit"]["limit"]
    assert asked(server, "flow_runs/count") == 0
