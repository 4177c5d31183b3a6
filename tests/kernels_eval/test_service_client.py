"""The client of the service: what it repeats and what it does not, and its blocking door; and the
engine, whose process may die at any time."""

import json
import sqlite3
import threading
import time
from contextlib import ExitStack, closing
from types import SimpleNamespace

import anyio
import httpx
import pytest

from kernels_eval.errors import ServiceError, UsageError
from kernels_eval.service import client as client_module
from kernels_eval.service import engine as engine_module
from kernels_eval.service.app import LONGEST_WAIT_S
from kernels_eval.service.client import BATCH_LETTERS, AsyncVerifierClient, VerifierClient
from kernels_eval.service.engine import Engine
from kernels_eval.service.schema import MOST_REQUESTS, State
from tests.support.engines import echo
from tests.support.kernels import QUICK
from tests.support.pools import Held, Quick
from tests.support.services import URL, listening, reach, request, service
from tests.support.waiting import until


def evaluation(identity, state="queued", **more):
    return {"id": identity, "state": state, "submitted_s": 1.0} | more


def accept(asked):
    ids = [each["id"] for each in json.loads(asked.content)["requests"]]
    return httpx.Response(202, json={"evaluations": [evaluation(each) for each in ids]})


def done(asked):
    identity = asked.url.path.rpartition("/")[2]
    verdict = {"candidate_id": "c", "task_id": "t", "language": "cpp"}
    verdict |= {"status": "incorrect", "reason": "wrong_output"}
    return httpx.Response(200, json=evaluation(identity, "done", verdict=verdict))


def broken(_):
    raise httpx.ReadError("cut")


def status(number, headers=None):
    return lambda _: httpx.Response(number, json={"detail": f"because {number}"}, headers=headers)


class Scripted:
    """A client whose requests get these answers in turn; the last one again and again."""

    def __init__(self, answers, timeout_s=300.0):
        self.asked = []
        rest, last = iter(answers), answers[-1]

        def handle(asked):
            self.asked.append(asked)
            return next(rest, last)(asked)

        self.client = VerifierClient("http://service", "token", timeout_s)
        self.client.calls.transport = httpx.MockTransport(handle)

    def __getattr__(self, name):
        return getattr(self.client, name)


@pytest.fixture
def scripted():
    """The blocking door, and so the calls behind it."""
    with ExitStack() as made:
        yield lambda *answers, **more: made.enter_context(closing(Scripted(list(answers), **more)))


def test_what_failed_between_the_machines_is_repeated_under_the_same_id(scripted):
    client = scripted(broken, status(429, {"Retry-After": "1"}), accept, status(503), broken, done)
    began = time.monotonic()
    found = client.evaluate(request())
    assert found.state is State.DONE and found.verdict.reason == "wrong_output"
    assert time.monotonic() - began > 1  # what Retry-After says
    posts, gets = client.asked[:3], client.asked[3:]
    assert len({asked.content for asked in posts}) == 1 and len(gets) == 3
    assert {asked.url.path for asked in gets} == {f"/v1/results/{found.id}"}
    assert all(asked.headers["Authorization"] == "Bearer token" for asked in client.asked)


@pytest.mark.parametrize("number", [400, 401, 404, 409, 413, 422])
def test_a_refusal_is_not_repeated_and_says_why(scripted, number):
    client = scripted(status(number))
    with pytest.raises(UsageError, match=f"because {number}"):
        client.evaluate(request())
    assert len(client.asked) == 1


def test_an_error_of_the_service_itself_is_no_fault_of_the_request(scripted):
    client = scripted(status(500))
    with pytest.raises(ServiceError, match="because 500"):
        client.evaluate(request())


def test_a_machine_fault_of_the_service_is_an_answer(scripted):
    def failed(asked):
        identity = asked.url.path.rpartition("/")[2]
        return httpx.Response(200, json=evaluation(identity, "failed", error="the disk is full"))

    client = scripted(accept, failed)
    found = client.evaluate(request())
    assert (found.verdict, found.error) == (None, "the disk is full") and len(client.asked) == 2


@pytest.mark.parametrize("answer", [broken, status(503), status(429)])
def test_a_service_that_stays_away_is_an_error_within_the_time(scripted, answer):
    client = scripted(answer, timeout_s=0.5)
    with pytest.raises(ServiceError, match=r"no answer to POST /v1/evaluate within 0.5 s"):
        client.evaluate(request())


def test_a_verdict_that_does_not_come_is_an_error_within_the_time(scripted):
    client = scripted(
        accept, lambda asked: httpx.Response(200, json=evaluation("x")), timeout_s=0.2
    )
    with pytest.raises(ServiceError, match="is queued after 0.2 s"):
        client.evaluate(request())


