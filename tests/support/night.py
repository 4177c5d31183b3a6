"""A Prefect server and a process worker of a test's own, and what a night's run leaves behind on
the machine.

Guarantees: everything that is started here ends with its block, whatever happens in it; the
processes of a run are found by the tree below the worker, sampled while it works, and by a marker
in the environment: what leaves the tree keeps one of the two.
"""

import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

import flows
from tests.support.processes import processes_with
from tests.support.servers import clean_environment, end, prefect_server
from tests.support.waiting import until

ROOT = Path(flows.__file__).parent.parent
POOL = "nights"
MARK = "CONCUR_TEST_NIGHT"
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def request_json(url, body=None, method=None):
    """The JSON that a server answers: plain HTTP, so that no setting of Prefect's leaks into the
    tests. Raises OSError where it is not there."""
    request = urllib.request.Request(
        url,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
        method=method,
    )
    for attempt in range(5):
        try:
            with DIRECT.open(request, timeout=60) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            # its database was busy for a moment: Prefect's own client asks again, too
            if error.code != 503 or attempt == 4:
                raise
            time.sleep(1)
    raise AssertionError("not reached")


class PrefectClient:
    """What tests ask the Prefect server whose API is at `url`."""

    def __init__(self, url):
        self.url = url

    def ask(self, path, body=None, method=None):
        return request_json(f"{self.url}/{path}", body, method)

    def start(self, deployment, **parameters):
        """The id of a flow run."""
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        return self.ask(f"deployments/{deployment}/create_flow_run", body)["id"]

    def state(self, run):
        return self.ask(f"flow_runs/{run}")["state"]

    def set_state(self, run, kind, name="", message=""):
        """What the UI's buttons do."""
        state = {"type": kind, "name": name or kind.title(), "message": message}
        return self.ask(f"flow_runs/{run}/set_state", {"state": state, "force": False})

    def artifacts(self, key):
        body = {"artifacts": {"key": {"any_": [key]}}, "sort": "CREATED_DESC"}
        return self.ask("artifacts/filter", body)


class Night(PrefectClient):
    """A server of a test's own, with `environment` for its worker and clients."""

    def __init__(self, url, environment, log, server):
        super().__init__(url)
        self.environment, self.log, self.server = environment, log, server
        self.mark = environment[MARK]

    def deployment(self, name, flow, entrypoint, **more):
        """The id of a deployment on the pool."""
        body = {
            "name": name,
            "flow_id": self.ask("flows/", {"name": flow})["id"],
            "entrypoint": entrypoint,
            "work_pool_name": POOL,
            "enforce_parameter_schema": False,
        }
        return self.ask("deployments/", body | more)["id"]

    def ended(self, run, timeout_s):
        def over():
            state = self.state(run)
            return state if state["type"] in ENDED else None

        def what():
            return f"the end of {run} ({self.log.read_text(errors='replace')[-3000:]})"

        return until(over, what, timeout_s, every_s=0.5)

    def processes(self):
        """All with this night's marker in their environment, the server and the worker apart."""
        return set(processes_with(MARK, self.mark))


class Watched:
    """Every process that is ever seen below a worker, and every one that carries the marker. A
    thread looks five times a second."""

    def __init__(self, night, worker):
        self.worker = worker
        self._night, self._seen, self._stop = night, set(), threading.Event()
        server = psutil.Process(night.server)
        self._own = {psutil.Process(worker.pid), server, *server.children(recursive=True)}
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self):
        while not self._stop.wait(0.2):
            with suppress(psutil.Error):
                self._seen |= set(psutil.Process(self.worker.pid).children(recursive=True))

    def left(self):
        """Those that still run."""
        server = set()
        with suppress(psutil.Error):
            server = set(psutil.Process(self._night.server).children(recursive=True))
        found = []
        for process in (self._seen | self._night.processes()) - self._own - server:
            with suppress(psutil.Error):
                words = process.cmdline()
                # the worker's own: it runs the hooks of a run that has ended in a process of its
                # own
                hook = "_workspace_runtime_bootstrap" in " ".join(words) and "hook" in words
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE and not hook:
                    found.append(process)
        return found

    def names(self):
        said = []
        for process in self.left():
            with suppress(psutil.Error):
                said.append(f"{process.pid} {' '.join(process.cmdline())[:160]}")
        return said

    def end(self):
        self._stop.set()
        self._thread.join()
        for process in self.left():
            with suppress(psutil.Error):
                process.kill()


@contextmanager
def night(home, **settings):
    """A server whose environment, with `settings` on top, is the worker's, too."""
    common = {
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PYTHONPATH": str(ROOT),
        MARK: uuid.uuid4().hex,
        **settings,
    }
    with prefect_server(home, **common) as server:
        environment = clean_environment() | dict(server.environment) | common
        environment |= {"PREFECT_HOME": str(home / "prefect"), "DO_NOT_TRACK": "1"}
        found = Night(server.api_url, environment, server.log, server.pid)
        template = process_template()
        found.ask("work_pools/", {"name": POOL, "type": "process", "base_job_template": template})
        yield found


@contextmanager
def worker(night, **environment):
    """A process worker of the pool; what it leaves behind is killed at the end."""
    words = ["prefect", "worker", "start", "--pool", POOL, "--type", "process"]
    with night.log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            env=night.environment | environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=night.log.parent,
        )
    watched = Watched(night, process)
    try:
        yield watched
    finally:
        end(process)
        watched.end()


def process_template():
    """The base job template of process workers, as `prefect work-pool create --type process` takes
    it."""
    from prefect.workers.process import ProcessWorker

    return ProcessWorker.get_default_base_job_template()
