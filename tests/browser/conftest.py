"""The browser that the files share."""

import pytest

from tests.support.browser import chromium


@pytest.fixture
def browser(tmp_path):
    with chromium(tmp_path / "shots") as window:
        yield window
