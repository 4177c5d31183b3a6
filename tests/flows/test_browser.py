"""What a person does on the first morning, in a real browser and with real servers: open the
deployment, fill the form, start the refresh, watch it to its end, read its artifacts, follow the
link to MLflow; then the same with an ablation, whose runs are compared in MLflow and on our own
page; then with every other deployment. `make test-browser` runs it; pictures go to
$CONCUR_SCREENSHOTS.
"""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest

from flows.config import shipped_dir
from flows.naming import is_generated
from tests.support import stacks
from tests.support.browser import chromium
from tests.support.night import ENDED
from tests.support.recordings import rows_there, written

pytestmark = [pytest.mark.browser, pytest.mark.timeout(2700)]
TINY = (
    "tasks.limit=6",
    "synthesis.samples_per_task=2",
    "verification.eval.timing.max_s=0.2",
    "training.num_epochs=1",
    "benchmark.tasks.limit=4",
    "benchmark.samples_per_task=2",
    "benchmark.sampling.max_tokens=16",
    "reinforcement.steps=1",
    "reinforcement.tasks_per_step=1",
    "reinforcement.samples_per_task=2",
    "reinforcement.batch_size=2",
    "reinforcement.max_tokens=16",
)
"""Overrides of the profile `ablation` with which each deployment takes a minute or two."""
RUN_S = 1800.0
GONE_S = 30.0
"""From the button until no process of the run is left (flows.runtime.shutdown)."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    with stacks.stack(tmp_path_factory.mktemp("browser") / "root") as found:
        own = found.root / "profiles" / "mine.yaml"
        own.parent.mkdir()
        shipped = shipped_dir("profiles") / "local.yaml"
        own.write_text(shipped.read_text(encoding="utf-8").replace("name: local", "name: mine"))
        found.prefect_done("deploy", "--all")
        yield found


@pytest.fixture
def browser(tmp_path):
    with chromium(tmp_path / "shots") as window:
        yield window


def field(page, title):
    """What is below a title of the form."""
    header = f"> .p-label__header .schema-form-property__label:text-is('{title} (Optional)')"
    return page.locator(f".p-label:has({header}) > .p-label__body")


def choose(page, title, option):
    """Pick an option from a list of the form, with the keyboard and the mouse."""
    button = field(page, title).locator("button.p-select-button__control")
    button.focus()
    page.keyboard.press("ArrowDown")
    page.locator(".p-select-option").get_by_text(option, exact=True).click()
    button.get_by_text(option, exact=True).wait_for()


def opened(page, stack, deployment):
    """The run form of a deployment."""
    page.goto(f"{stack.prefect}/deployments")
    page.get_by_role("link", name=deployment, exact=True).click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    page.get_by_text("Validate parameters").wait_for()
    name = page.locator(".flow-run-name-input input")
    if not is_generated(name.input_value()):  # one in twenty might have been typed
        name.fill("delta712-janus-collapse")


def override(page, settings):
    for place, setting in enumerate(settings):
        field(page, "Overrides").get_by_role("button", name="Add item").click()
        field(page, "Overrides").locator("textarea").nth(place).fill(setting)


def open_artifact(page, stack, run, key):
    """From the page of a run, as a person gets there."""
    page.goto(f"{stack.prefect}/runs/flow-run/{run['id']}")
    page.get_by_text("Artifacts", exact=True).first.click()
    page.get_by_text(key, exact=True).first.click()


def follow(browser, stack, run, key, words):
    """Open the page of MLflow's that a link artifact of a run leads to."""
    open_artifact(browser.page, stack, run, key)
    link = browser.page.get_by_role("link", name=words)
    link.wait_for()
    browser.shot(f"link-{key}")
    address = link.get_attribute("href")
    assert address and address.startswith(stack.mlflow)
    browser.page.goto(address)


def runs(stack, flow_name):
    body = {"flows": {"name": {"any_": [flow_name]}}, "sort": "START_TIME_DESC"}
    return stack.ask("flow_runs/filter", body)


