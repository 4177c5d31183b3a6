"""Stored cross-site scripting, tried in the real user interfaces: what strangers wrote is shown
there, and does nothing."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.acted import fired, settled, visit, words
from tests.support.payloads import CANARY, FIRED, LINES
from tests.support.servers import Served, clean_environment, mlflow_server, prefect_server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1800)]
OUR_WORDS = "May you trust it"
ROOT = Path(__file__).parents[2]


class Shown(NamedTuple):
    prefect: Served
    mlflow: Served
    ids: dict[str, str]
    experiment: str


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    with prefect_server(folder / "prefect") as prefect, mlflow_server(folder / "mlflow") as mlflow:
        environment = clean_environment() | dict(prefect.environment) | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.support.hostile_runs", str(folder), mlflow.url]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=600
        )
        assert done.returncode == 0, done.stderr[-3000:]
        ids = json.loads(done.stdout.splitlines()[-1])
        with urllib.request.urlopen(
            f"{mlflow.url}/api/2.0/mlflow/runs/get?run_id={ids['mlflow']}", timeout=30
        ) as answer:
            experiment = json.load(answer)["run"]["info"]["experiment_id"]
        yield Shown(prefect, mlflow, ids, experiment)


def test_the_payloads_fire_in_a_page_that_does_not_escape(browser, tmp_path):
    """Otherwise the other tests could not fail."""
    page = tmp_path / "bad.html"
    page.write_text(f"<!doctype html><body>{LINES}</body>")
    browser.page.goto(page.as_uri())
    browser.page.wait_for_function(f"window.{FIRED} === 1")
    settled(browser)
    assert any("a script ran" in each for each in fired(browser)) and any(
        CANARY in each for each in fired(browser)
    )


@pytest.mark.parametrize(
    "artifact", ["report", "comparison", "decontamination", "caution", "summary", "table"]
)
def test_artifacts_in_the_prefect_ui(browser, shown, artifact):
    visit(
        browser,
        f"{shown.prefect.url}/artifacts/artifact/{shown.ids[artifact]}",
        "onerror",
        f"prefect-{artifact}",
    )
    assert fired(browser) == []


@pytest.mark.parametrize("run", ["run", "failed"])
def test_names_and_logs_of_runs_in_the_prefect_ui(browser, shown, run):
    visit(
        browser, f"{shown.prefect.url}/runs/flow-run/{shown.ids[run]}", "onerror", f"prefect-{run}"
    )
    assert fired(browser) == []
    visit(browser, f"{shown.prefect.url}/runs", "onerror", "prefect-runs")
    assert fired(browser) == []


def test_what_the_prefect_ui_does_with_raw_markup(browser, shown):
    """No script runs by itself. But a picture from elsewhere is loaded and a `javascript:` link is
    a link (Prefect 3.9), in cells of tables
    too: that is why our edge escapes (SECURITY.md). Once this fails for the second part, that page
    may say so.
    """
    browser.page.goto(f"{shown.prefect.url}/artifacts/artifact/{shown.ids['raw_markdown']}")
    browser.page.get_by_role("heading", name="title").first.wait_for()
    settled(browser)
    found = fired(browser)
    assert not [each for each in found if "a script ran" in each]
    assert [each for each in found if each.startswith("javascript:")] and [
        each for each in found if CANARY in each
    ]


def mlflow_page(shown, tab):
    return f"{shown.mlflow.url}/#/experiments/{shown.experiment}/runs/{shown.ids['mlflow']}{tab}"


def test_a_run_in_the_mlflow_ui(browser, shown):
    visit(browser, mlflow_page(shown, ""), "onerror", "mlflow-run")
    assert fired(browser) == []
    visit(
        browser,
        f"{shown.mlflow.url}/#/experiments/{shown.experiment}/runs",
        "onerror",
        "mlflow-runs",
    )
    assert fired(browser) == []


@pytest.mark.parametrize("name", ["report.html", "report.md"])
def test_our_pages_in_the_mlflow_ui(browser, shown, name):
    browser.page.goto(mlflow_page(shown, f"/artifacts/{name}"))
    assert OUR_WORDS in words(browser, OUR_WORDS)  # the file is shown, not the run's name alone
    settled(browser)
    browser.shot(f"mlflow-{name}")
    assert fired(browser) == []


def test_what_the_mlflow_ui_does_with_raw_markup(browser, shown):
    """A page that somebody else logged runs in a frame of its own origin: it cannot reach MLflow's
    page or its API (SECURITY.md)."""
    browser.page.goto(mlflow_page(shown, "/artifacts/raw.html"))
    frame = browser.page.locator("iframe").first
    frame.wait_for()
    settled(browser)
    assert "allow-same-origin" not in (frame.get_attribute("sandbox") or "allow-same-origin")
    assert not browser.page.evaluate(f"Boolean(window.{FIRED})")


def test_the_report_opened_as_a_file(browser, tmp_path):
    from tasks.benchmark.report.files import build_report
    from tests.support.hostile_report import hostile_report

    page = tmp_path / "report.html"
    page.write_text(build_report(hostile_report()), encoding="utf-8")
    browser.page.goto(page.as_uri())
    settled(browser)
    browser.page.evaluate(
        "document.querySelectorAll('details').forEach(each => { each.open = true })"
    )
    assert "onerror" in words(browser, "onerror") and fired(browser) == []
