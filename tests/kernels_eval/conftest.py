"""What several files of tests share: starting it takes seconds."""

import pytest

from tests.support.kernels import verifying


@pytest.fixture(scope="session")
def verify():
    """A verifier of `tests.support.kernels.QUICK`: a fork server, a cache of libraries, and the
    reference of the task at hand."""
    with verifying() as made:
        made.preparer.builder.warm()
        yield made