def test_health_is_asked_once(scripted):
    client = scripted(lambda _: httpx.Response(503, json={"status": "stopping"}))
    assert client.health() == {"status": "stopping"} and len(client.asked) == 1
    with pytest.raises(ServiceError, match="ReadError: cut"):
        scripted(broken).health()


@pytest.mark.parametrize(
    "text", ["", "<html>", "[1]", "{}", '{"evaluations": [{"id": "a"}]}', '{"id": "a"}']
)
def test_an_answer_that_is_none_of_the_service_is_a_fault_of_it(scripted, text):
    client = scripted(lambda _: httpx.Response(200, content=text))
    for call, given in (("evaluate", [request()]), ("result", ["a"]), ("cancel", ["a"])):
        with pytest.raises(ServiceError, match="no answer of `concur serve`"):
            getattr(client, call)(*given)
    with pytest.raises(ServiceError, match="does not say how it is"):
        client.health()


@pytest.mark.parametrize("kind", [VerifierClient, AsyncVerifierClient])
@pytest.mark.parametrize("url", ["127.0.0.1:8700", "", "ftp://x", "http://", "http://[::1", "x:y"])
def test_an_address_that_is_none_is_refused_at_once(kind, url):
    with pytest.raises(UsageError, match="no address of a service"):
        kind(url)


@pytest.mark.parametrize("token", ["\u00e4" * 16, "a\nb", "a\0"])
def test_a_token_that_no_header_holds_is_refused_and_not_repeated(token):
    with pytest.raises(UsageError, match="token") as refused:
        VerifierClient("http://127.0.0.1", token)
    assert token not in str(refused.value)


def test_the_time_bounds_what_is_waited_for(scripted, monkeypatch):
    """Neither a question for a result nor a silent service is given more than is left."""
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: 1.0))
    queued = httpx.Response(200, json=evaluation("x"))
    client = scripted(accept, lambda _: queued, done, timeout_s=20.0)
    client.evaluate(request())
    polls = [float(asked.url.params["wait_s"]) for asked in client.asked[1:]]
    assert len(polls) == 2 and max(polls) <= 20
    assert all(each.extensions["timeout"]["read"] == 20 for each in client.asked)


def test_the_longest_question_is_answered_before_it_is_given_up():
    assert AsyncVerifierClient(URL)._http.timeout.read > LONGEST_WAIT_S


def test_a_batch_larger_than_the_queue_is_taken_over_in_parts(scripted):
    def accept_three(asked):
        taken.append(len(json.loads(asked.content)["requests"]))
        return accept(asked) if taken[-1] <= 3 else status(429)(asked)

    taken = []
    client = scripted(*[accept_three] * 7, done)
    found = client.evaluate_batch([request(number, id=f"n{number}") for number in range(10)])
    assert taken == [10, 5, 2, 3, 5, 2, 3]
    assert [each.id for each in found] == [f"n{number}" for number in range(10)]


def test_an_id_never_leads_elsewhere(scripted):
    client = scripted(lambda _: httpx.Response(200, json=evaluation("x")))
    client.result("../../health")
    client.cancel("a/b?c")
    paths = [asked.url.raw_path for asked in client.asked]
    assert paths[0].startswith(b"/v1/results/..%2F..%2Fhealth?")
    assert paths[1] == b"/v1/results/a%2Fb%3Fc"


