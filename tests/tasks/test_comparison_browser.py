"""The comparison in a real browser: on wide and small screens, light and dark, with nothing loaded
from elsewhere."""

import shutil

import pytest

from tests.support.ablations import ablation, written_comparison

pytestmark = pytest.mark.browser


def test_the_page_fits_every_screen_and_asks_for_nothing(tmp_path):
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium: install one, such as with `apt-get install chromium`")
    made = written_comparison(
        ablation(tmp_path, {("a very long strategy name " * 4, None): 0.5, ("random", None): 0.3}),
        tmp_path / "out",
        resamples=50,
    )
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        for scheme in ("light", "dark"):
            for width in (400, 1200):
                page = browser.new_context(
                    color_scheme=scheme, viewport={"width": width, "height": 900}
                ).new_page()
                asked = []
                page.on("request", lambda request, asked=asked: asked.append(request.url))
                page.goto(made.html.as_uri())
                assert [
                    url for url in asked if not url.startswith(("data:", made.html.as_uri()))
                ] == []
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
                ink, paper = page.evaluate(
                    "[getComputedStyle(document.body).color,"
                    " getComputedStyle(document.body).backgroundColor]"
                )
                assert (ink, paper) == (
                    ("rgb(29, 33, 38)", "rgb(255, 255, 255)")
                    if scheme == "light"
                    else ("rgb(223, 227, 232)", "rgb(21, 24, 28)")
                )
        page = browser.new_context(
            viewport={"width": 586, "height": 900}
        ).new_page()  # as wide as MLflow's preview on a laptop
        page.goto(made.html.as_uri())
        rights = page.locator("th", has_text="reads as").evaluate_all(
            "all => all.map(each => each.getBoundingClientRect().right)"
        )
        assert rights and all(0 < right <= 586 for right in rights), (
            "what a difference comes to is seen without scrolling"
        )
        browser.close()
