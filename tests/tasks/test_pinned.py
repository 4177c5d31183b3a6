"""The night on which the hub cannot be reached: the pinned copy is used and said so, and without
one there is one clear error."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import datasets
import httpx
import pytest

from kernels_eval.errors import UsageError
from tasks.progress import gathering
from tasks.sources import hub, kernelbook
from tasks.sources.config import TasksConfig
from tasks.sources.stage import load_tasks
from tests.support.cases import cases

CASES = cases("pinned")

COMMIT, OTHER = "a" * 40, "b" * 40
CODE = """
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        return x + {number}


def get_inputs():
    return []


def get_init_inputs():
    return [[], {{}}]
"""
ROWS = [
    {"uuid": number, "entry_point": "Model", "python_code": CODE.format(number=number)}
    for number in range(3)
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CONCUR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "DEADLINE_S", 0.05)
    monkeypatch.setattr("tasks.retry.INTERVAL_S", 0.02)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return tmp_path / "cache"


class Hub:
    """What answers in place of the hub: rows, or a fault, which may be of the network or its own
    word."""

    def __init__(self, monkeypatch):
        self.rows, self.commit, self.fault, self.loads, self.asks = ROWS, COMMIT, None, [], 0
        monkeypatch.setattr("datasets.load_dataset", self._load)
        monkeypatch.setattr(hub, "_commit_of", self._commit)

    def _load(self, hub_id, *, split, revision):
        self.loads.append(revision)
        if self.fault:
            raise self.fault
        return datasets.Dataset.from_list(self.rows)

    def _commit(self, hub_id, revision):
        self.asks += 1
        if self.fault:
            raise self.fault
        return self.commit


@pytest.fixture
def answers(monkeypatch):
    return Hub(monkeypatch)


def load(revision=COMMIT):
    with gathering() as cautions:
        return hub.load_rows(kernelbook.HUB_ID, "train", revision, kernelbook.COLUMNS), cautions


DOWN = [
    ConnectionError("Couldn't reach it"),
    TimeoutError("no answer"),
    httpx.ConnectError("refused"),
    httpx.ReadTimeout("silence"),
]


@pytest.mark.parametrize("fault", DOWN, ids=lambda fault: type(fault).__name__)
def test_a_hub_that_is_down_costs_the_night_nothing_but_a_caution(answers, fault):
    assert load() == (ROWS, [])
    answers.fault = fault
    rows, cautions = load()
    assert rows == ROWS and len(answers.loads) > 2, "it was asked again"
    assert (
        len(cautions) == 1
        and COMMIT in cautions[0]
        and "3 rows" in cautions[0]
        and "could not be reached" in cautions[0]
    )


def test_the_newest_copy_stands_in_for_a_branch_and_the_right_one_for_a_commit(answers):
    load(None)
    answers.commit, answers.rows = OTHER, ROWS[:2]
    assert load(None) == (ROWS[:2], [])
    assert answers.loads == [COMMIT, OTHER], (
        "what is loaded is pinned: the commit that the branch is at"
    )
    answers.fault = ConnectionError("no route")
    assert load(None)[0] == ROWS[:2] and load(COMMIT)[0] == ROWS
    with pytest.raises(UsageError, match="no local copy"):
        load("c" * 40)


def test_without_a_copy_there_is_one_error_that_says_how_to_go_on(answers):
    answers.fault = ConnectionError("no route")
    with pytest.raises(
        UsageError,
        match=r"cannot load GPUMODE/KernelBook .* from the hub: no route .*give its path",
    ):
        load()
    assert len(answers.loads) > 1, "it was asked again"


def test_a_hub_that_says_no_is_believed_at_once_and_no_copy_stands_in(answers):
    load()
    answers.fault = datasets.exceptions.DatasetNotFoundError("it is gone")
    with pytest.raises(UsageError, match="it is gone"):
        load()
    assert len(answers.loads) == 2


def test_a_damaged_copy_is_passed_over(answers, cache):
    load(None)
    answers.commit = OTHER
    load(None)
    newest = next(cache.glob(f"hub/*/*/{OTHER}.parquet"))
    newest.write_bytes(newest.read_bytes()[:100])
    answers.fault = ConnectionError("no route")
    rows, cautions = load(None)
    assert rows == ROWS and COMMIT in cautions[0]


def test_a_few_copies_are_kept(answers, cache):
    for number in range(hub.KEPT + 2):
        answers.commit = f"{number:040x}"
        load(None)
    kept = {path.name for path in cache.glob("hub/*/*/*")}
    newest = range(2, hub.KEPT + 2)
    assert kept == {f"{number:040x}.parquet" for number in newest}


def test_a_disk_that_takes_no_copy_costs_nothing(answers, cache):
    cache.write_text("a file where a folder should be")
    assert load() == (ROWS, [])


def test_the_source_uses_the_copy(answers):
    config = TasksConfig(source="kernelbook")
    tasks = load_tasks(config)
    answers.fault = ConnectionError("no route")
    answers.commit = OTHER
    with gathering() as cautions:
        assert load_tasks(config) == tasks
    assert kernelbook.PINNED in cautions[0]


# -- the real client -------------------------------------------------------------------------------


@contextmanager
def broken_hub(status):
    """An address that answers every request of the hub's own client with `status`."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *args):
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("status, down", CASES["what_the_hubs_own_client_raises_is_told_apart"])
def test_what_the_hubs_own_client_raises_is_told_apart(monkeypatch, status, down):
    from huggingface_hub import HfApi

    with broken_hub(status) as (url, asked):
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        with pytest.raises(Exception) as caught:
            HfApi(endpoint=url, token=False).dataset_info("owner/name", timeout=60)
    assert asked and hub.unreachable(caught.value) is down


def test_an_address_where_nobody_listens_is_a_hub_that_is_down(monkeypatch):
    from huggingface_hub import HfApi

    with broken_hub(200) as (url, _):
        pass
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(Exception) as caught:
        HfApi(endpoint=url, token=False).dataset_info("owner/name", timeout=60)
    assert hub.unreachable(caught.value)