def test_large_batches_travel_in_parts_and_come_back_in_order(scripted):
    many = [request(number, id=f"n{number}") for number in range(MOST_REQUESTS + 5)]
    large = [request(id=f"l{n}", code="x" * (BATCH_LETTERS // 5)) for n in range(9)]
    client = scripted(accept)
    answered = scripted(*[accept] * 4, done)
    assert [client.submit(each).id for each in large[:2]] == ["l0", "l1"]
    found = answered.evaluate_batch([*many, *large])
    assert [each.id for each in found] == [each.id for each in [*many, *large]]
    posts = [asked for asked in answered.asked if asked.method == "POST"]
    assert [len(json.loads(asked.content)["requests"]) for asked in posts] == [1024, 9, 4, 1]
    assert max(len(asked.content) for asked in posts) < BATCH_LETTERS + 10_000


def test_after_many_calls_at_once_few_connections_stay(tmp_path):
    """At each request httpcore looks through all connections, for each of them that is idle."""

    async def ask(port):
        async with AsyncVerifierClient(f"http://127.0.0.1:{port}") as client:
            async with anyio.create_task_group() as calls:
                for _ in range(40):
                    calls.start_soon(client.health)
            return len(client._http._transport._pool.connections)

    made = service(tmp_path)
    with listening(made) as port:
        assert 0 < anyio.run(ask, port) <= 20
    made.evaluations.close()


def test_several_threads_share_a_client_and_a_service_that_starts_again_loses_nothing(tmp_path):
    first = service(tmp_path)
    found = []
    with listening(first) as port:
        client = VerifierClient(f"http://127.0.0.1:{port}", timeout_s=600)

        def ask(name):
            found.extend(client.evaluate_batch([request(f"{name}{n}") for n in range(5)]))

        threads = [threading.Thread(target=ask, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        while first.evaluations.queued < 20:
            time.sleep(0.01)
    first.evaluations.close()
    second = service(tmp_path)
    assert second.evaluations.resume(second.intake.key) == 20
    with listening(second, port):
        reach(second)
        for thread in threads:
            thread.join()
    assert [each.state for each in found] == [State.DONE] * 20
    assert len({each.id for each in found}) == 20
    client.close()
    second.evaluations.close()


# -- the engine ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script, faults",
    [
        pytest.param("die\ndie\n", 2, id="dies"),
        pytest.param("fault the disk is full\n", 1, id="reports", marks=pytest.mark.slow),
    ],
)
def test_whatever_ends_the_process_of_the_pool_each_candidate_gets_one_verdict(
    tmp_path, monkeypatch, script, faults
):
    monkeypatch.setattr(engine_module, "work", echo)
    (tmp_path / "script").write_text(script)
    made = service(tmp_path)
    asked = [request(number, id=f"n{number}") for number in range(20)]
    ended = []
    monkeypatch.setattr(made.evaluations, "_changed", lambda each: ended.append(each.id))
    made.evaluations.submit([made.intake.read(each) for each in asked])
    engine = Engine(made.evaluations, {"script": str(tmp_path / "script")}, _pause_s=0.01)
    engine.start()
    until(lambda: len(ended) == 20, "every verdict")
    assert sorted(ended) == sorted(each.id for each in asked)
    assert engine.faults == faults and engine.fault == ""
    assert engine.end(300)
    made.evaluations.close()


def test_a_journal_that_cannot_be_written_for_a_while_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "work", echo)
    (tmp_path / "script").write_text("")
    made = service(tmp_path)
    asked = [request(number, id=f"n{number}") for number in range(6)]
    made.evaluations.submit([made.intake.read(each) for each in asked])
    keep, failing = made.evaluations.reached, iter([False, True])

    def reached(verdict):
        if next(failing, False):
            raise sqlite3.OperationalError("database or disk is full")
        keep(verdict)

    monkeypatch.setattr(made.evaluations, "reached", reached)
    engine = Engine(made.evaluations, {"script": str(tmp_path / "script")}, _pause_s=0.01)
    engine.start()
    until(lambda: all(made.evaluations.get(f"n{n}").state.final for n in range(6)), "every verdict")
    assert engine.faults == 1 and all(made.evaluations.get(f"n{n}").verdict for n in range(6))
    assert engine.end(300)
    made.evaluations.close()


def test_a_cancelled_request_ends_the_work_on_its_candidate(tmp_path, monkeypatch):
    begun = tmp_path / "begun"
    monkeypatch.setenv("HELD", str(begun))
    monkeypatch.setenv("CONCUR_LOCKS", str(tmp_path))
    made = service(tmp_path)
    options = {"language": made.intake.language, "config": QUICK, "workers": 1, "builders": 1}
    engine = Engine(made.evaluations, options | {"builder": Quick, "runner": Held})
    engine.start()
    with listening(made) as port, VerifierClient(f"http://127.0.0.1:{port}") as client:
        held = client.submit(request("HOLD"))
        until(begun.exists, "the run that never ends")
        assert client.cancel(held.id).state is State.CANCELLED
        other = client.evaluate(request(1))
        again = client.evaluate(request("HOLD"))
        assert client.result(held.id).verdict is None
    assert [each.verdict.status for each in (other, again)] == ["correct"] * 2
    assert not again.cached and engine.faults == 0
    assert engine.end(300)
    made.evaluations.close()


def test_at_its_end_the_engine_begins_nothing_more(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "work", echo)
    (tmp_path / "script").write_text("")
    made = service(tmp_path)
    engine = Engine(made.evaluations, {"script": str(tmp_path / "script")})
    engine.start()
    assert engine.end(300)
    made.evaluations.submit([made.intake.read(request())])
    assert (made.evaluations.queued, made.evaluations.running) == (1, 0)
    made.evaluations.close()
