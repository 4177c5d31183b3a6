"""A deadline for the last requests of a run: what has arrived is kept, the rest is cancelled, stays
unanswered, and is all that a later run asks for."""

import threading

import anyio
import pytest

from flows.refresh import Refreshed, summary_rows
from kernels_eval.records import Language
from tasks.progress import gathering
from tasks.synthesis import client as client_module
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.stage import Synthesis
from tasks.synthesis.tail import Tail
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

WAIT_S = 120.0
"""For what takes milliseconds, on a machine under any load."""


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv(KEY_ENV, KEY)
    without_proxies(monkeypatch)


class Held:
    """Answers everything but the requests that `holds` says, until their client goes or `release`
    is set."""

    def __init__(self, holds):
        self.holds = holds
        self.release, self.gone = threading.Event(), threading.Event()

    def __call__(self, number, body):
        if not self.holds(body) or self.release.is_set():
            return 200, completion(body["messages"][0]["content"])
        return self._wait

    def _wait(self, handler):
        handler.connection.settimeout(WAIT_S)
        if not handler.connection.recv(1):
            self.gone.set()


def first(body):
    return body["messages"][0]["content"] == "prompt 0"


def threads():
    return {thread.name for thread in threading.enumerate()}


def test_the_last_is_cancelled_at_the_server_and_all_others_are_answered():
    held = Held(first)
    with serving(held) as server, gathering() as cautions:
        got = ask(server, count=50, concurrency=4, tail_wait_s=0.0)
        assert held.gone.wait(WAIT_S), "its connection is closed"
    assert {answer.text for answer in got} == {f"prompt {n}" for n in range(1, 50)}
    assert "synthesis client" not in threads()
    assert len(cautions) == 1 and cautions[0].startswith("1 of 50 requests stay unanswered")


def test_one_that_pauses_before_another_attempt_is_given_up_too():
    def answer(number, body):
        return (503, {}) if first(body) else (200, completion())

    with serving(answer) as server:
        got = ask(server, count=50, concurrency=4, tail_wait_s=0.0, backoff_s=3600.0)
    assert len(got) == 49


def test_without_a_deadline_or_before_it_everything_is_waited_for():
    for tail in ({}, {"tail_wait_s": 3600.0}):
        go = threading.Event()

        def answer(number, body, go=go):
            assert not first(body) or go.wait(WAIT_S)
            return 200, completion()

        with serving(answer) as server, gathering() as cautions:
            asked = [make_request(n, prompt=f"prompt {n}") for n in range(50)]
            stream = client(server.url, concurrency=4, **tail).sample(asked)
            early = [next(stream) for _ in range(49)]
            go.set()
            assert len([*early, *stream]) == 50 and cautions == []


@pytest.mark.parametrize("count, share, begins_with", [(4, 0.9, 4), (4, 0.5, 4), (4, 0.25, 5)])
def test_the_deadline_begins_when_all_are_sent_and_few_enough_are_left(count, share, begins_with):
    """The first hangs. Of four the fourth begins the deadline when it is sent, or where only one
    may be missing, when it is answered."""

    async def main():
        tail, ended = Tail(count, share, wait_s=0.0), anyio.Event()

        async def hang():
            with tail.request():
                await anyio.sleep_forever()
            ended.set()

        async with anyio.create_task_group() as group:
            group.start_soon(hang)
            await anyio.wait_all_tasks_blocked()
            for number in range(2, count + 1):
                with tail.request():
                    await anyio.wait_all_tasks_blocked()
                    assert ended.is_set() == (number >= begins_with)
                await anyio.wait_all_tasks_blocked()
            assert ended.is_set()
        return tail.given_up

    assert anyio.run(main) == (2 if begins_with == count else 1)


def test_a_share_of_few_requests_is_none():
    with serving(lambda number, body: (200, completion())) as server:
        assert len(ask(server, count=49, concurrency=49, tail_wait_s=0.0)) == 49


def test_a_share_is_not_rounded_down_for_what_binary_fractions_lack():
    assert 0.29 * 100 < 29
    assert Tail(100, 0.29, wait_s=None)._most == 29 and Tail(99, 0.29, wait_s=None)._most == 28


def test_what_has_arrived_and_waits_for_the_caller_is_kept(monkeypatch):
    monkeypatch.setattr(client_module, "UNREAD", 1)
    held = Held(first)
    with serving(held) as server:
        asked = [make_request(n, prompt=f"prompt {n}") for n in range(6)]
        tail = {"tail_wait_s": 0.0, "tail_share": 0.2}
        stream = client(server.url, concurrency=6, **tail).sample(asked)
        one = next(stream)
        assert held.gone.wait(WAIT_S)  # three of them wait for room then
        assert len([one, *stream]) == 5


# -- the stage -------------------------------------------------------------------------------------


def config(server, **changes):
    given = {"sampler": "openai", "model": "m", "base_url": server.url, "api_key_env": KEY_ENV}
    given |= {"samples_per_task": 5, "concurrency": 4, "tail_wait_s": 0.0}
    return SynthesisConfig.model_validate(given | changes)


def rows_of(ref):
    return {row["candidate_id"]: row for row in ref.open().read().to_dicts()}


@pytest.mark.parametrize(
    "tasks, changes, asked", [(10, {"tail_wait_s": None}, 1), (11, {}, 6), (10, {}, 0)]
)
def test_a_later_run_asks_only_for_what_stayed_unanswered(tmp_path, tasks, changes, asked):
    held = Held(lambda body: "# 3" in body["messages"][0]["content"] and body["seed"] == 2)
    with serving(held) as server:
        night = Synthesis(tasks_snapshot(tmp_path, 10), config(server), Language.CUDA).run()
        before, manifest = rows_of(night), night.open().manifest
        assert (manifest["requests"], manifest["unanswered"], manifest["rows"]) == (50, 1, 49)
        assert {(row["task_id"], row["sample_index"]) for row in before.values()} == {
            (f"t/{task}", index) for task in range(10) for index in range(5)
        } - {("t/3", 2)}
        held.release.set()
        sent = len(server.bodies)
        next_tasks = tasks_snapshot(tmp_path, tasks)
        later = Synthesis(next_tasks, config(server, **changes), Language.CUDA).run()
        assert len(server.bodies) - sent == asked
    after = rows_of(later)
    assert {name: after[name] for name in before} == before and len(after) == 49 + asked
    assert later.open().manifest["unanswered"] == (0 if asked else 1)
    same = {name: later for name in ("candidates", "tasks", "verdicts", "curated")}
    (told, *_) = {row["counts"] for row in summary_rows(Refreshed(**same))}
    assert told == ("" if asked else "unanswered 1")
    assert (later == night) == (asked == 0), "the same settings give the same snapshot"


def test_only_a_deadline_is_part_of_the_fingerprint(tmp_path):
    tasks = tasks_snapshot(tmp_path)

    def fingerprint(**changes):
        made = SynthesisConfig.model_validate(changes)
        return Synthesis(tasks, made, Language.CPP).snapshot.fingerprint

    assert not {"tail_wait_s", "tail_share"} & SynthesisConfig(tail_share=0.5).model_dump().keys()
    assert fingerprint() == fingerprint(tail_share=0.5)
    assert len({fingerprint(), fingerprint(tail_wait_s=60), fingerprint(tail_wait_s=61)}) == 3
    for wrong in ({"tail_wait_s": -1}, {"tail_share": 0}, {"tail_share": 1.1}):
        with pytest.raises(ValueError):
            SynthesisConfig.model_validate(wrong)
