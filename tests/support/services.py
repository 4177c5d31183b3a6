"""A verification service in this process, without workers: the test reaches the verdicts. And
requests for it."""

import socket
import sys
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from functools import lru_cache

import httpx
import uvicorn

from kernels_eval.records import Language, Verdict
from kernels_eval.service.app import Intake, Service, create_app
from kernels_eval.service.schema import EvaluationRequest
from tasks.synthesis.parsing import parse_response
from tests.support.kernels import AFFINE, QUICK
from tests.support.processes import ROOT
from tests.support.servers import clean_environment, logged

MODULE = "import torch\nclass ModelNew(torch.nn.Module):\n    pass  # {}\n"
URL = "http://127.0.0.1"


def service(folder, *, limit=100):
    intake = Intake(Language.CPP, QUICK, {AFFINE.task_id: AFFINE}, parse_response)
    return Service(intake, folder / "journal.sqlite3", {}, limit, 1.0)


app_of = lru_cache(maxsize=4)(create_app)


@asynccontextmanager
async def asking(made, token=None, base_url=URL):
    """A client of the application itself, no network between them."""
    transport = httpx.ASGITransport(app_of(made, token))
    async with httpx.AsyncClient(transport=transport, base_url=base_url) as client:
        yield client


@contextmanager
def listening(made, port=0):
    """The port (this one, or a free one) of a real server of the application, in a thread."""
    options = {"ws": "none", "log_level": "error", "lifespan": "off"}
    options |= {"timeout_keep_alive": 1}
    server = uvicorn.Server(uvicorn.Config(create_app(made), **options))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield listener.getsockname()[1]
        finally:
            made.stop()
            server.should_exit = True
            thread.join()


@contextmanager
def serving(folder, port, *options):
    """The process of `concur serve` with quick timing; its log, and its journal, are in the
    folder."""
    words = ["serve", "--port", str(port), "--language", "cpp", "--quick", *options]
    for setting in ("timing.max_s=5", "timing.min_pairs=6", "build.timeout_s=600"):
        words += ["--set", setting]
    words += ["--set", "limits.load_s=60", "--journal", str(folder / "serve.sqlite3")]
    with logged(
        [sys.executable, "-m", "flows.cli", *words],
        folder / "log",
        env=clean_environment() | {"PYTHONPATH": ROOT},
        cwd=folder,
    ) as process:
        yield process


def request(number=0, **fields):
    """A request for a candidate of its own."""
    given = {"task_id": AFFINE.task_id, "code": MODULE.format(number)} | fields
    return EvaluationRequest.model_validate(
        {name: value for name, value in given.items() if value is not None}
    )


def reach(made, **fields):
    """Give every candidate that waits a verdict; how many there were."""
    reached = 0
    while pair := made.evaluations.take():
        task, candidate = pair
        told = {"status": "correct", "reason": "ok", "language": candidate.language} | fields
        names = {"candidate_id": candidate.candidate_id, "task_id": task.task_id}
        made.evaluations.reached(Verdict.model_validate(told | names))
        reached += 1
    return reached
