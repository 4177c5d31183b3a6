"""Tests have a home of their own: nothing of the user's is read or written."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path


def test_the_home_is_of_these_tests():
    assert Path.home().is_relative_to(tempfile.gettempdir())
    assert not [name for name in os.environ if name.startswith("XDG_") and name.endswith("_HOME")]


def test_no_home_is_needed():
    """Builds then lie in the home of the tests. A file instead of a folder refuses root, too."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "CONCUR_CACHE" and not name.startswith("PYTEST_")
    }
    asked = f"{__file__}::test_the_home_is_of_these_tests"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", asked],
        env=environment | {"HOME": os.devnull, "XDG_CACHE_HOME": os.devnull},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
