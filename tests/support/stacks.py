"""A stack of `concur up` in a folder of a test: started by the command as a user would, asked
through its servers' own APIs.

Guarantees: ports are free ones, no setting of Prefect's, MLflow's or Ray's of the caller leaks in,
and whatever a test did, no process of the stack is left when its block ends. Requests to a server
that is down for a moment fail; `until` is for who wants to wait.
"""

from __future__ import annotations

import json
import os
import shlex
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

import flows
from flows.ops.places import Places, read_state
from flows.ops.processes import MARK, members, send, wait_gone
from tests.support.night import free_port

REPOSITORY = Path(flows.__file__).parent.parent
FOREIGN = ("PREFECT_", "MLFLOW_", "RAY_", "CONCUR_ROOT", MARK)
PORTS = ("prefect", "mlflow", "worker", "ray", "ray-client")
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def engines(root: Path) -> set[psutil.Process]:
    """Processes that carry out a flow run of the stack of a root."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if "prefect.engine" in process.cmdline() and process.environ().get(MARK) == str(root):
                found.add(process)
    return found


class Stack:
    """One running stack, and a client of it."""

    def __init__(self, root: Path, **environment: str) -> None:
        self.root = root
        self.ports = {name: free_port() for name in PORTS}
        clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        self.environment = (
            clean
            | {"PYTHONPATH": str(REPOSITORY), "PREFECT_CLI_PROMPT": "false", "DO_NOT_TRACK": "1"}
            | environment
        )
        self.prefect, self.mlflow = (
            f"http://127.0.0.1:{self.ports[name]}" for name in ("prefect", "mlflow")
        )

    # -- the command -------------------------------------------------------------------------------

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        told = [sys.executable, "-m", "flows.cli", *words, "--root", str(self.root)]
        return subprocess.run(
            told,
            capture_output=True,
            text=True,
            timeout=900,
            env=self.environment,
            stdin=subprocess.DEVNULL,
        )

    def up(self) -> None:
        done = self.command(
            "up",
            *(f"--{name}-port={port}" for name, port in self.ports.items()),
            "--timeout",
            "600",
        )
        assert done.returncode == 0, done.stderr
        told = shlex.split(self.command("env").stdout)
        self.environment |= dict(word.split("=", 1) for word in told if "=" in word)

    def status(self) -> dict[str, dict[str, Any]]:
        """Part -> its row of `concur status --json`."""
        return {
            row["part"]: row for row in json.loads(self.command("status", "--json").stdout)["parts"]
        }

    def deploy(self, name: str) -> str:
        """The id of a deployment of prefect.yaml, FLOW/NAME."""
        told = [
            sys.executable,
            "-m",
            "prefect",
            "--no-prompt",
            "deploy",
            "--name",
            name.partition("/")[2],
        ]
        done = subprocess.run(
            told, capture_output=True, text=True, timeout=300, env=self.environment, cwd=REPOSITORY
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return self.deployment(name)

    def deployment(self, name: str) -> str:
        """The id of one that is deployed, FLOW/NAME."""
        return self.ask(f"deployments/name/{name.replace(' ', '%20')}")["id"]

    def start(self, deployment: str, **parameters: Any) -> str:
        """The id of a flow run."""
        return self.ask(
            f"deployments/{deployment}/create_flow_run",
            {"parameters": parameters, "state": {"type": "SCHEDULED"}},
        )["id"]

    def log(self, part: str) -> str:
        return Places(self.root).log(part).read_text(errors="replace")

    # -- its servers -------------------------------------------------------------------------------

    def ask(self, path: str, body: Any = None, url: str | None = None) -> Any:
        """Prefect's API, or that of `url`. Raises OSError where the server is not there."""
        request = urllib.request.Request(
            f"{url or f'{self.prefect}/api'}/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        for attempt in range(5):
            try:
                with DIRECT.open(request, timeout=60) as answer:
                    return json.loads(answer.read() or b"null")
            except urllib.error.HTTPError as error:
                if (
                    error.code != 503 or attempt == 4
                ):  # its database was busy for a moment: Prefect's own client asks again, too
                    raise
                time.sleep(1)

    def tracked(self, profile: str) -> list[dict[str, Any]]:
        """MLflow's runs of a configuration's name that nobody deleted, with their children:
        `status`, `metrics`, `children`."""
        experiments = self.ask(
            "api/2.0/mlflow/experiments/search", {"max_results": 100}, self.mlflow
        )["experiments"]
        asked = {
            "experiment_ids": [one["experiment_id"] for one in experiments],
            "max_results": 1000,
        }
        runs = self.ask("api/2.0/mlflow/runs/search", asked, self.mlflow).get("runs", [])
        tags = {
            run["info"]["run_id"]: {tag["key"]: tag["value"] for tag in run["data"].get("tags", [])}
            for run in runs
        }

        def told(run: dict[str, Any]) -> dict[str, Any]:
            metrics = {metric["key"]: metric["value"] for metric in run["data"].get("metrics", [])}
            below = [
                each
                for each in runs
                if tags[each["info"]["run_id"]].get("mlflow.parentRunId") == run["info"]["run_id"]
            ]
            return {
                "status": run["info"]["status"],
                "metrics": metrics,
                "children": [told(each) for each in below],
            }

        return [told(run) for run in runs if tags[run["info"]["run_id"]].get("profile") == profile]

    def is_being_tracked(self) -> bool:
        """Is a run of MLflow being written? Read from its database: a server that is asked all the
        time would be the slower for it."""
        with (
            suppress(sqlite3.Error),
            closing(
                sqlite3.connect(f"file:{self.root}/mlflow.db?mode=ro", uri=True, timeout=5)
            ) as database,
        ):
            return (
                database.execute("select count(*) from runs where status = 'RUNNING'").fetchone()[0]
                > 0
            )
        return False

    # -- its processes -----------------------------------------------------------------------------

    def engines(self) -> set[psutil.Process]:
        return engines(self.root)

    def cut_power(self) -> None:
        """All processes of the stack, its supervisor's first, are killed at once: nothing is
        written any more and nobody is told."""
        state = read_state(Places(self.root))
        assert state is not None
        send(state.supervisor, 9)
        while left := members(
            str(self.root), [part.identity for part in state.parts.values() if part.identity]
        ):
            for one in left:
                send(one, 9)
            wait_gone(left, 1.0)

    def end(self) -> None:
        self.command("down")
        state = read_state(Places(self.root))
        for one in members(
            str(self.root),
            [part.identity for part in state.parts.values() if part.identity] if state else [],
        ):
            send(one, 9)


@contextmanager
def stack(root: Path, **environment: str) -> Iterator[Stack]:
    found = Stack(root, **environment)
    try:
        found.up()
        yield found
    finally:
        found.end()
