"""One verifier for the whole corpus: a fork server, a cache of libraries, and the reference of the
task at hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernels_eval.parent.prepare import Preparer
from kernels_eval.parent.runner import Runner
from tests.support.adversarial import Judge
from tests.support.kernels import QUICK


@pytest.fixture(scope="session")
def judge() -> Iterator[Judge]:
    made = Judge(Preparer(QUICK), Runner(QUICK, "cpu"))
    yield made
    made.close()
