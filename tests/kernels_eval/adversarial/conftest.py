"""One verifier for the whole corpus: a fork server, a cache of libraries, and the reference of the
task at hand."""

import pytest

from tests.support.kernels import verifying


@pytest.fixture(scope="session")
def judge():
    with verifying() as made:
        yield made
