"""Asking a service again until it is back."""

import pytest

from tasks import retry
from tasks.retry import retry_until_back


class Service:
    """Raises the given errors one after another, then answers."""

    def __init__(self, *errors):
        self.errors, self.calls = list(errors), 0

    def __call__(self):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


def asked(service, log, deadline_s=600.0):
    return retry_until_back(
        service,
        service="MLflow at http://localhost:1",
        is_absent=lambda error: isinstance(error, ConnectionError),
        log=log.append,
        deadline_s=deadline_s,
    )


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(retry, "INTERVAL_S", 0.0)


def test_an_absence_is_logged_once_and_the_answer_returned():
    log = []
    assert asked(Service(), log) == "answer" and log == []
    assert asked(Service(ConnectionError(), ConnectionResetError()), log) == "answer"
    assert log == ["MLflow at http://localhost:1 does not answer; retrying for up to 600 s"]


def test_a_refusal_is_raised_at_once_even_after_an_absence():
    service = Service(ConnectionError(), ValueError("refused"), ValueError("never asked"))
    with pytest.raises(ValueError, match="refused"):
        asked(service, [])
    assert service.calls == 2


def test_after_the_deadline_the_last_error_is_raised():
    service, log = Service(ConnectionError("away"), ConnectionError("never asked")), []
    with pytest.raises(ConnectionError, match="away"):
        asked(service, log, deadline_s=0)
    assert service.calls == 1 and len(log) == 1
