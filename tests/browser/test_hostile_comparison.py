"""Stored cross-site scripting by way of an ablation: its comparison and its runs in MLflow show
what strangers wrote, and nothing acts."""

import base64
import html
import json
import re
from typing import NamedTuple
from urllib.parse import quote

import pytest

from tests.support.acted import fired, settled, visit, words
from tests.support.browser import chromium
from tests.support.hostile_ablation import HostileRuns, hostile_comparison, log_hostile_ablation
from tests.support.payloads import CANARY, PAYLOADS
from tests.support.servers import mlflow_server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1800)]
OUR_WORDS = "What to trust, and what not"
POLICY = re.compile(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>")


class Logged(NamedTuple):
    url: str
    runs: HostileRuns


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    return hostile_comparison(tmp_path_factory.mktemp("page")).html


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablation")
    with mlflow_server(folder / "mlflow") as server:
        yield Logged(server.url, log_hostile_ablation(folder, server.url))


@pytest.fixture
def browser(tmp_path):
    with chromium(tmp_path / "shots") as window:
        yield window


def shows_every_payload(text):
    plain = " ".join(text.split())
    return all(" ".join(payload.split()) in plain for payload in PAYLOADS)


def unfolded(browser):
    for frame in browser.page.frames:
        frame.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")


def quiet(browser):
    """Nothing took effect, nothing was asked of elsewhere, and no script of a page failed."""
    assert (fired(browser), browser.outside, browser.page_errors) == ([], [], [])


def test_the_page_opened_as_a_file(browser, page_file):
    browser.page.goto(page_file.as_uri())
    unfolded(browser)
    settled(browser)
    assert shows_every_payload(words(browser, OUR_WORDS))
    assert browser.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    browser.shot("hostile-comparison")
    quiet(browser)
    links = browser.page.locator("a").evaluate_all(
        "all => all.map(each => each.getAttribute('href')).filter(each => !each.startsWith('#'))"
    )
    assert links and all(re.fullmatch(rf"http://{CANARY}/[^\"'<> ]*", link) for link in links)


def test_without_escaping_the_page_would_act_and_its_policy_alone_would_stop_it(
    browser, page_file, tmp_path
):
    """Otherwise the test above could not fail; and the page has two locks."""
    raw, page = html.unescape(page_file.read_text(encoding="utf-8")), tmp_path / "raw.html"
    page.write_text(raw, encoding="utf-8")
    browser.page.goto(page.as_uri())
    settled(browser)
    assert browser.outside == [] and not [each for each in fired(browser) if "a script ran" in each]
    page.write_text(POLICY.sub("", raw), encoding="utf-8")
    browser.page.goto(page.as_uri())
    settled(browser)
    found = fired(browser)
    assert [each for each in found if "a script ran" in each] and [
        each for each in found if CANARY in each
    ]


def test_its_figures_opened_by_themselves(browser, page_file, tmp_path):
    """An image runs nothing; the same file in a window of its own might."""
    drawn = re.findall(
        r"data:image/svg\+xml;base64,([\w+/=]+)", page_file.read_text(encoding="utf-8")
    )
    assert len(drawn) == 1
    for number, each in enumerate(drawn):
        figure = tmp_path / f"{number}.svg"
        figure.write_bytes(base64.b64decode(each))
        browser.page.goto(figure.as_uri())
        settled(browser)
        assert "<script>" in browser.page.evaluate("document.documentElement.textContent")
        # names are cut in figures, so that a script in one would not be whole: there must be none
        # at all
        assert (
            browser.page.evaluate(
                "document.querySelectorAll('script, image, img, foreignObject, iframe, a').length"
            )
            == 0
        )
        quiet(browser)


def test_the_page_in_the_preview_of_mlflow(browser, logged):
    browser.page.goto(
        f"{logged.url}/#/experiments/{logged.runs.experiment}/runs/{logged.runs.parent}/artifacts/comparison.html"
    )
    words(browser, OUR_WORDS)
    unfolded(browser)
    settled(browser)
    (frame,) = browser.page.frames[1:]
    assert shows_every_payload(frame.evaluate("document.body.innerText"))
    assert frame.evaluate("document.documentElement.scrollWidth <= innerWidth")
    sandbox = browser.page.locator("iframe").first.get_attribute("sandbox")
    assert sandbox is not None and "allow-same-origin" not in sandbox
    browser.shot("hostile-comparison-in-mlflow")
    quiet(browser)


@pytest.mark.parametrize(
    "name, expected", [("comparison.md", OUR_WORDS), ("comparison.json", "against_untuned")]
)
def test_its_other_files_in_the_preview_of_mlflow(browser, logged, name, expected):
    browser.page.goto(
        f"{logged.url}/#/experiments/{logged.runs.experiment}/runs/{logged.runs.parent}/artifacts/{name}"
    )
    assert expected in words(browser, expected)
    settled(browser)
    browser.shot(f"hostile-{name}")
    quiet(browser)


def test_the_runs_of_the_ablation_and_their_comparison_in_mlflow(browser, logged):
    runs = f"{logged.url}/#/experiments/{logged.runs.experiment}/runs"
    pages = {
        "parent": f"{runs}/{logged.runs.parent}",
        "failed-child": f"{runs}/{logged.runs.children[1]}",
        "table": runs,
    }
    chosen = (quote(json.dumps(each)) for each in (logged.runs.children, [logged.runs.experiment]))
    pages["compared"] = "{}/#/compare-runs?runs={}&experiments={}".format(logged.url, *chosen)
    for name, url in pages.items():
        visit(browser, url, "onerror", f"hostile-ablation-{name}")
        quiet(browser)
    browser.page.get_by_text("Comparing 2 Runs").wait_for()
    browser.page.get_by_text("exec_at_1", exact=True).first.wait_for()
