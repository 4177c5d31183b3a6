"""Recorded responses are replayed exactly; the client speaks the protocol to a real server, faults
included."""

import logging
import signal
import threading
import traceback

import polars as pl
import pytest

from kernels_eval.errors import EvalError, UsageError
from kernels_eval.records import KernelTask, Language, SamplingParams
from tasks.sources import bundled
from tasks.synthesis import client as client_module
from tasks.synthesis.client import REFUSALS_BEFORE_GIVING_UP
from tasks.synthesis.recorded import RecordedSampler, ResponsesFile
from tasks.synthesis.sampler import Response
from tests.support.cases import cases
from tests.support.chat_server import completion, serving
from tests.support.requests import KEY, KEY_ENV, ask, client, make_request, without_proxies

CASES = cases("samplers")


def request(task, index=0, language=Language.CPP, prompt="a prompt"):
    return make_request(index, task, prompt, f"{task.task_id}#{language.value}#{index}", language)


# --- recorded
# --------------------------------------------------------------------------------------------------


def test_recorded_serves_each_recording_under_its_own_request():
    task = next(task for task in bundled.load() if task.name == "softmax_rows")
    wanted = [
        request(task, index, language)
        for language in (Language.CUDA, Language.CPP)
        for index in range(5)
    ]
    got = {response.request_key: response.text for response in RecordedSampler().sample(wanted)}
    texts = bundled.responses("softmax_rows", "cuda") + bundled.responses("softmax_rows", "cpp")
    assert got == {asked.request_key: text for asked, text in zip(wanted, texts, strict=True)}
    assert RecordedSampler().generator == "recorded"


def test_recorded_passes_over_what_it_does_not_have():
    task = next(task for task in bundled.load() if task.name == "softmax_rows")
    namesake = KernelTask(
        task_id="user/softmax_rows", name="softmax_rows", code="class Model: pass"
    )
    wanted = [
        request(task, 5),
        request(task, 0, Language.TRITON),
        request(namesake),
        request(task, 1),
    ]
    assert [response.request_key for response in RecordedSampler().sample(wanted)] == [
        wanted[3].request_key
    ]


def test_counts_tokens_only_with_a_tokenizer(tmp_path):
    from tasks.sources.small_model import build_small_model

    directory = build_small_model(
        tmp_path / "model", ["some text to learn from, some text to count"]
    )
    for make in (
        RecordedSampler,
        lambda tokenizer=None: client("http://127.0.0.1:1/v1", tokenizer=tokenizer),
    ):
        assert make().count_tokens(["some text"]) is None
        short, long, empty = make(tokenizer=str(directory)).count_tokens(["text", "text " * 50, ""])
        assert empty == 0 < short < long


def responses_file(path, **changes):
    columns = {
        "level": [1, 1, 2],
        "problem_id": [3, 3, 3],
        "sample_id": [0, 2, 0],
        "model": ["Org/M"] * 3,
        "response": ["a", "<think>b", "c"],
    }
    pl.DataFrame(columns | changes).write_parquet(path)
    return path


def kernelbench_task(level, problem):
    return KernelTask(
        task_id=f"kernelbench/L{level}/{problem}", name="x", code="class Model: pass", level=level
    )


def test_responses_file_answers_by_level_problem_and_sample(tmp_path):
    sampler = ResponsesFile(responses_file(tmp_path / "r.parquet"))
    wanted = [
        request(kernelbench_task(level, 3), index, Language.CUDA)
        for level in (1, 2, 3)
        for index in range(3)
    ]
    got = {
        response.request_key: (response.text, response.finish_reason)
        for response in sampler.sample(wanted)
    }
    assert got == {
        "kernelbench/L1/3#cuda#0": ("a", "stop"),
        "kernelbench/L1/3#cuda#2": ("<think>b", "length"),
        "kernelbench/L2/3#cuda#0": ("c", "stop"),
    }
    assert sampler.generator == "Org/M"
    assert not list(sampler.sample([request(kernelbench_task(1, 3), 0, Language.CPP)])), (
        "the recordings are CUDA"
    )


def test_responses_file_may_name_its_language(tmp_path):
    sampler = ResponsesFile(
        responses_file(tmp_path / "r.parquet", language=["cpp", "triton", None])
    )
    tasks = [
        (kernelbench_task(1, 3), 0, Language.CPP),
        (kernelbench_task(1, 3), 2, Language.TRITON),
        (kernelbench_task(2, 3), 0, Language.CUDA),
    ]
    assert [
        response.text
        for response in sampler.sample([request(*asked[:2], asked[2]) for asked in tasks])
    ] == ["a", "<think>b", "c"]


@pytest.mark.parametrize("changes, message", CASES["responses_file_refuses_what_is_ambiguous"])
def test_responses_file_refuses_what_is_ambiguous(tmp_path, changes, message):
    with pytest.raises(UsageError, match=message):
        ResponsesFile(responses_file(tmp_path / "r.parquet", **changes))


def test_responses_file_names_what_is_wrong_with_the_file(tmp_path):
    pl.DataFrame({"level": [1]}).write_parquet(tmp_path / "short.parquet")
    with pytest.raises(UsageError, match="no column problem_id, sample_id, model, response"):
        ResponsesFile(tmp_path / "short.parquet")
    with pytest.raises(UsageError, match="does not exist"):
        ResponsesFile(tmp_path / "absent.parquet")


# --- OpenAI client
# --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv(KEY_ENV, KEY)
    without_proxies(monkeypatch)


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
        assert full.wait(timeout=20)
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
            together.wait(timeout=20)  # breaks unless three requests are in flight at once
        if body["messages"][0]["content"] == "prompt 0":
            assert first_may_go.wait(timeout=20)
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
    with pytest.raises(EvalError, match="attempts") as caught:
        list(client(url, retries=1).sample([make_request()]))
    assert url in str(caught.value)


def test_an_answer_that_never_comes_times_out():
    over = threading.Event()

    def answer(number, body):
        over.wait(timeout=60)
        return 200, completion()

    with serving(answer) as server:
        with pytest.raises(EvalError, match=r"in 2 attempts: .*timed out"):
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


@pytest.mark.parametrize("count, tail", [(10, {}), (3, {"tail_wait_s": 3600.0, "tail_share": 0.7})])
@pytest.mark.parametrize("leave", ["close", "interrupt"])
def test_leaving_early_cancels_what_is_in_flight(leave, count, tail, monkeypatch):
    hold, one_taken = threading.Event(), threading.Event()

    def answer(number, body):
        if number == 0:
            return 200, completion()
        if (
            number == 2 and leave == "interrupt"
        ):  # Ctrl-C while the caller waits for its second answer
            one_taken.wait(timeout=20)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        hold.wait(timeout=20)
        return 200, completion()

    with serving(answer) as server:
        stream = client(server.url, concurrency=2, **tail).sample(
            [make_request(index) for index in range(count)]
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
