"""Pushing to a hub that is kept in memory: what is sent, what is refused, and that the token shows
up nowhere."""

import logging
import shutil

import httpx
import pytest
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from kernels_eval.errors import EvalError, UsageError
from tasks.publishing import hub
from tasks.publishing.config import PublishOptions
from tasks.publishing.hub import push_to_hub
from tasks.publishing.publish import publish
from tests.support.curated import line, sample
from tests.support.hub_server import FakeHub, contents, empty

TOKEN = "hf_thisIsTheSecret"
REPO = "somebody/kernels"


@pytest.fixture
def fake(monkeypatch):
    fake = FakeHub()

    def api(token):
        assert token == TOKEN
        return fake

    monkeypatch.setattr(hub, "_api", api)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return fake


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("made")
    rows = [sample("t/1", 0, 10, 6.0), sample("t/2", 0, 10, 6.0)]
    publish(line(directory / "root", rows), directory / "out")
    return directory / "out"


@pytest.fixture
def folder(tmp_path, made):
    shutil.copytree(made, tmp_path / "out")
    return tmp_path / "out"


def test_a_push_sends_the_folder_once_and_tags_the_commit(fake, folder):
    pushed = push_to_hub(folder, REPO)
    repo = fake.repos[REPO]
    assert repo["private"] and pushed.private and pushed.sent
    assert repo["tags"] == {pushed.tag: "commit1"} and repo["files"] == contents(folder)
    assert pushed.url == f"https://hub.invalid/datasets/{REPO}/tree/{pushed.tag}"
    fake.calls.clear()
    second = push_to_hub(folder, REPO)
    assert not second.sent and second.tag == pushed.tag and "upload_folder" not in fake.calls


def test_the_next_refresh_removes_what_it_no_longer_has_and_keeps_files_of_others(
    fake, folder, tmp_path
):
    push_to_hub(folder, REPO)
    old = (".gitattributes", "data/train-00000-of-00009.parquet")
    fake.repos[REPO]["files"] |= dict.fromkeys(old, b"old")
    ref = line(tmp_path / "root", [sample("t/3", 0, 10, 6.0)])
    publish(ref, folder, PublishOptions(license="mit"))
    pushed = push_to_hub(folder, REPO)
    assert set(fake.repos[REPO]["files"]) == {".gitattributes", *contents(folder)}
    assert len(fake.repos[REPO]["tags"]) == 2 and fake.repos[REPO]["tags"][pushed.tag] == "commit2"


def test_without_a_token_nothing_is_sent(fake, folder, monkeypatch):
    for value in (None, " "):
        monkeypatch.delenv("HF_TOKEN") if value is None else monkeypatch.setenv("HF_TOKEN", value)
        with pytest.raises(UsageError, match="no token for the hub in HF_TOKEN.*export HF_TOKEN"):
            push_to_hub(folder, REPO)
    assert fake.calls == []


def test_a_public_repository_is_used_only_where_that_is_asked_for(fake, folder):
    fake.repos[REPO] = empty(private=False)
    with pytest.raises(UsageError, match="is public.*--public"):
        push_to_hub(folder, REPO)
    assert fake.repos[REPO]["files"] == {}
    assert not push_to_hub(folder, REPO, private=False).private


def test_a_folder_that_was_changed_or_is_none_is_not_sent(fake, folder, tmp_path):
    data = folder / "data/train-00000-of-00001.parquet"
    data.write_bytes(data.read_bytes()[:-1] + b"?")  # the size stays
    with pytest.raises(UsageError, match="have changed"):
        push_to_hub(folder, REPO)
    with pytest.raises(UsageError, match="no published set"):
        push_to_hub(tmp_path, REPO)
    assert fake.calls == []


def refusal(status):
    answer = httpx.Response(status, request=httpx.Request("POST", "https://hub.invalid"))
    return HfHubHTTPError(f"{status} for Bearer {TOKEN}", response=answer)


@pytest.mark.parametrize(
    "error, raised, said",
    [
        (refusal(401), UsageError, "refuses"),
        (refusal(403), UsageError, "token that may write"),
        (refusal(500), EvalError, "the same push again"),
        (HFValidationError(f"bad {TOKEN}"), UsageError, "owner/name"),
        (OfflineModeIsEnabled("offline"), UsageError, "HF_HUB_OFFLINE"),
        (httpx.ConnectError(f"no route {TOKEN}"), EvalError, "does not answer"),
        (TimeoutError(), EvalError, "TimeoutError"),
    ],
)
@pytest.mark.parametrize("where", ["create_repo", "upload_folder", "create_tag"])
def test_what_the_hub_does_wrong_is_one_error_without_the_token(
    fake, folder, caplog, error, raised, said, where
):
    fake.fails[where] = error
    with caplog.at_level(logging.DEBUG), pytest.raises(raised, match=said) as caught:
        push_to_hub(folder, REPO)
    assert type(caught.value) is raised
    assert TOKEN not in str(caught.value) + caplog.text and caught.value.__cause__ is None
    assert push_to_hub(folder, REPO).sent  # and the same push again does the rest
    assert TOKEN not in repr(fake.repos)


def test_a_fault_of_our_own_is_not_the_hubs(fake, folder):
    fake.fails["upload_folder"] = KeyError("ours")
    with pytest.raises(KeyError):
        push_to_hub(folder, REPO)


def test_the_real_client_holds_the_token_and_does_not_show_it():
    assert TOKEN not in repr(hub._api(TOKEN)) and hub._api(TOKEN).token == TOKEN
