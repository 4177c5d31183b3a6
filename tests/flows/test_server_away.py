"""Servers that are started again while a run works: what is shown waits for Prefect, what Prefect
holds for the run comes free, and a run that begins while the Ray head is away waits for that."""

import logging
from contextlib import contextmanager

import pytest
from httpx import ConnectError, ReadTimeout

from flows import artifacts
from flows import deployments as deployed
from flows.config import PipelineConfig
from kernels_eval.errors import ClusterError, UsageError
from tasks import retry
from tasks.verification.config import VerificationConfig


@pytest.fixture(autouse=True)
def _logger(monkeypatch):
    for module in (artifacts, deployed):
        monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("run"))
    monkeypatch.setattr(retry, "INTERVAL_S", 0.0)


def test_an_artifact_waits_for_its_server_and_is_made_once(monkeypatch):
    answers = [ConnectError("refused"), ReadTimeout("silent"), None]
    made = []

    def create(**told):
        if answer := answers.pop(0):
            raise answer
        made.append(told)

    monkeypatch.setattr(artifacts.artifacts, "create_markdown_artifact", create)
    artifacts.create_markdown_artifact(key="report", markdown="# it", description="what it is")
    assert (
        made == [{"key": "report", "markdown": "# it", "description": "what it is"}] and not answers
    )


@pytest.mark.parametrize("fault", [ConnectError("refused"), ValueError("no such key")])
def test_a_run_does_not_end_for_an_artifact(monkeypatch, caplog, fault):
    def create(**_):
        raise fault

    monkeypatch.setattr(artifacts, "BACK_S", 0.0)
    monkeypatch.setattr(artifacts.artifacts, "create_table_artifact", create)
    artifacts.create_table_artifact(key="summary", table=[], description="")
    assert "summary" in caplog.text and str(fault) in caplog.text


def test_devices_that_cannot_be_given_back_end_no_run_and_an_error_of_the_run_stays_one(
    monkeypatch,
):
    @contextmanager
    def concurrency(*_, **__):
        yield
        raise ConnectError("refused")

    monkeypatch.setattr(deployed, "concurrency", concurrency)
    monkeypatch.setattr(deployed, "_slots", lambda: 1)
    worked = []
    with deployed.devices(PipelineConfig(), 1):
        worked.append(True)
    assert worked
    with pytest.raises(ConnectError, match="of the run"), deployed.devices(PipelineConfig(), 1):
        raise ConnectError("of the run")


def test_a_run_that_begins_while_the_ray_head_is_away_waits_for_it(monkeypatch, caplog, tmp_path):
    from kernels_eval.pool import ray as cluster
    from tasks.verification import stage

    heads = iter([UsageError("nothing answers"), UsageError("nothing answers"), None, None])

    def require_cluster(address):
        if head := next(heads):
            raise head

    monkeypatch.setattr(stage, "require_cluster", require_cluster)
    monkeypatch.setattr(cluster, "require_cluster", require_cluster)
    config = PipelineConfig(
        root=str(tmp_path),
        language="cpp",
        verification=VerificationConfig(ray_address="10.0.0.7:6379"),
    )
    assert (
        deployed.prepared(config) is config
        and next(heads, "asked until it answered") == "asked until it answered"
    )
    assert [record.message for record in caplog.records] == [
        "the Ray cluster at 10.0.0.7:6379 does not answer; retrying for up to 180 s"
    ]
    heads = iter([UsageError("nothing answers")] * 2)
    monkeypatch.setattr(stage, "HEAD_BACK_S", -1.0)
    with pytest.raises(ClusterError, match=r"10\.0\.0\.7:6379"):
        deployed.prepared(config)
