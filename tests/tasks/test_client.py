"""The client of OpenAI-compatible endpoints against real local servers: what it sends and takes,
faults of server and network, and the stage behind it."""

import json
import logging
import signal
import threading
import time
import traceback
import tracemalloc

import pytest

from kernels_eval.errors import EvalError, UsageError
from kernels_eval.records import Language, SamplingParams
from tasks.synthesis import client as client_module
from tasks.synthesis.client import ATTEMPTS, REFUSALS_BEFORE_GIVING_UP
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.prompts import prompt_hash
from tasks.synthesis.sampler import Response
from tasks.synthesis.stage import Synthesis
from tests.support.cases import cases
from tests.support.chat_server import completion, serving
from tests.support.requests import (
    KEY,
    ask,
    client,
    make_request,
    tasks_snapshot,
    without_pauses,
    without_proxies,
)

CASES = cases("client")
LONG_TOKENS = 200_000
MODULE = (
    "import torch\n\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x"
    " + 1\n"
)


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv(client_module.KEY_VARIABLE, KEY)
    without_proxies(monkeypatch)
    without_pauses(monkeypatch)


def test_sends_what_was_asked_and_returns_what_was_said():
    with serving(lambda number, body: (200, completion("text", "length", 12))) as server:
        (response,) = ask(server)
    assert response == Response(
        request_key="0", text="text", completion_tokens=12, finish_reason="length"
    )
    (body,) = server.bodies
    assert body["path"] == "/v1/chat/completions" and body["model"] == "org/model"
    assert body["messages"] == [{"role": "user", "content": "prompt 0"}]
    assert {
        name: body[name] for name in ("temperature", "top_p", "max_tokens", "seed")
    } == SamplingParams(seed=0).model_dump()
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"


def test_nobody_asks_further_ahead_than_answers_are_taken(monkeypatch):
    monkeypatch.setattr(client_module, "UNREAD", unread := 2)
    asked = [make_request(index, prompt=f"prompt {index}") for index in range(60)]
    full = threading.Event()

    def answer(number, body):
        if number >= unread + 3 - 1:
            full.set()
        return 200, completion(body["messages"][0]["content"])

    with serving(answer) as server:
        stream = client(server.url, concurrency=3).sample(asked)
        first = next(
            stream
            # while it is held, no more than these are asked: two unread, and three that wait for
            # room
        )
        assert full.wait(300)
        others = ask(server, count=40, concurrency=1)  # time in which the first would ask on
        assert len(server.bodies) - len(others) <= unread + 3 + 1
        assert len([first, *stream]) == len(server.bodies) - len(others) == 60


def test_no_request_makes_no_call():
    with serving(lambda number, body: (200, completion())) as server:
        assert ask(server, count=0) == [] == server.bodies


def test_answers_come_as_they_finish_and_concurrency_is_bounded():
    first_may_go, together = threading.Event(), threading.Barrier(3)

    def answer(number, body):
        if number < 3:
            together.wait(300)  # breaks unless three requests are in flight at once
        if body["messages"][0]["content"] == "prompt 0":
            assert first_may_go.wait(300)
        return 200, completion(body["messages"][0]["content"])

    with serving(answer) as server:
        stream = client(server.url, concurrency=3).sample(
            [make_request(index, prompt=f"prompt {index}") for index in range(8)]
        )
        early = [next(stream) for _ in range(7)]
        first_may_go.set()
        late = list(stream)
    assert {response.text for response in early} == {f"prompt {index}" for index in range(1, 8)}
    assert [(response.text, response.request_key) for response in late] == [("prompt 0", "0")]
    assert server.most_in_flight == 3


def test_nobody_listening_is_an_infrastructure_fault():
    with serving(lambda number, body: (200, completion())) as server:
        url = server.url
    with pytest.raises(EvalError, match="gave no answer") as caught:
        list(client(url, retries=1).sample([make_request()]))
    assert url in str(caught.value)


def test_an_answer_that_never_comes_times_out():
    over = threading.Event()

    def answer(number, body):
        over.wait()
        return 200, completion()

    with serving(answer) as server:
        with pytest.raises(EvalError, match="gave no answer for user/mine: .*[Tt]ime"):
            ask(server, retries=1, timeout_s=0.2)
        over.set()