def submitted(page, stack, flow_name):
    """Press Submit. The id of the run that comes of it."""
    before = {run["id"] for run in runs(stack, flow_name)}
    page.get_by_role("button", name="Submit").click()
    return until(
        page,
        lambda: next(
            (run["id"] for run in runs(stack, flow_name) if run["id"] not in before), None
        ),
    )


def reached(page, stack, run_id, states=ENDED):
    """The run, once it is in one of these states."""

    def there():
        run = stack.ask(f"flow_runs/{run_id}")
        return run if run["state_type"] in states else None

    return until(page, there)


def until(page, found):
    deadline = time.monotonic() + RUN_S
    while not (answer := found()):
        assert time.monotonic() < deadline
        # between two questions; a page's requests stand still while this thread sleeps
        page.wait_for_timeout(2000)
    return answer


def test_a_refresh_from_the_form_to_the_page_in_mlflow(stack, browser):
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
    page.locator(".flow-run-name-input input").fill("by hand")
    browser.shot("2-form")
    started = submitted(page, stack, "nightly refresh")

    outer = reached(page, stack, started, ("RUNNING", *ENDED))
    page.goto(f"{stack.prefect}/runs/flow-run/{outer['id']}")
    page.get_by_text("by hand").first.wait_for()
    browser.shot("3-running")
    outer = reached(page, stack, started)
    assert outer["state_type"] == "COMPLETED", outer["state"]
    assert outer["name"] == "by hand"  # what was typed
    assert outer["parameters"]["run"]["profile"] == "local"
    assert runs(stack, "refresh the data set") == []  # stages are of the run that was started
    page.goto(f"{stack.prefect}/runs/flow-run/{outer['id']}")
    page.get_by_text("Completed", exact=True).first.wait_for()
    page.get_by_text(
        "ask the recorded responses for 2 cpp kernels for each of 3 tasks"
    ).first.wait_for()  # in the log
    browser.shot("4-completed")
    page.get_by_text("Artifacts", exact=True).first.click()
    page.get_by_text("morning-report", exact=True).wait_for()
    for kept in ("progress", "observations", "kernels", "training-set"):
        page.get_by_text(kept, exact=True).first.wait_for()  # its type may have its name
    browser.shot("5-artifacts")
    page.get_by_text("morning-report", exact=True).click()
    page.get_by_text("First refresh of this name").first.wait_for()
    page.get_by_text("What came").wait_for()
    browser.shot("6-morning-report")
    # the same in the newer pages, which Prefect's first address opens
    page.goto(f"{stack.prefect}/v2/runs/flow-run/{outer['id']}")
    page.get_by_text("load bundled tasks (train): Finished in state Completed()").first.wait_for()
    page.get_by_text("Artifacts", exact=True).first.click()
    page.get_by_text("morning-report", exact=True).first.click()
    page.get_by_text("First refresh of this name").first.wait_for()
    browser.shot("7-morning-report-v2")

    code = page.get_by_role("link", name="Code of the kernels").get_attribute("href")
    page.goto(f"{stack.prefect}{code}")
    page.get_by_text("The fastest correct kernel of").first.wait_for()
    browser.shot("7-kernels")
    page.goto(f"{stack.prefect}/deployments")
    page.get_by_role("link", name="nightly", exact=True).click()
    page.get_by_text("Description", exact=True).click()
    newest = page.get_by_role("link", name="The newest morning report").get_attribute("href")
    page.goto(f"{stack.prefect}{newest}")
    page.get_by_text("Read this first").first.wait_for()
    browser.shot("7-newest-morning-report")
    follow(browser, stack, outer, "morning-report", "This run in MLflow")
    page.get_by_text("by hand").first.wait_for()
    page.get_by_text("curated", exact=True).first.wait_for()  # a metric
    browser.shot("8-mlflow")
    # Prefect's graph has errors where its page is left while it draws
    assert [error for error in browser.page_errors if "'position'" not in error] == []

    report = json.loads(stack.command("morning", "--json").stdout)
    ending = [report["refresh"][key] for key in ("ending", "name", "strategy")]
    assert ending == ["finished", "browser", "min_length"]
    assert {change["what"]: change["rows"] for change in report["changes"]}["candidates"] == 6


