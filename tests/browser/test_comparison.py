"""The comparison in a real browser: on wide and small screens, light and dark, with nothing loaded
from elsewhere."""

import pytest

from tests.support.ablations import ablation, written_comparison
from tests.support.browser import chromium

pytestmark = pytest.mark.browser
STYLE = "getComputedStyle(document.body)"
COLOURS = {
    "light": ["rgb(29, 33, 38)", "rgb(255, 255, 255)"],
    "dark": ["rgb(223, 227, 232)", "rgb(21, 24, 28)"],
}
PREVIEW_PX = 586
"""as wide as MLflow's preview on a laptop"""


def test_the_page_fits_every_screen_and_asks_for_nothing(tmp_path):
    named = {("a very long strategy name " * 4, None): 0.5, ("random", None): 0.3}
    made = written_comparison(ablation(tmp_path, named), tmp_path / "out", resamples=50)
    with chromium(tmp_path / "shots") as browser:
        page = browser.page
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        for scheme, colours in COLOURS.items():
            page.emulate_media(color_scheme=scheme)
            for width in (400, 1200):
                page.set_viewport_size({"width": width, "height": 900})
                page.goto(made.html.as_uri())
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
                assert page.evaluate(f"[{STYLE}.color, {STYLE}.backgroundColor]") == colours
        page.set_viewport_size({"width": PREVIEW_PX, "height": 900})
        rights = page.locator("th", has_text="reads as").evaluate_all(
            "all => all.map(each => each.getBoundingClientRect().right)"
        )
        assert rights and all(0 < right <= PREVIEW_PX for right in rights), (
            "what a difference comes to is seen without scrolling"
        )
        assert all(url.startswith(("data:", made.html.as_uri())) for url in asked)