@pytest.mark.parametrize("status, message", CASES["a_wrong_key_or_address_stops_at_once"])
def test_a_wrong_key_or_address_stops_at_once(status, message):
    with serving(lambda number, body: (status, {"error": {"message": "no"}})) as server:
        with pytest.raises(UsageError, match=message) as caught:
            ask(server, count=20, concurrency=1)
    assert server.url in str(caught.value)
    assert len(server.bodies) == 1


def test_the_key_appears_nowhere(caplog):
    echo = {"error": {"message": f"Incorrect API key provided: {KEY}"}}
    caplog.set_level(logging.DEBUG)
    for status in (400, 401, 405, 500):
        with serving(lambda number, body, status=status: (status, echo)) as server:
            with pytest.raises(EvalError) as caught:
                ask(server, retries=1)
        said = "".join(traceback.format_exception(caught.value))
        assert server.url in said and KEY not in said
    assert KEY not in caplog.text and len(caplog.records) > 4
    assert KEY not in repr(client("http://127.0.0.1:1/v1"))


def test_a_refused_request_stays_unanswered_and_the_others_are_answered(caplog):
    too_long = (400, {"error": {"message": "maximum context length is 4096 tokens"}})
    with serving(
        lambda number, body: too_long if body["seed"] % 2 else (200, completion())
    ) as server:
        got = ask(server, count=6, concurrency=1)
    assert [response.request_key for response in got] == [str(index) for index in (0, 2, 4)]
    assert caplog.text.count("maximum context length") == 3
    assert len(server.bodies) == 6


@pytest.mark.parametrize("count", [1, 50])
def test_an_endpoint_that_refuses_everything_is_the_callers_mistake(count):
    with serving(
        lambda number, body: (400, {"error": {"message": "max_tokens is too large"}})
    ) as server:
        with pytest.raises(UsageError, match="max_tokens is too large"):
            ask(server, count=count, concurrency=1)
    assert len(server.bodies) == min(count, REFUSALS_BEFORE_GIVING_UP)


@pytest.mark.parametrize("leave", ["close", "interrupt"])
def test_leaving_early_cancels_what_is_in_flight(leave, monkeypatch):
    hold, one_taken = threading.Event(), threading.Event()

    def answer(number, body):
        if number == 0:
            return 200, completion()
        if (
            number == 2 and leave == "interrupt"
        ):  # Ctrl-C while the caller waits for its second answer
            one_taken.wait()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        hold.wait()
        return 200, completion()

    with serving(answer) as server:
        stream = client(server.url, concurrency=2).sample(
            [make_request(index) for index in range(10)]
        )
        try:
            assert next(stream).text == "an answer"
            if leave == "close":
                stream.close()
            else:
                result = client_module._result
                monkeypatch.setattr(
                    client_module, "_result", lambda future: one_taken.set() or result(future)
                )
                with pytest.raises(KeyboardInterrupt):
                    next(stream)
            assert "synthesis client" not in {thread.name for thread in threading.enumerate()}
            assert len(server.bodies) <= 3, "nothing is asked after the caller has left"
        finally:
            hold.set()


def test_works_where_an_event_loop_runs_already():
    import asyncio

    async def main(server):
        return ask(server, count=3)

    with serving(lambda number, body: (200, completion())) as server:
        assert len(asyncio.run(main(server))) == 3


@pytest.mark.parametrize("url", ["127.0.0.1:8000/v1", "ftp://host/v1", "", "http://"])
def test_an_address_that_is_not_http_is_refused(url):
    with pytest.raises(UsageError, match="http://127.0.0.1:8000/v1"):
        client(url)