def test_an_ablation_from_the_form_to_the_comparison_of_its_runs(stack, browser):
    page = browser.page
    opened(page, stack, "ablations")
    field(page, "Name").locator("textarea").fill("weekly")
    for strategy in ("min_length", "speedup"):
        tag = field(page, "Strategies").locator(".p-tag", has_text=strategy)
        tag.get_by_role("button").click()
        tag.wait_for(state="detached")
    field(page, "Seeds").locator("input").fill("1")
    override(page, TINY)
    browser.shot("10-ablation-form")
    started = submitted(page, stack, "weekly ablations")

    outer = reached(page, stack, started, ("RUNNING", *ENDED))
    asked = outer["parameters"]["sweep"]
    assert (asked["strategies"], asked["seeds"]) == (["concur", "random"], 1)
    page.goto(f"{stack.prefect}/runs/flow-run/{outer['id']}")
    page.get_by_text("compare strategies of weekly").first.wait_for()
    browser.shot("11-ablation-running")
    outer = reached(page, stack, started)
    assert outer["state_type"] == "COMPLETED", outer["state"]
    page.get_by_text(
        "Completed", exact=True
    ).first.wait_for()  # the page that was open all the while
    assert runs(stack, "ablation") == []
    (folder,) = (stack.root / "ablations").glob("*/comparison.html")
    compared = json.loads(folder.with_suffix(".json").read_text(encoding="utf-8"))
    assert [branch["state"] for branch in compared["branches"]] == ["done", "done"]
    headline, difference = compared["headline"], "random minus concur"
    assert [row["model"] for row in compared["differences"]] and headline

    page.goto(f"{stack.prefect}/runs/flow-run/{outer['id']}")
    page.get_by_text("Artifacts", exact=True).first.click()
    for kept in ("ablation", "progress", "comparison"):
        page.get_by_text(kept, exact=True).first.wait_for()
    browser.shot("12-ablation-artifacts")
    open_artifact(page, stack, outer, "comparison")
    page.get_by_text(headline).first.wait_for()
    page.get_by_text(difference).first.wait_for()
    browser.shot("13-ablation-in-prefect")

    follow(browser, stack, outer, "mlflow-run", "This run in MLflow")
    page.get_by_text("weekly ablation: concur,random").first.wait_for()
    browser.shot("14-ablation-in-mlflow")
    page.goto(page.url.partition("/runs/")[0] + "/runs")  # the experiment's table
    row = page.locator(".ag-pinned-left-cols-container .ag-row")
    row.filter(has_text="weekly ablation").get_by_role("button").first.click()
    for branch in ("concur-all-seed0", "random-all-seed0"):
        row.filter(has_text=branch).locator("input.ag-checkbox-input").check()
    browser.shot("15-two-runs-chosen")
    page.get_by_role("button", name="Compare", exact=True).click()
    page.get_by_text("Comparing 2 Runs from 1 Experiment").wait_for()
    for shown in (
        "concur-all-seed0",
        "random-all-seed0",
        "exec_at_1",
        "exec_at_1_lower",
        "exec_at_1_upper",
        "curated_rows",
    ):
        page.get_by_text(shown, exact=True).first.wait_for(state="attached")
    browser.shot("16-two-runs-compared")
    page.get_by_text("exec_at_1", exact=True).first.scroll_into_view_if_needed()
    browser.shot("17-their-metrics")

    follow(browser, stack, outer, "mlflow-run", "The comparison in MLflow")
    preview = page.frame_locator("iframe")
    preview.get_by_text(headline).wait_for()
    browser.shot("18-comparison-in-mlflow")
    preview.get_by_text(difference).first.scroll_into_view_if_needed()
    browser.shot("19-differences-in-mlflow")
    assert (browser.page_errors, browser.outside) == ([], [])
    page.goto(folder.as_uri())
    page.get_by_text(headline).wait_for()
    page.locator("tr", has_text=difference).first.wait_for()
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    browser.shot("20-comparison")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert (
        page.get_by_role("link", name="run", exact=True).count() == 4
    )  # of each branch, in MLflow and in Prefect


