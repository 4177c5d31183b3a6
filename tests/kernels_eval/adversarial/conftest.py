"""One verifier for the whole corpus: a fork server, a cache of libraries, and the reference of the
task at hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernels import Verifier, verifying


@pytest.fixture(scope="session")
def judge() -> Iterator[Verifier]:
    with verifying() as made:
        yield made
