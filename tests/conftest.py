"""What all tests share: a home of their own, no network hubs, one thread, quiet Ray, and a marker
for what this machine lacks."""

import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import hypothesis
import pytest

from flows.cli import silence
from kernels_eval.toolchain import default_cache
from tests.support.seeding import seed_generators

hypothesis.settings.register_profile(
    "concur",
    max_examples=40,
    deadline=None,  # it and "too slow" measure the machine
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize=True,
)
hypothesis.settings.load_profile("concur")
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
silence.QUIET_S = 1e6  # what a command prints does not hang on how busy the machine is


def leave_home():
    """Give this process and all that it starts a home of their own, until it ends. Builds stay
    where they are kept (compiling all of them again takes minutes), if that can be written. Of the
    user's home only pip's configuration is read, by a test that installs."""
    own = tempfile.TemporaryDirectory(prefix="concur_home-", ignore_cleanup_errors=True)
    builds, pip = default_cache(), Path("~/.config/pip/pip.conf").expanduser()
    with suppress(OSError):
        builds.mkdir(parents=True, exist_ok=True)
    if not os.access(builds, os.W_OK):
        builds = Path(own.name) / "builds"
    if os.access(pip, os.R_OK):
        os.environ.setdefault("PIP_CONFIG_FILE", str(pip))
    for folder in ("CACHE", "CONFIG", "DATA", "STATE"):
        os.environ.pop(f"XDG_{folder}_HOME", None)
    os.environ |= {"HOME": own.name, "CONCUR_CACHE": str(builds)}
    return own


if "PYTEST_XDIST_WORKER" not in os.environ:  # else it is the home of pytest's own process
    HOME = leave_home()
# tests that judge at the same time do not wait for one another; each process has its own, which
# goes with the home
os.environ["CONCUR_LOCKS"] = tempfile.mkdtemp(prefix="concur_locks-", dir=os.environ["HOME"])


def pytest_runtest_setup():
    """No test depends on those before it: generators start anew, and Ctrl-C works, here and in what
    a test starts. It is ignored where tests were started with `&`, and after a test of how a
    command ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seed_generators()


def pytest_collection_modifyitems(config, items):
    from kernels_eval.devices import visible_gpus

    if not visible_gpus():
        for item in items:
            if item.get_closest_marker("gpu"):  # a folder may have that name
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory):
    """The environment of a client of the session's Prefect server."""
    from tests.support.shared import service, session_folder

    return service("prefect", session_folder(tmp_path_factory))


@pytest.fixture(scope="session")
def ray_head(tmp_path_factory):
    """The environment of a driver of the session's Ray head, without GPUs."""
    from tests.support.shared import service, session_folder

    return service("ray", session_folder(tmp_path_factory))


@pytest.fixture(scope="session")
def servers(prefect_api, ray_head):
    """The environment of a command that uses both: it starts in a second, not in twenty."""
    return prefect_api | ray_head


@pytest.fixture(scope="module")
def prefect_home(prefect_api, tmp_path_factory):
    """A home of its own with stored results, for flows in this process; the server is the
    session's."""
    from prefect import settings

    home = tmp_path_factory.mktemp("prefect")
    updates = {
        settings.PREFECT_API_URL: prefect_api["PREFECT_API_URL"],
        settings.PREFECT_HOME: home,
        settings.PREFECT_LOCAL_STORAGE_PATH: home / "storage",
    }
    with settings.temporary_settings(updates=updates):
        yield home
