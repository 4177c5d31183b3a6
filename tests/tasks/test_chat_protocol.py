"""What servers and proxies do to a chat completion: late, in pieces, cut, elsewhere, huge, half
empty, and gone for good.

Faults that a further attempt mends are in test_samplers.py as well; here is what happens to the
connection, and to the stage behind it.
"""

import json
import threading
import time
import tracemalloc

import pytest

from kernels_eval.errors import EvalError, UsageError
from kernels_eval.records import Language, SamplingParams
from tasks.synthesis import client as client_module
from tasks.synthesis.client import OpenAISampler
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.prompts import prompt_hash
from tasks.synthesis.stage import Synthesis
from tests.support.cases import cases
from tests.support.chat_server import completion, serving
from tests.support.requests import (
    KEY,
    KEY_ENV,
    ask,
    client,
    make_request,
    tasks_snapshot,
    without_proxies,
)

CASES = cases("chat_protocol")

LONG_TOKENS = 200_000
MODULE = (
    "import torch\n\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x"
    " + 1\n"
)


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv(KEY_ENV, KEY)
    without_proxies(monkeypatch)


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


# --- pauses
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status, header, pauses_s", CASES["pauses_are_the_servers_wish_or_double"])
def test_pauses_are_the_servers_wish_or_double(status, header, pauses_s, monkeypatch):
    decided, pause_s = [], OpenAISampler._pause_s

    def pause(self, fault, attempt):
        decided.append(pause_s(self, fault, attempt))
        return 0.0

    monkeypatch.setattr(OpenAISampler, "_pause_s", pause)
    refusal = (status, {"error": {"message": "later"}}, {"retry-after": header} if header else {})
    with serving(lambda number, body: refusal if number < 3 else (200, completion())) as server:
        assert len(ask(server, retries=3, backoff_s=2.0)) == 1
    assert len(server.bodies) == 4
    spread = 0.0 if header and header.isdigit() else 0.25
    assert decided == [pytest.approx(pause, rel=spread) for pause in pauses_s]


@pytest.mark.parametrize("status", [402, 405, 409, 415, 451])
def test_what_no_attempt_mends_is_asked_once(status):
    with serving(lambda number, body: (status, {"error": {"message": "never"}})) as server:
        with pytest.raises(UsageError, match="never") as caught:
            ask(server)
    assert len(server.bodies) == 1 and server.url in str(caught.value)


# --- slow and cut
# --------------------------------------------------------------------------------------------------


def test_a_body_in_pieces_is_read_whole():
    text = "long " * 5_000
    with serving(lambda number, body: written(completion(text), pieces=500)) as server:
        assert [response.text for response in ask(server)] == [text]
    assert len(server.bodies) == 1


def test_a_body_that_trickles_for_ever_times_out():
    over = threading.Event()

    def trickle(handler):
        handler.send_response(200)
        handler.send_header("content-type", "application/json")
        handler.end_headers()
        for _ in range(1000):
            if over.wait(
                timeout=0.01
            ):  # each piece comes long before any limit on the wait for one
                break
            handler.wfile.write(b" ")
            handler.wfile.flush()

    with serving(lambda number, body: trickle) as server:
        try:
            with pytest.raises(EvalError, match="in 3 attempts: .*timed out") as caught:
                ask(server, timeout_s=0.3)
        finally:
            over.set()
    assert not isinstance(caught.value, UsageError)


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
        with pytest.raises(EvalError, match="no answer for user/mine in 3 attempts") as caught:
            ask(server)
    assert not isinstance(caught.value, UsageError) and caught.value.hint
    assert len(server.bodies) == 3


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


# --- elsewhere
# --------------------------------------------------------------------------------------------------


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


def test_a_circle_of_redirects_ends():
    with serving(lambda number, body: (307, b"", {"location": "/v1/chat/completions"})) as server:
        with pytest.raises(EvalError, match="no answer for user/mine in 1 attempts"):
            ask(server, retries=0)
    assert 1 < len(server.bodies) < 50


# --- half empty
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES["what_a_completion_holds"])
def test_what_a_completion_holds_is_kept_and_the_rest_is_unknown(case):
    """Without an answer, the limit came before `</think>`."""
    choice = {"index": 0, "message": case["message"], "finish_reason": case.get("finish_reason")}
    body = {"choices": [choice], "usage": case.get("usage")}
    with serving(lambda number, _: (200, body)) as server:
        (response,) = ask(server)
    assert case["kept"].items() <= response.model_dump().items()


# --- the stage
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def tasks(tmp_path):
    return tasks_snapshot(tmp_path, 3)


def synthesis(server):
    return SynthesisConfig(
        sampler="openai",
        model="m",
        base_url=server.url,
        api_key_env=KEY_ENV,
        samples_per_task=4,
        sampling=SamplingParams(max_tokens=64),
        concurrency=2,
    )


def answered(tasks, server):
    ref = Synthesis(tasks, synthesis(server), Language.CPP).run()
    return ref.open().read(unique="candidate_id")


def module(number):
    return completion(f"Add one.\n</think>\n```python\n# {number}\n{MODULE}```")


def test_a_server_that_dies_for_good_costs_what_it_had_not_answered(tasks, monkeypatch):
    monkeypatch.setattr(client_module, "LONGEST_PAUSE_S", 0.001)
    asked = []
    both, once = threading.Barrier(2), threading.Lock()

    def mortal(number, body):
        if number >= 5:
            both.wait(timeout=20)  # the other one asks again, so it has taken its last answer
            with once:
                server.die()
            return 0, b""
        asked.append((body["messages"][0]["content"], body["seed"]))
        return 200, module(number)

    with serving(mortal) as server:
        config = synthesis(server)
        with pytest.raises(EvalError, match=r"no answer for t/\d in 7 attempts") as caught:
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
