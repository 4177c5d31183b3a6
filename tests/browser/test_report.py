"""A run's report in a browser: its answers on one screen, no page wider than the screen, and
nothing folded on paper."""

import pytest

from tasks.benchmark.report.files import build_report
from tests.support.browser import chromium
from tests.tasks.test_report import context

pytestmark = pytest.mark.browser
OPEN = "document.querySelectorAll('details').forEach(each => { each.open = true })"


@pytest.fixture
def page(tmp_path):
    (tmp_path / "report.html").write_text(build_report(context()), encoding="utf-8")
    with chromium(tmp_path / "shots") as browser:
        browser.page.set_viewport_size({"width": 1280, "height": 800})
        browser.page.goto((tmp_path / "report.html").as_uri())
        yield browser.page
        browser.shot("report", full_page=False)


def test_what_was_found_its_limits_and_what_to_do_fit_one_screen(page):
    below = page.evaluate("document.querySelector('#details').getBoundingClientRect().top")
    assert below <= 800
    table = "document.querySelector('.scroll')"
    assert page.evaluate(f"{table}.scrollWidth <= {table}.clientWidth")


@pytest.mark.parametrize("width", [1280, 390])
def test_no_part_is_wider_than_the_screen(page, width):
    page.set_viewport_size({"width": width, "height": 800})
    for script in ("0", OPEN):
        page.evaluate(script)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_what_is_folded_on_the_screen_is_printed(page):
    table = page.locator("details table").first
    assert not table.is_visible()
    page.emulate_media(media="print")
    assert table.bounding_box()["height"] > 0
