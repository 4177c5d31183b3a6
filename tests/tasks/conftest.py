"""Fixtures that several files of tests share."""

from __future__ import annotations

import pytest

from tests.support.training import tiny_model


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A tiny base model; files that need another one have a fixture of the same name."""
    return tiny_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def prefect_home(tmp_path_factory):
    """A Prefect of its own: server, database and stored results end with the file of tests."""
    from prefect import settings
    from prefect.testing.utilities import prefect_test_harness

    home = tmp_path_factory.mktemp("prefect")
    updates = {settings.PREFECT_HOME: home, settings.PREFECT_LOCAL_STORAGE_PATH: home / "storage"}
    with (
        settings.temporary_settings(updates=updates),
        prefect_test_harness(server_startup_timeout=120),
    ):
        yield home
