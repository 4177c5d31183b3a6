"""An endpoint's key from a Prefect secret block: with a real Prefect, inside of a task and outside,
and nowhere that it could be read."""

import asyncio
import logging
import traceback

import pytest

from kernels_eval.errors import EvalError, UsageError
from kernels_eval.records import KernelTask, Language
from tasks.policy import secret
from tasks.store.snapshot import Snapshot, SnapshotRef
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.stage import Synthesis
from tasks.tables import TASKS
from tests.support.chat_server import Server, completion, serving
from tests.support.requests import tasks_snapshot, without_proxies

KEY = "sk-from-a-block-0123456789"
pytestmark = pytest.mark.slow  # Prefect's server takes 10 s to start


@pytest.fixture(scope="module", autouse=True)
def blocks(prefect_home):
    """One good block and others that hold no text."""
    from prefect.blocks.system import Secret

    kept = {"endpoint": KEY + "\n", "a-mapping": {"key": KEY}, "blank": " "}
    for name, value in kept.items():  # a line feed, as a file or a prompt gives it
        Secret(value=value).save(name, overwrite=True, _sync=True)


class Endpoint:
    """Chat completions for whoever has the key. Keeps what it was shown."""

    server: Server

    @property
    def url(self):
        return self.server.url

    @property
    def shown(self):
        return [headers.get("authorization") for headers in self.server.headers]

    def answer(self, number, _):
        shown = self.shown[number]
        if shown == f"Bearer {KEY}":
            return 200, completion("```python\nx\n```")
        return 401, {"error": {"message": f"wrong key {shown}"}}  # servers do quote it


@pytest.fixture
def endpoint(monkeypatch):
    without_proxies(monkeypatch)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-somebody-else")
    endpoint = Endpoint()
    with serving(endpoint.answer) as endpoint.server:
        yield endpoint


@pytest.fixture
def tasks(tmp_path):
    return tasks_snapshot(tmp_path / "root")


@pytest.fixture
def said(monkeypatch):
    """Every message that this process logs, at any level: Prefect takes handlers away and sets
    levels where a flow begins."""
    messages = []
    make = logging.getLogRecordFactory()

    def keep(*arguments, **named):
        record = make(*arguments, **named)
        messages.append(record.getMessage())
        return record

    monkeypatch.setattr(logging.Logger, "isEnabledFor", lambda logger, level: True)
    logging.setLogRecordFactory(keep)
    yield messages
    logging.setLogRecordFactory(make)


def config(endpoint, block="endpoint"):
    return SynthesisConfig(
        sampler="openai", model="m", base_url=endpoint.url, api_key_block=block, samples_per_task=1
    )


def test_the_whole_stage_as_a_plain_call_and_as_a_prefect_task(
    endpoint, tasks, tmp_path, prefect_home, said, capfd
):
    from prefect import flow

    from tasks.synthesis.step import synthesise

    other = Snapshot(str(tmp_path / "other"), "tasks", "one")
    other.append([KernelTask(task_id="t/0", name="t0", code="# 0").model_dump(mode="json")], TASKS)

    @flow
    def line() -> SnapshotRef:
        return synthesise(other.publish(config={}, rows=1).ref, config(endpoint), Language.CUDA)

    plain, by_prefect = Synthesis(tasks, config(endpoint), Language.CUDA).run(), line()
    assert endpoint.shown == [f"Bearer {KEY}"] * 2
    assert plain.open().manifest["rows"] == by_prefect.open().manifest["rows"] == 1
    assert plain.open().manifest["config"]["api_key_block"] == "endpoint"
    assert any(endpoint.url in message for message in said), "the list is real"
    assert [message for message in said if KEY in message] == []
    assert KEY not in "".join(capfd.readouterr())
    written = [
        path
        for folder in (tmp_path, prefect_home / "storage")
        for path in folder.rglob("*")
        if path.is_file()
    ]
    assert any(path.suffix == ".parquet" for path in written)
    assert [path for path in written if KEY.encode() in path.read_bytes()] == []


def test_where_the_key_lies_does_not_matter_to_the_snapshot(endpoint, tasks):
    found = {
        Synthesis(tasks, config(endpoint, block), Language.CUDA).snapshot.fingerprint
        for block in (None, "endpoint", "elsewhere")
    }
    assert len(found) == 1


def test_a_key_that_the_endpoint_refuses_is_put_right_in_the_block(endpoint, tasks):
    from prefect.blocks.system import Secret

    Secret(value="sk-expired-0123456789").save("expired", _sync=True)
    with pytest.raises(UsageError, match="refused the API key") as caught:
        Synthesis(tasks, config(endpoint, "expired"), Language.CUDA).run()
    assert "the Prefect secret block expired" in caught.value.hint
    assert "sk-expired" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("block", ["nowhere", "a-mapping", "blank", "no such name!"])
def test_a_block_that_holds_no_key_is_one_line_with_the_fix(endpoint, tasks, block):
    with pytest.raises(UsageError) as caught:
        Synthesis(tasks, config(endpoint, block), Language.CUDA).run()
    assert f"no secret block {block!r}" in str(caught.value) and "\n" not in str(caught.value)
    assert "Secret(value=getpass()).save" in caught.value.hint and "PREFECT_" in caught.value.hint
    assert KEY not in "".join(traceback.format_exception(caught.value)) and endpoint.shown == []


def test_a_caller_with_an_event_loop_gets_the_text_too():
    async def work():
        return secret("endpoint")

    assert asyncio.run(work()) == KEY


def test_a_prefect_that_does_not_answer_is_a_fault_that_may_be_tried_again():
    from prefect import settings

    with (
        settings.temporary_settings(updates={settings.PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises(EvalError) as caught,
    ):
        secret("endpoint")
    assert not isinstance(caught.value, UsageError) and "could not be asked" in str(caught.value)
