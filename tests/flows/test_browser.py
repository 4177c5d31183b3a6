"""What a person does on the first morning, in a real browser and with real servers: open the deployment, fill the form, start the refresh,
watch it to its end, read its artifacts, follow the link to MLflow. `make test-browser` runs it; pictures go to $CONCUR_SCREENSHOTS.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import pytest

import flows
from tests.support.browser import Browser, chromium
from tests.support.servers import free_port

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = [pytest.mark.browser, pytest.mark.timeout(2700)]
ROOT = Path(flows.__file__).parent.parent
SLOW_MS = 120_000  # pages of a machine whose cores verify kernels meanwhile
RUN_S = 1800.0


class Stack(NamedTuple):
    """What `concur up` started, and the environment of its clients."""

    prefect: str
    mlflow: str
    root: Path
    environment: dict[str, str]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    root = tmp_path_factory.mktemp("browser") / "root"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_", "RAY_", "CONCUR_ROOT"))}
    clean |= {"PYTHONPATH": str(ROOT), "PREFECT_CLI_PROMPT": "false", "DO_NOT_TRACK": "1"}
    ports = {name: free_port() for name in ("prefect", "mlflow", "worker", "ray", "ray-client")}
    try:
        command("up", "--root", str(root), *(word for name, port in ports.items() for word in (f"--{name}-port", str(port))), env=clean)
        told = shlex.split(command("env", "--root", str(root), env=clean))
        environment = clean | dict(word.split("=", 1) for word in told if "=" in word)
        run([sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"], environment)
        yield Stack(f"http://127.0.0.1:{ports['prefect']}", f"http://127.0.0.1:{ports['mlflow']}", root, environment)
    finally:
        command("down", "--root", str(root), env=clean)


def command(*words: str, env: dict[str, str]) -> str:
    return run([sys.executable, "-m", "flows.cli", *words], env)


def run(words: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=600, cwd=ROOT, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with chromium(tmp_path / "shots") as window:
        window.page.set_default_timeout(SLOW_MS)
        yield window


def field(page: Page, title: str) -> Locator:
    """What is below a title of the form."""
    header = f"> .p-label__header .schema-form-property__label:text-is('{title} (Optional)')"
    return page.locator(f".p-label:has({header}) > .p-label__body")


def choose(page: Page, title: str, option: str) -> None:
    """Pick an option from a list of the form, with the keyboard and the mouse."""
    button = field(page, title).locator("button.p-select-button__control")
    button.focus()
    page.keyboard.press("ArrowDown")
    page.locator(".p-select-option").get_by_text(option, exact=True).click()
    button.get_by_text(option, exact=True).wait_for()


def runs(stack: Stack, flow_name: str) -> list[dict[str, Any]]:
    body = {"flows": {"name": {"any_": [flow_name]}}, "sort": "START_TIME_DESC"}
    return httpx.post(f"{stack.prefect}/api/flow_runs/filter", json=body, timeout=60).raise_for_status().json()


ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def reached(page: Page, stack: Stack, flow_name: str, states: tuple[str, ...] = ENDED) -> dict[str, Any]:
    """The newest run of a flow, once it is in one of these states."""
    deadline = time.monotonic() + RUN_S
    while True:
        found = runs(stack, flow_name)
        if found and found[0]["state_type"] in states:
            return found[0]
        assert time.monotonic() < deadline, found
        page.wait_for_timeout(2000)  # the condition is the state above; a page's requests stand still while this thread sleeps


def test_a_refresh_from_the_form_to_the_page_in_mlflow(stack: Stack, browser: Browser) -> None:
    page = browser.page
    page.goto(f"{stack.prefect}/deployments")
    page.get_by_role("link", name="nightly", exact=True).click()
    page.get_by_text("every-night").wait_for()  # the schedule, beside its switch
    browser.shot("1-deployment")
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    page.get_by_text("Validate parameters").wait_for()

    choose(page, "Profile", "local")
    choose(page, "Strategy", "min_length")
    field(page, "Name").locator("textarea").fill("browser")
    field(page, "Tasks at most").locator("input").fill("3")
    field(page, "Samples per task").locator("input").fill("2")
    field(page, "Overrides").get_by_role("button", name="Add item").click()
    field(page, "Overrides").locator("textarea").fill("verification.eval.timing.max_s=0.2")
    browser.shot("2-form")
    page.get_by_role("button", name="Submit").click()

    outer = reached(page, stack, "nightly refresh", ("RUNNING", *ENDED))
    page.goto(f"{stack.prefect}/runs/flow-run/{outer['id']}")
    page.get_by_text("refresh browser, strategy min_length").first.wait_for()
    browser.shot("3-running")
    outer = reached(page, stack, "nightly refresh")
    assert outer["state_type"] == "COMPLETED", outer["state"]
    assert outer["name"].startswith("refresh browser, strategy min_length, ")
    assert outer["parameters"]["run"]["profile"] == "local"
    (inner,) = runs(stack, "refresh the data set")
    page.goto(f"{stack.prefect}/runs/flow-run/{inner['id']}")
    page.get_by_text("Completed", exact=True).first.wait_for()
    page.get_by_text("ask the recorded responses for 2 cpp kernels for each of 3 tasks").first.wait_for()  # in the log
    browser.shot("4-completed")
    page.get_by_text("Artifacts", exact=True).first.click()
    page.get_by_text("morning-report", exact=True).wait_for()
    for kept in ("refresh-progress", "status-by-family", "composition", "snapshots", "training-set"):
        page.get_by_text(kept, exact=True).wait_for()
    browser.shot("5-artifacts")
    page.get_by_text("morning-report", exact=True).click()
    page.get_by_text("First refresh of this name").first.wait_for()
    page.get_by_text("What failed, and why").wait_for()
    browser.shot("6-morning-report")

    page.goto(f"{stack.prefect}/runs/flow-run/{outer['id']}")
    page.get_by_text("Artifacts", exact=True).first.click()
    page.get_by_text("mlflow-run", exact=True).click()
    link = page.get_by_role("link", name="This run in MLflow")
    link.wait_for()
    browser.shot("7-link")
    address = link.get_attribute("href")
    assert address and address.startswith(stack.mlflow)
    page.goto(address)
    page.get_by_text("browser refresh cpp min_length").first.wait_for()
    page.get_by_text("curated", exact=True).first.wait_for()  # a metric
    browser.shot("8-mlflow")
    assert browser.page_errors == []

    report = json.loads(command("morning", "--root", str(stack.root), "--json", env=stack.environment))
    assert (report["refresh"]["ending"], report["refresh"]["name"], report["refresh"]["strategy"]) == ("finished", "browser", "min_length")
    assert {change["what"]: change["rows"] for change in report["changes"]}["candidates"] == 6


def test_a_form_that_cannot_be_used_ends_the_run_with_one_sentence(stack: Stack, browser: Browser) -> None:
    page = browser.page
    page.goto(f"{stack.prefect}/deployments")
    page.get_by_role("link", name="curate", exact=True).click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    field(page, "Overrides").get_by_role("button", name="Add item").click()
    field(page, "Overrides").locator("textarea").fill("curation.stratgy=best")
    page.get_by_role("button", name="Submit").click()
    failed = reached(page, stack, "curate training sets")
    assert failed["state_type"] == "FAILED"
    assert "did you mean curation.strategy?" in failed["state"]["message"]
    page.goto(f"{stack.prefect}/runs/flow-run/{failed['id']}")
    page.get_by_text("did you mean curation.strategy?").first.wait_for()
    browser.shot("9-refused")