def test_a_run_is_cancelled_by_the_button_and_goes_on_as_a_copy(stack, browser):
    page = browser.page
    opened(page, stack, "nightly")
    choose(page, "Profile", "local")
    field(page, "Name").locator("textarea").fill("stopped")
    field(page, "Tasks at most").locator("input").fill("6")
    field(page, "Samples per task").locator("input").fill("2")
    override(page, ["verification.eval.timing.max_s=0.6"])
    started = submitted(page, stack, "nightly refresh")
    page.goto(f"{stack.prefect}/runs/flow-run/{started}")

    def verifying():
        return [
            path
            for path in stack.root.glob("verification/*/")
            if not (path / "manifest.json").exists()
            and (
                list(path.glob("part-*"))
                or any(each.stat().st_size for each in path.glob(".journal-*"))
            )
        ]

    (snapshot,) = until(page, verifying)
    before = rows_there(stack.root)
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("button", name="Confirm", exact=True).wait_for()
    browser.shot("30-cancel")
    began = time.monotonic()
    page.get_by_role("button", name="Confirm", exact=True).click()
    until(page, lambda: not stack.engines())
    took = time.monotonic() - began
    print(f"cancelled by the button: no process left after {took:.1f} s")
    assert took < GONE_S
    assert reached(page, stack, started)["state_type"] == "CANCELLED"
    page.get_by_text("Cancelled", exact=True).first.wait_for()
    browser.shot("31-cancelled")
    told = stack.ask("logs/filter", {"logs": {"flow_run_id": {"any_": [started]}}})
    assert [each["message"] for each in told if "crash" in each["message"].lower()] == []
    assert "was stopped" in (stack.root / "morning.md").read_text(encoding="utf-8")
    assert (
        not (snapshot / "manifest.json").exists() and before.keys() <= rows_there(stack.root).keys()
    )

    page.locator(".p-icon-button-menu").first.click()
    page.get_by_text("Copy to new run").first.click()
    page.get_by_role("button", name="Submit").wait_for()
    again = reached(page, stack, submitted(page, stack, "nightly refresh"))
    assert again["state_type"] == "COMPLETED", again["state"]
    rows = Counter(row["candidate_id"] for row in written(snapshot, ["candidate_id"]))
    assert (snapshot / "manifest.json").exists() and len(rows) == 12 and max(rows.values()) == 1
    assert browser.page_errors == []


def test_every_other_deployment_runs_from_its_form(stack, browser):
    """The line first: the others take up what it leaves. The second training is another one, whose
    adapter is then the one to score."""
    page = browser.page
    shown = {
        "line": ("whole line", {"morning-report", "report"}),
        "train": ("train an adapter", {"mlflow-run", "snapshots"}),
        "reinforce": ("reinforce an adapter", {"mlflow-run", "snapshots"}),
        "benchmark": ("score the models", {"mlflow-run", "snapshots", "scores"}),
        "curate": ("curate training sets", {"training-sets", "snapshots"}),
    }
    for number, (deployment, (flow_name, kept)) in enumerate(shown.items(), 21):
        opened(page, stack, deployment)
        choose(page, "Profile", "ablation")
        field(page, "Name").locator("textarea").fill(f"form {deployment}")
        override(page, (*TINY, "training.num_epochs=2") if deployment == "train" else TINY)
        run = reached(page, stack, submitted(page, stack, flow_name))
        assert run["state_type"] == "COMPLETED", run["state"]
        assert f"form {deployment}" in run["name"]
        page.goto(f"{stack.prefect}/runs/flow-run/{run['id']}")
        page.get_by_text("Artifacts", exact=True).first.click()
        for key in kept:
            page.get_by_text(key, exact=True).first.wait_for()
        browser.shot(f"{number}-{deployment}")
    assert browser.page_errors == []


def test_a_form_that_cannot_be_used_ends_the_run_with_one_sentence(stack, browser):
    page = browser.page
    opened(page, stack, "curate")
    override(page, ["curation.stratgy=best"])
    failed = reached(page, stack, submitted(page, stack, "curate training sets"))
    assert failed["state_type"] == "FAILED"
    assert "did you mean curation.strategy?" in failed["state"]["message"]
    page.goto(f"{stack.prefect}/runs/flow-run/{failed['id']}")
    page.get_by_text("did you mean curation.strategy?").first.wait_for()
    browser.shot("9-refused")
