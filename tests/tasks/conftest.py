"""Fixtures that several files of tests share."""

import pytest

from tasks.observe import stage
from tests.support.planted import planted
from tests.support.training import tiny_model


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A tiny base model; files that need another one have a fixture of the same name."""
    return tiny_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="session")
def recomputed(tmp_path_factory):
    """A root of training sets and scores that the stages made of synthetic verdicts."""
    from tests.support.recomputed import make

    return make(tmp_path_factory.mktemp("recomputed"))


@pytest.fixture(scope="session")
def analysed(tmp_path_factory):
    """Snapshots of verdicts, of their candidates and of the analysis of both."""
    refs = planted(tmp_path_factory.mktemp("analysed"), 400)
    return *refs, stage.run(*refs)
