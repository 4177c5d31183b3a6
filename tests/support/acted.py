"""Whether text of strangers took effect in a page that a browser shows.

Guarantees: looks at the page and at each of its frames. Does not press anything: a link that would
run a script counts as one that did.
"""

from contextlib import suppress

from tests.support.payloads import CANARY, FIRED


def fired(browser):
    """What took effect in the page or one of its frames: scripts, requests, links that would run
    one."""
    found = [url for url in browser.outside if CANARY in url] + [
        f"a dialog said {said}" for said in browser.dialogs
    ]
    for frame in browser.page.frames:
        if frame.evaluate(f"Boolean(window.{FIRED})"):
            found.append(f"a script ran in {frame.url}")
        found += frame.evaluate(
            "Array.from(document.querySelectorAll('a')).map(a => a.href).filter(h =>"
            " h.startsWith('javascript:'))"
        )
    return found


def settled(browser):
    """Nothing is loaded any more, or five seconds have passed: pages that ask their server again
    and again never come to rest."""
    from playwright.sync_api import TimeoutError as NotYet

    with suppress(NotYet):
        browser.page.wait_for_load_state("networkidle", timeout=5000)


def visit(browser, url, words, name):
    """Open a page, wait until it shows some of the hostile text, and let whatever it has loaded
    come to an end."""
    browser.page.goto(url)
    browser.page.get_by_text(words).first.wait_for(state="attached", timeout=60_000)
    settled(browser)
    browser.shot(name)


def words(browser, expected):
    """The text of the page and its frames, once one of them shows what is expected."""

    def said(frame):
        return frame.evaluate("document.body ? document.body.innerText : ''")

    for _ in range(60):
        shown = " ".join(map(said, browser.page.frames))
        if expected in shown:
            return shown
        browser.page.wait_for_timeout(
            500
        )  # the next look; a frame tells nobody that it has been filled
    return " ".join(map(said, browser.page.frames))
