"""What all tests share: no network hubs, one thread, quiet Ray, and a marker for what this machine
lacks."""

import os
import signal

import hypothesis
import pytest

hypothesis.settings.register_profile(
    "concur", deadline=None
)  # the first call imports scipy: what a deadline measures is the machine
hypothesis.settings.load_profile("concur")
signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # it is ignored, here and in every child, where tests were started with `&`

for name, value in {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "WARNING",
}.items():
    os.environ.setdefault(name, value)


def pytest_collection_modifyitems(config, items):
    from kernels_eval.devices import visible_gpus

    if not visible_gpus():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


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
