"""An endpoint that takes requests and never answers is found out; one that takes its time is waited
for."""

import socket
import threading
import time

import pytest

from kernels_eval.errors import EvalError
from tasks.synthesis import addresses as pulse
from tasks.synthesis.client import OpenAISampler
from tests.support.chat_server import completion, serving
from tests.support.requests import make_request


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(pulse, "EVERY_S", 0.1)
    monkeypatch.setattr(pulse, "PATIENCE_S", 0.3)


@pytest.fixture
def black_hole():
    """Takes every connection and says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        held = []

        def hold():
            while True:
                try:
                    held.append(listener.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=hold, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    for each in held:
        each.close()


def sampler(url, **more):
    return OpenAISampler(url, "m", timeout_s=3600, backoff_s=0.01, direct=True, **more)  # type: ignore[arg-type]


def test_a_server_that_hangs_is_a_fault_of_transport_within_minutes_and_not_an_hour(black_hole):
    began = time.monotonic()
    with pytest.raises(EvalError, match="gave no answer for .* in 2 attempts"):
        list(sampler(black_hole, retries=1).sample([make_request(n) for n in range(1)]))
    assert time.monotonic() - began < 300


def test_another_address_takes_what_a_hanging_one_had(black_hole):
    with serving(lambda number, body: (200, completion(f"answer {number}"))) as server:
        answers = list(
            sampler([black_hole, server.url], retries=4, concurrency=2).sample(
                [make_request(n) for n in range(6)]
            )
        )
    assert len(answers) == 6


def test_an_answer_that_takes_long_is_waited_for_while_its_server_lives(monkeypatch):
    """It is asked for its models a dozen times meanwhile, and answers with an error: it is
    there."""
    monkeypatch.setattr(pulse, "PATIENCE_S", 60.0)
    asked = threading.Event()

    def answer(number, body):
        def slowly(handler):
            deadline = time.monotonic() + 60
            while server.gets < 12 and time.monotonic() < deadline:
                time.sleep(0.02)
            asked.set()

        return slowly if number == 0 else (200, completion("late"))

    with serving(answer) as server:
        found = list(sampler(server.url, retries=2).sample([make_request(n) for n in range(1)]))
    assert asked.is_set() and server.gets >= 12 and [each.text for each in found] == ["late"]
