"""Stored cross-site scripting by way of an ablation: its comparison shows what strangers wrote, and
nothing acts. The same text in MLflow's and Prefect's own pages is in test_hostile_pages."""

import base64
import html
import re

import pytest

from tests.support.acted import fired, settled, words
from tests.support.hostile_ablation import hostile_comparison
from tests.support.payloads import CANARY, PAYLOADS

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1800)]
OUR_WORDS = "What to trust, and what not"
POLICY = re.compile(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>")


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    return hostile_comparison(tmp_path_factory.mktemp("page")).html


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