def written(content, *, length=True, pieces=1, share=1.0):
    """An answer in pieces; with a `share` below 1 the connection ends before the body does."""
    raw = json.dumps(content).encode()

    def write(handler):
        handler.send_response(200)
        handler.send_header("content-type", "application/json")
        if length:
            handler.send_header("content-length", str(len(raw)))
        handler.end_headers()
        sent = raw[: int(len(raw) * share)]
        for start in range(0, len(sent), size := max(1, -(-len(sent) // pieces))):
            handler.wfile.write(sent[start : start + size])
            handler.wfile.flush()

    return write


FAULTS = {
    "429": (429, {"error": {"message": "slow down"}}),
    "429 with a wish": (429, {"error": {"message": "slow down"}}, {"retry-after": "0"}),
    "500": (500, {"error": {"message": "oops"}}),
    "503": (503, b"<html>unavailable</html>"),
    "half of JSON": (200, b'{"choices": [{"mess'),
    "no text": (200, b"\xff\xfe not text"),
    "a page": (200, b"<html>a proxy's page</html>", {"content-type": "text/html"}),
    "an error with status 200": (200, {"error": {"message": "overloaded"}}),
    "cut before the headers": (0, b""),
    "cut in the headers": lambda handler: handler.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-ty"),
    "no HTTP": lambda handler: handler.wfile.write(b"\x00\x01 what is this\r\n\r\n"),
    "cut before the body": written(completion(), share=0.0),
    "cut in the body": written(completion("half of it"), share=0.5),
    "cut in the body, no length": written(completion("half of it"), share=0.5, length=False),
}
NO_MESSAGE = [
    *({"choices": choices} for choices in ([], None, [None], [{}], [{"message": "none"}])),
    {"choices": [{"index": 0, "finish_reason": "stop", "message": None}]},
    *({}, [], "a string", None),
]
FAULTS |= {json.dumps(body): (200, json.dumps(body).encode()) for body in NO_MESSAGE}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_tried_again_and_one_of_the_infrastructure_in_the_end(fault):
    with serving(
        lambda number, body: fault if number < 2 else (200, completion("whole"))
    ) as server:
        assert [response.text for response in ask(server)] == ["whole"]
    assert len(server.bodies) == 3
    with serving(lambda number, body: fault) as server:
        with pytest.raises(EvalError, match="no answer for user/mine: .") as caught:
            ask(server, retries=0)
    assert not isinstance(caught.value, UsageError) and caught.value.hint
    assert len(server.bodies) == ATTEMPTS


@pytest.mark.parametrize("status", [402, 405, 415, 451])
def test_what_no_attempt_mends_is_asked_once(status):
    with serving(lambda number, body: (status, {"error": {"message": "never"}})) as server:
        with pytest.raises(UsageError, match="never") as caught:
            ask(server)
    assert len(server.bodies) == 1 and server.url in str(caught.value)


def test_a_long_answer_is_kept_whole_in_time_and_memory(monkeypatch):
    """200,000 tokens are about 800 KB. Two in flight and two unread are held, never all that were
    asked for."""
    monkeypatch.setattr(client_module, "UNREAD", 2)
    text = "".join(f"{number:x} é\n" for number in range(LONG_TOKENS))[: 4 * LONG_TOKENS]
    answer, count = json.dumps(completion(text, "length", LONG_TOKENS)).encode(), 24
    seen = 0
    with serving(lambda number, body: (200, answer)) as server:
        ask(server)  # what is imported and made once
        began = time.process_time()
        tracemalloc.start()
        try:
            for response in client(server.url, concurrency=2).sample(
                [make_request(n, prompt=f"prompt {n}") for n in range(count)]
            ):
                assert response.text == text
                assert (response.completion_tokens, response.finish_reason) == (
                    LONG_TOKENS,
                    "length",
                )
                seen += 1
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert seen == count
    assert time.process_time() - began < 30
    assert peak < count * len(text) / 2, "they were held at once"


@pytest.mark.parametrize("status", [307, 308])
def test_a_redirect_is_followed_and_the_key_does_not_go_to_another_host(status):
    with serving(lambda number, body: (200, completion("from there"))) as there:
        moved = {"location": f"{there.url}/chat/completions"}
        with serving(lambda number, body: (status, b"", moved)) as here:
            assert [response.text for response in ask(here)] == ["from there"]
    assert here.headers[0]["authorization"] == f"Bearer {KEY}"
    assert there.bodies[0]["messages"] == here.bodies[0]["messages"]
    assert "authorization" not in there.headers[0]


@pytest.mark.parametrize("status", [301, 302, 303])
def test_a_redirect_that_loses_the_question_is_the_callers_mistake(status):
    """As HTTP has it, the client asks again with GET, which no such endpoint takes: an http address
    of an https server, say."""
    with serving(
        lambda number, body: (status, b"", {"location": "/v1/chat/completions"})
    ) as server:
        with pytest.raises(UsageError, match=server.url) as caught:
            ask(server)
    assert (len(server.bodies), server.gets) == (1, 1)
    assert "base_url" in (caught.value.hint or "")


@pytest.mark.parametrize("case", CASES["what_a_completion_holds"])
def test_what_a_completion_holds_is_kept_and_the_rest_is_unknown(case):
    """Without an answer, the limit came before `</think>`."""
    choice = {"index": 0, "message": case["message"], "finish_reason": case.get("finish_reason")}
    body = {"choices": [choice], "usage": case.get("usage")}
    with serving(lambda number, _: (200, body)) as server:
        (response,) = ask(server)
    assert case["kept"].items() <= response.model_dump().items()


@pytest.fixture
def tasks(tmp_path):
    return tasks_snapshot(tmp_path, 3)


def synthesis(server):
    return SynthesisConfig(
        sampler="openai",
        model="m",
        base_url=server.url,
        samples_per_task=4,
        sampling=SamplingParams(max_tokens=64),
        concurrency=2,
    )


def answered(tasks, server):
    ref = Synthesis(tasks, synthesis(server), Language.CPP).run()
    return ref.open().read(unique="candidate_id")


def module(number):
    return completion(f"Add one.\n</think>\n```python\n# {number}\n{MODULE}```")


def test_a_server_that_dies_for_good_costs_what_it_had_not_answered(tasks):
    asked = []
    both, once = threading.Barrier(2), threading.Lock()

    def mortal(number, body):
        if number >= 5:
            both.wait(300)  # the other one asks again, so it has taken its last answer
            with once:
                server.die()
            return 0, b""
        asked.append((body["messages"][0]["content"], body["seed"]))
        return 200, module(number)

    with serving(mortal) as server:
        config = synthesis(server)
        with pytest.raises(EvalError, match=r"no answer for t/\d: ") as caught:
            Synthesis(tasks, config, Language.CPP).run()
    assert server.url in str(caught.value) and "answers so far are kept" in (
        caught.value.hint or ""
    )
    assert not isinstance(caught.value, UsageError)
    left = Synthesis(tasks, config, Language.CPP).snapshot
    assert not left.finished

    def steady(number, body):
        asked.append((body["messages"][0]["content"], body["seed"]))
        return 200, module(100 + number)

    with serving(steady, server.port) as again:
        frame = Synthesis(tasks, config, Language.CPP).run().open().read(unique="candidate_id")
    assert len(asked) == len(set(asked)) == len(frame) == 12, "each is asked once over both runs"
    assert len(again.bodies) == 7
    assert sum(code.startswith("# 10") for code in frame["code"]) == 7, (
        "the first five are those of the first run"
    )
    assert set(frame["reasoning"]) == {"Add one."} and frame["parse_reason"].null_count() == 12
    assert (
        set(frame["prompt_hash"]) == {prompt_hash(prompt) for prompt, _ in asked}
        and frame["prompt_hash"].n_unique() == 3
    )


def test_a_long_answer_goes_through_the_stage_whole(tasks):
    thoughts = "".join(f"{number} so " for number in range(LONG_TOKENS))[: 4 * LONG_TOKENS].strip()
    with serving(
        lambda number, body: (
            200,
            completion(f"{thoughts}\n</think>\n```python\n{MODULE}```", tokens=LONG_TOKENS),
        )
    ) as server:
        began = time.process_time()
        frame = answered(tasks, server)
    assert time.process_time() - began < 30
    assert len(frame) == 12
    assert (
        set(frame["reasoning"]) == {thoughts}
        and set(frame["code"]) == {MODULE}
        and set(frame["completion_tokens"]) == {LONG_TOKENS}
    )


@pytest.mark.parametrize(
    "answer, reasoning, reason", CASES["an_answer_without_code_is_a_candidate_with_the_reason"]
)
def test_an_answer_without_code_is_a_candidate_with_the_reason(tasks, answer, reasoning, reason):
    with serving(lambda number, body: (200, answer)) as server:
        frame = answered(tasks, server)
    assert set(zip(frame["code"], frame["parse_reason"], frame["reasoning"], strict=True)) == {
        (None, reason, reasoning)
    }
    assert len(server.bodies) == 12, "nothing is asked again"


@pytest.mark.parametrize(
    "message", CASES["reasoning_and_code_are_apart_whatever_the_server_returns"]
)
def test_reasoning_and_code_are_apart_whatever_the_server_returns(tasks, message):
    with serving(lambda number, body: (200, completion(**message))) as server:
        frame = answered(tasks, server)
    assert set(frame["reasoning"]) == {"Add one."} and set(frame["code"]) == {MODULE}
    assert frame["answer"].str.contains("ModelNew", literal=True).all()
