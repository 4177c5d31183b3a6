"""Secrets that are planted in the environment of a real refresh are nowhere afterwards, and in no
list of processes meanwhile."""

import base64
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.sources.bundled import load, responses
from tests.support.chat_server import completion, serving
from tests.support.servers import clean_environment, mlflow_server, prefect_server
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
AUTH = find_spec("flask_wtf") is not None
"""MLflow's basic auth needs it. Without, the server asks for no password, and its client sends it
all the same."""
EXFILTRATING = """<think>The environment may hold something.</think>
```python
import torch
found = open("/proc/self/environ").read()
try:
    found += open(f"/proc/{__import__('os').getppid()}/environ").read()
except OSError as error:
    found += str(error)
raise RuntimeError(found)
class ModelNew(torch.nn.Module):
    pass
```"""


def forms(secrets):
    """Each secret as it is, and in base64 as an HTTP header has it, wherever it begins in there."""
    found = []
    for secret in secrets:
        found.append(secret.encode())
        for shift in range(3):
            inner = base64.b64encode(b"\0" * shift + secret.encode()).decode()
            found.append(inner[4 if shift else 0 : len(inner) // 4 * 4 - 4].encode())
    return found


def readings(path):
    """A file's bytes, and where they are packed what is in them."""
    yield path.read_bytes()
    if path.suffix == ".parquet":
        yield str(pq.read_table(path).to_pylist()).encode("utf-8", "replace")


def leaks(folders, wanted, leave=()):
    skipped = set(leave)
    files = [
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and path not in skipped
    ]
    assert files
    return [
        f"{one!r} in {path}"
        for path in files
        for data in readings(path)
        for one in wanted
        if one in data
    ]


@contextmanager
def watched_command_lines():
    """The command lines of all processes that were there at some time inside the block, asked for
    as often as possible."""
    seen = set()
    ended = threading.Event()

    def look():
        while not ended.is_set():
            for pid in psutil.pids():
                try:
                    seen.add(Path(f"/proc/{pid}/cmdline").read_bytes())
                except OSError:
                    continue
            ended.wait(0.05)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def test_what_is_planted_is_found(tmp_path):
    """Otherwise the test below could not fail."""
    wanted = forms(["canary-abcdefghij"])
    packed = pa.table({"x": ["a" * 5000 + " canary-abcdefghij"]})
    pq.write_table(packed, tmp_path / "a.parquet", compression="zstd")
    with sqlite3.connect(tmp_path / "b.db") as database:
        database.execute("create table t (x text)")
        database.execute("insert into t values ('canary-abcdefghij')")
    database.close()
    (tmp_path / "c.log").write_text(
        "Authorization: Basic " + base64.b64encode(b"user:canary-abcdefghij").decode()
    )
    names = {Path(each.split(" in ")[1]).name for each in leaks([tmp_path], wanted)}
    assert names == {"a.parquet", "b.db", "c.log"}
    with watched_command_lines() as seen:
        words = [sys.executable, "-c", "import sys; sys.stdin.read()", "canary-abcdefghij"]
        with subprocess.Popen(words, stdin=subprocess.PIPE) as child:
            until(lambda: any(b"canary-abcdefghij" in line for line in seen.copy()), "its words")
            child.communicate()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_refresh_leaves_its_secrets_nowhere(tmp_path):
    mark = os.urandom(6).hex()
    secrets = {name: f"canary-{name}-{mark}" for name in ("hub", "generator", "mlflow", "prefect")}
    login = {"user": "admin", "password": secrets["mlflow"]}
    # answers to the task that `tasks.limit=1` takes; some are correct
    answers = [EXFILTRATING, *responses(load("train")[0].name, "cpp")][:4]
    # Ray's sockets allow no long path
    root, ray = tmp_path / "root", Path(tempfile.mkdtemp(prefix="cr-", dir="/tmp"))
    try:
        with (
            watched_command_lines() as lines,
            serving(lambda number, _: (200, completion(answers[number % 4]))) as endpoint,
            prefect_server(
                tmp_path / "prefect", auth_string=f"admin:{secrets['prefect']}"
            ) as prefect,
            mlflow_server(tmp_path / "mlflow", **(login if AUTH else {})) as mlflow,
        ):
            environment = {
                **clean_environment(),
                **prefect.environment,
                **mlflow.environment,
                "MLFLOW_TRACKING_USERNAME": "admin",
                "MLFLOW_TRACKING_PASSWORD": secrets["mlflow"],
                "HF_TOKEN": secrets["hub"],
                "OPENAI_API_KEY": secrets["generator"],
                "RAY_TMPDIR": str(ray),
                "PYTHONPATH": str(ROOT),
                "PREFECT_LOGGING_LEVEL": "DEBUG",
            }
            command = [sys.executable, "-m", "tests.support.secret_run", str(root), endpoint.url]
            done = subprocess.run(
                command, env=environment, cwd=tmp_path, capture_output=True, timeout=600
            )
            said = done.stdout + done.stderr
            assert done.returncode == 0, said.decode(errors="replace")[-3000:]
            assert b"rows 4" in done.stdout
            # the secrets were in use: whoever has them not is refused
            assert endpoint.headers[0]["authorization"] == f"Bearer {secrets['generator']}"
            assert _refused(f"{prefect.api_url}/admin/version")
            assert not AUTH or _refused(
                f"{mlflow.url}/api/2.0/mlflow/experiments/get?experiment_id=0"
            )
        wanted = forms(secrets.values())
        own = [tmp_path / "mlflow" / "basic_auth.ini"]  # what this test gave to MLflow's server
        assert leaks([root, tmp_path / "prefect", tmp_path / "mlflow", ray], wanted, own) == []
        assert [one for one in wanted if one in said] == []
        assert [line for line in lines for one in wanted if one in line] == []
        assert re.search(rb"secret_run", b" ".join(lines))  # the command was seen among them
        (verdicts,) = root.glob("verification/*/part-*.parquet")
        assert len(pq.read_table(verdicts)) == 4
    finally:
        shutil.rmtree(ray, ignore_errors=True)


def _refused(url):
    return httpx.get(url, timeout=30, trust_env=False).status_code in (401, 403)
