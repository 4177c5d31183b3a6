"""The viewer of candidates in a browser, opened from disk: filters, a candidate, a difference, the
leaderboards, narrow screens, and text that would act if it were markup."""

from pathlib import Path

import pytest

from flows.view import write_view
from tests.support.acted import fired
from tests.support.browser import chromium
from tests.support.payloads import HOSTILE, PAYLOADS
from tests.support.viewed import hostile_site, root_with_benchmark

pytestmark = pytest.mark.browser
ROWS = "#table .tabulator-row"
CUT_CELLS = """[...document.querySelectorAll(".tabulator-cell, .tabulator-col-title")]
    .filter(cell => cell.scrollWidth > cell.clientWidth + 1).map(cell => cell.textContent)"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    root = root_with_benchmark(tmp_path_factory.mktemp("viewed") / "root")
    return Path(write_view(str(root))["page"])


@pytest.fixture
def browser(tmp_path):
    with chromium(tmp_path / "shots") as window:
        yield window
        assert (window.outside, window.page_errors, window.dialogs) == ([], [], [])


def at(browser, page, place, shows):
    browser.page.goto(f"{page.as_uri()}#{place}")
    browser.page.locator(shows).first.wait_for()
    return browser.page


def shown(page):
    """The tasks and statuses in the table."""
    return set(
        page.locator(ROWS).evaluate_all(
            "all => all.map(row => ['task', 'status'].map(name =>"
            " row.querySelector(`[tabulator-field=${name}]`).textContent).join(' '))"
        )
    )


def test_filters_sorting_and_the_address_that_keeps_them(browser, site):
    page = at(browser, site, "", ROWS)
    assert page.locator("#count").text_content() == "21 of 21 candidates"
    assert page.locator("#title").text_content() == "root"
    told = page.locator("#counts").text_content()
    assert told.split() == "21 candidates of 6 tasks correct 20 incorrect 1".split()
    page.select_option("[name=status]", "incorrect")
    page.get_by_text("1 of 21 candidates").wait_for()
    assert shown(page) == {"t/0 incorrect"}
    page.get_by_role("button", name="Clear").click()
    page.get_by_text("21 of 21 candidates").wait_for()
    page.select_option("[name=model]", "tuned")
    page.fill("[name=speedup]", "3")
    page.get_by_text("2 of 21 candidates").wait_for()
    assert shown(page) == {"b/0 correct", "b/1 correct"}
    for filters, count in (
        ("task=T%2F0", 4),
        ("flags=repetitive", 1),
        ("tokens=80", 9),
        ("set=benchmark&speedup=0", 8),
        ("strategies=concur&reason=ok&task=t%2F3", 1),
    ):
        page = at(browser, site, f"list?{filters}", "#count")
        page.get_by_text(f"{count} of 21 candidates").wait_for()
    page = at(browser, site, "list?", "#count")
    page.get_by_text("21 of 21 candidates").wait_for()
    for _ in range(2):
        page.locator(".tabulator-col-title", has_text="Speedup").click()
    page.locator(ROWS).first.get_by_text("6.00").wait_for()


def test_the_page_of_a_candidate(browser, site):
    page = at(browser, site, "list?task=t%2F2&speedup=4.5", ROWS)
    page.locator(f"{ROWS} a").first.click()
    page.locator("#candidate pre").first.wait_for()
    said = page.locator("#candidate").inner_text()
    for words in (
        "Correct: every check passed.",
        "speedup 5.00 (own kernels take an unknown share of the time; 95 % interval 4.50 to 5.50)",
        "thought 2 about t/2",
        "class Model:",
        "void add(float* x)",
    ):
        assert words in said
    assert "screened" not in said
    # both languages are highlighted
    kinds = page.locator("#candidate code .hljs-keyword, #candidate code .hljs-type")
    assert {"class", "import", "void", "float"} <= set(kinds.all_text_contents())
    page.get_by_text("All recorded fields").click()
    assert page.locator("dd", has_text="GPU X").count() == 1
    page = at(browser, site, "c/t-0-0", "#candidate pre")
    said = page.locator("#candidate").inner_text()
    assert "only screened" in said and "concur verify confirms one kernel" in said
    assert "every check passed" not in said and "speedup ~1.00" in said
    assert "95 % interval" not in said and "a rough time, often too good" in said
    page = at(browser, site, "c/nobody", "#message")
    page.get_by_text("There is no candidate nobody here.").wait_for()


def test_the_difference_of_two_selected_kernels(browser, site):
    page = at(browser, site, "list?task=t%2F1", ROWS)
    assert page.get_by_role("button", name="Compare").is_disabled()
    for number in range(2):
        page.locator(f"{ROWS} input").nth(number).click()
    page.get_by_role("button", name="Compare").click()
    page.locator("#diff .added").first.wait_for()
    assert "x[0] += 0;" in page.locator("#diff .removed").all_text_contents()[0]
    assert "x[0] += 1;" in page.locator("#diff .added").all_text_contents()[0]
    assert "import torch" in page.locator("#diff pre").inner_text()
    page.locator("#diff a").first.click()
    page.locator("#candidate select").select_option(index=1)
    page.locator("#diff .added").first.wait_for()


def test_the_leaderboards_of_tasks_and_models(browser, site):
    page = at(browser, site, "tasks", "#tasks-table .tabulator-row")
    assert page.locator("#tasks-table .tabulator-row").count() == 6
    first = page.locator("#tasks-table .tabulator-row").first.locator(".tabulator-cell")
    told = ["t/3", "t-3-2", "org/writer", "6.00x", "5.40 to 6.60", "", "3 of 3"]
    assert first.all_text_contents() == told
    page = at(browser, site, "models", "#models-table .tabulator-row")
    assert (
        "100.0 % (" in page.locator("#models-table .tabulator-row", has_text="tuned").inner_text()
    )
    page.locator("#models-table a", has_text="tuned").click()
    page.get_by_text("4 of 21 candidates").wait_for()


def test_a_long_name_loses_whole_parts_before_its_end(browser, site):
    page = at(browser, site, "", ROWS)
    file = "level_1_problem_3_sample_0_kernel.py"
    names = {
        "smooth_l1_rows_sample_2.py": "smooth_l1_rows_sample_2.py",
        "3f" * 32: "3f3f3f3f…",
        f"runs/qwq-32b/{file}": f"…{file}",
    }
    assert {name: page.evaluate("name => short(name)", name) for name in names} == names


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_view_fits_the_screen(browser, site, width, scheme):
    browser.page.set_viewport_size({"width": width, "height": 850})
    browser.page.emulate_media(color_scheme=scheme)
    for place, shows in {
        "list": ROWS,
        "c/t-1-1": "#candidate pre",
        "diff/t-1-0/t-1-1": "#diff pre",
        "tasks": "#tasks-table .tabulator-row",
        "models": "#models-table .tabulator-row",
    }.items():
        page = at(browser, site, place, shows)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), place
        if place == "list":
            assert page.locator(".tabulator-col-title").get_by_text("Speedup").is_visible()
        assert page.evaluate(CUT_CELLS) == [], place
        browser.shot(f"viewer-{place.split('/')[0]}-{width}-{scheme}", full_page=False)


def test_hostile_text_is_shown_and_does_nothing(browser, tmp_path):
    site = hostile_site(tmp_path)
    page = at(browser, site, "", ROWS)
    ids = page.evaluate("about.rows.map(row => encodeURIComponent(row.id))")
    places = {
        "list": ROWS,
        f"c/{ids[0]}": "#candidate pre",
        f"diff/{ids[0]}/{ids[1]}": "#diff pre",
        "tasks": "#tasks-table .tabulator-row",
        "models": "#models-table .tabulator-row",
        "c/" + PAYLOADS[1].replace('"', "%22"): "#message",
    }
    for place, shows in places.items():
        page = at(browser, site, place, shows)
        page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
        assert fired(browser) == [], place
        assert page.locator("main script, main iframe, main svg, main style").count() == 0
    page = at(browser, site, f"c/{ids[0]}", "#candidate pre")
    plain = " ".join(page.locator("#candidate").inner_text().split())
    assert all(" ".join(payload.split()) in plain for payload in PAYLOADS)
    assert PAYLOADS[0] in page.locator("#candidate option").nth(1).inner_text()
    page = at(browser, site, "list", ROWS)
    page.select_option("[name=model]", HOSTILE)
    page.get_by_text("2 of 2 candidates").wait_for()
    browser.shot("viewer-hostile")
    assert fired(browser) == []


def test_the_policy_alone_would_stop_a_script(browser, site, tmp_path):
    """A second lock: text that became markup would run nothing, and load nothing."""
    page = at(browser, site, "", ROWS)
    page.evaluate("text => { document.querySelector('main').innerHTML = text }", HOSTILE)
    page.wait_for_timeout(300)
    assert [each for each in fired(browser) if "a script ran" in each] == []
    browser.outside.clear()
