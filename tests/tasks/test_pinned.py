"""The night on which the hub cannot be reached: what its client has kept is used and said so, and
without it there is one clear error. A hub of our own, asked by the real client."""

import pytest

from kernels_eval.errors import UsageError
from tasks.progress import gathering
from tasks.sources import hub
from tests.support.cases import cases
from tests.support.hub_server import hub_of

CASES = cases("pinned")
COMMIT, OTHER = "a" * 40, "b" * 40
ROWS = [{"uuid": number, "code": f"# {number}", "more": 0} for number in range(3)]
WANTED = [{"uuid": row["uuid"], "code": row["code"]} for row in ROWS]


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "DEADLINE_S", 0.05)
    monkeypatch.setattr("tasks.retry.INTERVAL_S", 0.02)
    with hub_of(monkeypatch, tmp_path) as server:
        server.keep(COMMIT, train=ROWS, test=ROWS[:1])
        yield server


def load(revision=None, split="train"):
    with gathering() as cautions:
        return hub.load_rows("owner/name", split, revision, ("uuid", "code")), cautions


def test_a_branch_is_its_newest_commit_and_without_a_hub_the_last_that_was_seen(server):
    assert load() == (WANTED, []) and load(split="test") == (WANTED[:1], [])
    server.keep(OTHER, train=ROWS[:2])
    assert load() == (WANTED[:2], [])
    server.status = 503
    rows, (caution,) = load()
    assert rows == WANTED[:2] and OTHER in caution and "could not be reached" in caution
    assert load(COMMIT) == (WANTED, []), "a commit says what it holds"


def test_a_commit_is_asked_for_once(server):
    assert load(COMMIT) == (WANTED, [])
    server.asked.clear()
    assert load(COMMIT) == (WANTED, []) and server.asked == []


@pytest.mark.parametrize("status", [503, 404, 401])
def test_without_a_copy_and_where_the_hub_says_no_there_is_one_error(server, status):
    if status != 503:
        load()  # no copy stands in for what the hub says does not exist
    server.status = status
    message = r"cannot load owner/name \(split train, revision newest\) from the hub: ."
    with pytest.raises(UsageError, match=message) as caught:
        load()
    assert "give its path" in caught.value.hint


@pytest.mark.parametrize("status, down", CASES["what_the_hubs_own_client_raises_is_told_apart"])
def test_what_the_hubs_own_client_raises_is_told_apart(server, status, down):
    from huggingface_hub import HfApi

    server.status = status
    with pytest.raises(Exception) as caught:
        HfApi(token=False).dataset_info("owner/name", timeout=60)
    assert hub.unreachable(caught.value) is down


def test_an_address_where_nobody_listens_is_a_hub_that_is_down(tmp_path, monkeypatch):
    from huggingface_hub import HfApi

    with hub_of(monkeypatch, tmp_path):
        pass
    with pytest.raises(Exception) as caught:
        HfApi(token=False).dataset_info("owner/name", timeout=60)
    assert hub.unreachable(caught.value)
