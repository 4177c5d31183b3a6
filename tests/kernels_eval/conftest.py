"""What several files of tests share: starting it takes seconds."""

import os
from contextlib import ExitStack, nullcontext
from functools import cache

import pytest

from kernels_eval.config import EvalConfig
from tests.support.kernels import QUICK, verifying
from tests.support.seeding import seed_judge


@pytest.fixture(autouse=True)
def seeded_draws(monkeypatch):
    seed_judge(monkeypatch)


@pytest.fixture(scope="session")
def verifiers():
    """A verifier for each configuration that is asked for: the references of its task at hand. All
    share a fork server and a cache of libraries."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    with ExitStack() as stack:

        @cache
        def made(config=QUICK):
            found = stack.enter_context(verifying(config))
            builder = found.preparer.builder
            builder.warm(worker, workers)  # no process waits for what another one makes
            builder.warm()
            return found

        yield made


@pytest.fixture(scope="session")
def verify(verifiers):
    """A verifier of `tests.support.kernels.QUICK`."""
    return verifiers()


@pytest.fixture
def judging_here(verifiers, monkeypatch):
    """Commands that are called in this process judge with its verifiers."""

    def kept(_, config=None, **__):
        return nullcontext(verifiers(config or EvalConfig()).evaluator)

    monkeypatch.setattr("kernels_eval.evaluator.Evaluator", kept)
    monkeypatch.setattr("kernels_eval.sandbox.server_handle.ForkServer", lambda **_: None)


@pytest.fixture(scope="module")
def joined_ray(ray_head):
    """This process is a driver of the session's Ray head."""
    import ray

    from kernels_eval.pool.ray import start_ray

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ray_head.items():
            patch.setenv(name, value)
        start_ray()
        yield
        ray.shutdown()
