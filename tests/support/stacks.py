"""A stack of `concur up` in a folder of a test: started by the command as a user would, asked
through its servers' own APIs.

Guarantees: ports are free ones, no setting of Prefect's, MLflow's or Ray's of the caller leaks in,
and whatever a test did, no process of the stack is left when its block ends.
"""

import json
import shlex
import sqlite3
import sys
from contextlib import closing, contextmanager, suppress

import psutil

from flows.stack.control import RUN_VARIABLE
from flows.stack.layout import ROOT_VARIABLE, Layout
from kernels_eval.sandbox.process_tree import send, wait_gone
from tests.support import commands
from tests.support.night import PrefectClient, request_json
from tests.support.servers import free_ports, two_ports

PORTS = ("prefect", "mlflow", "ray")


class Stack(PrefectClient):
    """One stack, and a client of it."""

    def __init__(self, root, *options, **environment):
        self.root, self.layout, self.options = root, Layout(root), options
        self.ports = dict(zip(PORTS, [*free_ports(2), two_ports()], strict=True))
        self.environment = commands.environment(PREFECT_CLI_PROMPT="false", **environment)
        self.prefect, self.mlflow = (
            f"http://127.0.0.1:{self.ports[name]}" for name in ("prefect", "mlflow")
        )
        super().__init__(f"{self.prefect}/api")

    # -- the command -------------------------------------------------------------------------------

    def command(self, *words):
        return self.python("flows.cli", *words, "--root", str(self.root))

    def python(self, *words):
        return commands.run([sys.executable, "-m", *words], self.environment)

    def up(self, *options):
        ports = [f"--{name}-port={port}" for name, port in self.ports.items()]
        done = self.command("up", *ports, *self.options, *options)
        assert done.returncode == 0, done.stderr
        told = shlex.split(self.command("env").stdout)
        self.environment |= {
            name: value
            for name, separator, value in (word.partition("=") for word in told)
            if separator
        }
        return done

    def look(self):
        """What `concur status --json` says; its exit status agrees."""
        done = self.command("status", "--json")
        data = json.loads(done.stdout)
        assert (done.returncode == 0) == data["healthy"]
        return data

    def status(self):
        """Part -> its row of `concur status --json`."""
        return {row["part"]: row for row in self.look()["parts"]}

    def prefect_done(self, *words):
        """Run a command of Prefect's as a client of the stack."""
        done = self.python("prefect", "--no-prompt", *words)
        assert done.returncode == 0, done.stdout + done.stderr

    def deploy(self, name):
        """The id of a deployment of prefect.yaml, FLOW/NAME."""
        self.prefect_done("deploy", "--name", name.partition("/")[2])
        return self.deployment(name)

    def deployment(self, name):
        """The id of one that is deployed, FLOW/NAME."""
        return self.ask(f"deployments/name/{name.replace(' ', '%20')}")["id"]

    def log(self, part):
        return self.layout.log(part).read_text(errors="replace")

    # -- MLflow ------------------------------------------------------------------------------------

    def tracked(self, profile):
        """MLflow's runs of a configuration's name that nobody deleted, with their children:
        `status`, `metrics`, `children`."""

        def ask(what, body):
            return request_json(f"{self.mlflow}/api/2.0/mlflow/{what}/search", body)

        experiments = ask("experiments", {"max_results": 100})["experiments"]
        ids = [one["experiment_id"] for one in experiments]
        runs = ask("runs", {"experiment_ids": ids, "max_results": 1000}).get("runs", [])
        tags = {
            run["info"]["run_id"]: {tag["key"]: tag["value"] for tag in run["data"].get("tags", [])}
            for run in runs
        }

        def of(key, value):
            return [told(run) for run in runs if tags[run["info"]["run_id"]].get(key) == value]

        def told(run):
            return {
                "status": run["info"]["status"],
                "metrics": {each["key"]: each["value"] for each in run["data"].get("metrics", [])},
                "children": of("mlflow.parentRunId", run["info"]["run_id"]),
            }

        return of("profile", profile)

    def is_being_tracked(self):
        """Whether a run of MLflow is being written. Read from its database: a server that is asked
        all the time would be the slower for it."""
        file, count = f"file:{self.root}/mlflow.db?mode=ro", "select count(*) from runs"
        with suppress(sqlite3.Error):
            with closing(sqlite3.connect(file, uri=True, timeout=5)) as database:
                return database.execute(f"{count} where status = 'RUNNING'").fetchone()[0] > 0
        return False

    # -- its processes -----------------------------------------------------------------------------

    def engines(self):
        """Those that carry out a flow run."""
        found = set()
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                environment = process.environ()
                mine = environment.get(ROOT_VARIABLE) == str(self.root)
                if mine and RUN_VARIABLE in environment and "prefect.engine" in process.cmdline():
                    found.add(process)
        return found

    def processes(self):
        return self.layout.processes()

    def kill_all(self):
        """All processes of the stack are killed at once, as by a power cut."""
        while left := self.processes():
            for one in left:
                send(one, 9)
            wait_gone(left, 1.0)

    def end(self):
        self.command("down")
        self.kill_all()


@contextmanager
def stack(root, *options, **environment):
    """A stack that is up."""
    found = Stack(root, *options, **environment)
    try:
        found.up()
        yield found
    finally:
        found.end()
