"""A real Chromium, headless, for tests of pages that people look at.

Guarantees: a fresh profile for each; no request leaves the machine, whatever a page asks for, and
what it asked for is kept in `outside`; uncaught errors of the page's scripts are kept in
`page_errors`, and what dialogs said, which are dismissed, in `dialogs`; no process and no profile
stays behind. Where there is no Chromium the test is skipped with the line that installs it, or
fails under CONCUR_REQUIRE_BROWSER=1: a CI that should have one must not pass without. Does not
guarantee that addresses the browser itself refuses (such as `javascript:`) are seen: a test asks
the page what they did.
"""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    # tests may run as root, where Chromium refuses to start with it; the pages are ours and local
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # /dev/shm is 64 MB in many containers, and a page that fills it crashes
    "--disable-dev-shm-usage",
    # also for what routing does not see
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
INSTALL = (
    "apt-get install chromium && pip install -e '.[browser]' (or set CONCUR_CHROMIUM to the path of"
    " one)"
)
WIDTH_PX, HEIGHT_PX = 1440, 1000
PATIENCE_MS = 120_000
"""For whatever a test waits for: the machine may verify kernels, or run other tests, meanwhile."""


@dataclass
class Browser:
    """One window. `page` is playwright's Page; `shot` keeps what it shows."""

    page: Page
    shots: Path
    outside: list[str] = field(default_factory=list)
    page_errors: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def shot(self, name, *, full_page=True):
        """A picture of the page as NAME.png, in $CONCUR_SCREENSHOTS where that is set, else in the
        test's own folder."""
        folder = Path(os.environ.get("CONCUR_SCREENSHOTS") or self.shots)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.png"
        self.page.screenshot(path=str(path), full_page=full_page)
        return path


def chromium_path():
    """The Chromium to use. Skips the test where there is none, or fails it under
    CONCUR_REQUIRE_BROWSER=1."""
    named = os.environ.get("CONCUR_CHROMIUM")
    found = (
        shutil.which(named)
        if named
        else next((path for path in map(shutil.which, NAMES) if path), None)
    )
    if found and _has_playwright():
        return found
    lacking = (
        "playwright is not installed"
        if found
        else f"{named} is no program"
        if named
        else f"none of {', '.join(NAMES)} on PATH"
    )
    message = f"no browser: {lacking}; {INSTALL}"
    if os.environ.get("CONCUR_REQUIRE_BROWSER") == "1":
        pytest.fail(message)
    pytest.skip(message)


@contextmanager
def chromium(shots):
    """A window of a new profile; `shots` is where pictures go. Not to be called where an asyncio
    loop runs in this thread."""
    program = chromium_path()
    from playwright.sync_api import sync_playwright

    with TemporaryDirectory(prefix="concur-browser-") as profile, sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=program,
            headless=True,
            args=list(FLAGS),
            viewport={"width": WIDTH_PX, "height": HEIGHT_PX},
            service_workers="block",  # their requests would not be routed
            locale="en-US",
        )
        context.set_default_timeout(PATIENCE_MS)
        try:
            browser = Browser(
                page=context.pages[0] if context.pages else context.new_page(), shots=shots
            )
            context.route(lambda url: not is_local(url), lambda route: _refuse(browser, route))
            context.route_web_socket(
                lambda url: not is_local(url), lambda socket: _refuse_socket(browser, socket)
            )
            context.on("weberror", lambda found: browser.page_errors.append(str(found.error)))
            context.on("dialog", lambda dialog: _dismiss(browser, dialog))
            yield browser
        finally:
            context.close()


def is_local(url):
    """Does asking for this stay on the machine? Addresses without a host (`data:`, `blob:`,
    `about:`) do, and so do files."""
    return (
        urlsplit(url).scheme not in ("http", "https", "ws", "wss", "ftp")
        or urlsplit(url).hostname in LOCAL_HOSTS
    )


def _refuse(browser, route):
    browser.outside.append(route.request.url)
    route.abort()


def _refuse_socket(browser, socket):
    browser.outside.append(socket.url)
    socket.close()


def _dismiss(browser, dialog):
    browser.dialogs.append(dialog.message)
    dialog.dismiss()


def _has_playwright():
    from importlib.util import find_spec

    return find_spec("playwright") is not None
