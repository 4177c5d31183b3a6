"""One Prefect server and one Ray head for a whole session of pytest, whoever of its processes asks
first.

Guarantees: each is started once, under a file lock; a keeper ends it with everything it started as
soon as pytest's own process is gone, however that ended. Data lie in the session's temporary
folder. Does not isolate its users from each other: give blocks, deployments and runs names of
their own.
"""

import json
import os
import re
import select
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from filelock import FileLock

from tests.support.servers import clean_environment, free_ports, prefect_server

ATTEMPTS = 20
"""Ray gives its processes 30 s, which a busy machine does not have: then it is started again."""
CORES = 8
"""What the Ray head hands out: several tests hold some at once, and wait for nobody."""


def service(name, folder):
    """The environment of a client of `name` (prefect, ray), which is started unless it runs."""
    folder.mkdir(parents=True, exist_ok=True)
    answer = folder / f"{name}.json"
    with FileLock(folder / f"{name}.lock"):
        if not answer.exists():
            words = [sys.executable, "-m", "tests.support.shared", name, str(folder)]
            root = Path(__file__).parents[2]
            with (folder / f"{name}.log").open("wb") as log:
                keeper = subprocess.Popen(
                    [*words, str(session_pid())],
                    cwd=root,
                    env=clean_environment() | {"PYTHONPATH": str(root)},
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                )
            told = keeper.stdout.readline()
            assert told, (folder / f"{name}.log").read_text(errors="replace")[-3000:]
            answer.write_text(told)
    return json.loads(answer.read_text())


def session_pid():
    """pytest's own process: the parent of each of xdist's."""
    return os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()


def session_folder(tmp_path_factory):
    """A folder that all processes of the session share."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"


def start_prefect(folder, stack):
    served = stack.enter_context(prefect_server(folder / "prefect"))
    return dict(served.environment)


def start_ray(folder, stack):
    # its sockets' paths may have 107 characters, and another head's notes are in Ray's own place
    own = stack.enter_context(TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True))
    for _ in range(ATTEMPTS):
        ports = free_ports(2)
        words = [
            *("flows.stack.head", "start", "--head", "--block", f"--num-cpus={CORES}"),
            *("--num-gpus=0", "--include-dashboard=false", "--disable-usage-stats"),
            *(f"--port={ports[0]}", f"--ray-client-server-port={ports[1]}"),
            *("--min-worker-port=0", "--max-worker-port=0", f"--temp-dir={own}"),
        ]
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            env=os.environ | {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
            start_new_session=True,
        )
        stack.callback(kill, process)
        for line in process.stdout:
            if found := re.search(r"--address='([\d.]+:\d+)'", line):
                return {"RAY_ADDRESS": found[1]}
        kill(process)
    raise RuntimeError(f"Ray did not start in {ATTEMPTS} attempts")


def kill(process):
    """Ray would take half a minute to end by itself."""
    if process.poll() is not None:
        return
    below = psutil.Process(process.pid).children(recursive=True)
    for each in (psutil.Process(process.pid), *below):
        with suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(below)


def main(name, folder, session):
    """Start a service, print a client's environment, and end it with the process `session`."""
    handle = os.pidfd_open(int(session))
    with ExitStack() as stack:
        starts = {"prefect": start_prefect, "ray": start_ray}
        print(json.dumps(starts[name](Path(folder), stack)), flush=True)
        select.select([handle], [], [])


if __name__ == "__main__":
    main(*sys.argv[1:])
