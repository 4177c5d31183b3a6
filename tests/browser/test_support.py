"""The browser that other tests lean on: it runs scripts and lets nothing out."""

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support.browser import is_local

PAGE = """<!doctype html><title>page</title><script>window.ran = 6 * 7</script>
<img src="http://canary.invalid/pixel.png"><img src="http://192.0.2.1/pixel.png">
<script>new WebSocket("ws://canary.invalid/socket").onclose = () => { window.shut = true }</script>
<script>alert("said")</script><script>throw new Error("planted")</script>"""


def test_what_is_local():
    assert all(
        map(
            is_local,
            (
                "http://127.0.0.1:4200/x",
                "http://localhost/",
                "http://[::1]:1/",
                "data:,x",
                "blob:null/1",
                "file:///x",
            ),
        )
    )
    outside = (
        "http://127.0.0.1.evil.invalid/",
        "https://localhost@evil.invalid/",
        "ws://evil.invalid",
        "http://[::ffff:1.2.3.4]/",
    )
    assert not any(map(is_local, outside))


@pytest.mark.browser
def test_scripts_run_and_nothing_leaves(browser, tmp_path):
    (tmp_path / "index.html").write_text(PAGE)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.page.goto(f"http://127.0.0.1:{server.server_port}/index.html", wait_until="load")
        browser.page.wait_for_function("window.shut")
        server.shutdown()
    assert browser.page.evaluate("window.ran") == 42
    asked = {
        "http://canary.invalid/pixel.png",
        "http://192.0.2.1/pixel.png",
        "ws://canary.invalid/socket",
    }
    assert set(browser.outside) == asked
    assert any("planted" in error for error in browser.page_errors)
    assert browser.dialogs == ["said"]
    assert browser.shot("index").read_bytes().startswith(b"\x89PNG")
