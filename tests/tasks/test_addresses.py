"""Which server gets the next request, by a clock of the test's; and the client over several real
servers."""

import asyncio
import threading
from collections import Counter

import pytest

from kernels_eval.errors import EvalError, UsageError
from tasks.synthesis.addresses import Addresses
from tests.support.chat_server import completion, serving
from tests.support.requests import client, make_request


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def take(addresses):
    return asyncio.run(asyncio.wait_for(addresses.take(), timeout=60))


def test_the_least_busy_is_next_and_equals_take_turns():
    addresses = Addresses(["a", "b", "c"])
    first = [take(addresses) for _ in range(6)]
    assert Counter(address.url for address in first) == {"a": 2, "b": 2, "c": 2}
    for address in first[:3]:
        addresses.release(address)
    addresses.release(next(address for address in first[3:] if address.url == "b"))
    assert take(addresses).url == "b"


def test_one_that_failed_rests_for_longer_each_time_and_comes_back_on_trial():
    clock = Clock()
    addresses = Addresses(["a", "b"], clock)
    together = [take(addresses) for _ in range(4)]
    lost = [address for address in together if address.url == "a"]
    assert len(lost) == 2
    for address in lost:  # what fails together counts once
        addresses.release(address, transport_fault=True)
    assert not addresses.another_ready(together[1]) and addresses.another_ready(lost[0])
    clock.now += 0.9
    assert [take(addresses).url for _ in range(3)] == ["b"] * 3
    clock.now += 0.2
    trial = take(addresses)
    assert trial.url == "a"
    assert [take(addresses).url for _ in range(3)] == ["b"] * 3, (
        "one request tries it; the others do not wait for what it finds"
    )
    addresses.release(trial, transport_fault=True)
    clock.now += 1.5
    assert take(addresses).url == "b", "its second rest lasts two seconds"
    clock.now += 0.6
    addresses.release(take(addresses))
    assert [take(addresses).url for _ in range(5)] == ["a"] * 5, (
        "after an answer it is one of them again"
    )


def test_where_all_rest_the_first_to_wake_is_given():
    clock = Clock()
    addresses = Addresses(["a", "b"], clock)
    for url in ("a", "b"):
        address = take(addresses)
        assert address.url == url
        addresses.release(address, transport_fault=True)
        clock.now += 0.1
    assert take(addresses).url == "a"


def test_parked_addresses_are_waited_for_and_a_fault_reaches_everybody():
    addresses = Addresses()

    async def wait():
        waiting = [asyncio.create_task(addresses.take()) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        thread = threading.Thread(
            target=addresses.put, args=(0, "a")
        )  # an owner's thread knows no event loop
        thread.start()
        found = [
            address.url for address in await asyncio.wait_for(asyncio.gather(*waiting), timeout=60)
        ]
        addresses.park(0)
        waiting = [asyncio.create_task(addresses.take()) for _ in range(2)]
        await asyncio.sleep(0)
        addresses.fail(EvalError("all are gone"))
        errors = await asyncio.wait_for(
            asyncio.gather(*waiting, return_exceptions=True), timeout=60
        )
        assert [str(error) for error in errors] == ["all are gone"] * 2
        return found

    assert asyncio.run(wait()) == ["a"] * 3 and addresses.most == 1
    with pytest.raises(EvalError, match="all are gone"):
        take(addresses)


def test_an_address_keeps_its_count_until_it_is_parked():
    addresses = Addresses()
    addresses.put("r", "a")
    taken = take(addresses)
    addresses.put("r", "a")
    assert take(addresses) is taken and taken.in_flight == 2
    addresses.park("r")
    addresses.put("r", "a")
    assert take(addresses) is not taken, (
        "what is still in flight at the one before is not this one's"
    )


# --- the client
# --------------------------------------------------------------------------------------------------


def ask_several(urls, count, **options):
    asked = [make_request(index, prompt=f"{index}") for index in range(count)]
    return sorted(response.text for response in client(urls, **options).sample(asked))


def echo(number, body):
    return 200, completion(body["messages"][0]["content"])


def test_work_is_spread_by_what_is_in_flight():
    free = threading.Event()

    def slow(number, body):
        assert free.wait(timeout=20)
        return echo(number, body)

    def quick(number, body):
        if number == 17:  # all that the slow one did not take
            free.set()
        return echo(number, body)

    with serving(slow) as one, serving(quick) as other:
        assert len(ask_several([one.url, other.url], 20, concurrency=4)) == 20
    assert (len(one.bodies), len(other.bodies)) == (2, 18)


def test_a_dead_address_costs_no_request_and_no_pause():
    with serving(echo) as gone:
        dead = gone.url
    with serving(echo) as alive:
        got = ask_several([dead, alive.url], 30, backoff_s=3600.0, concurrency=4)
    assert got == sorted(str(index) for index in range(30))


def test_a_server_that_drops_what_it_holds_loses_nothing():
    """Ten requests are lost with the connections that carried them; each gets its answer from the
    other one."""
    together = threading.Barrier(10)

    def drop(number, body):
        together.wait(timeout=20)
        return 0, b""

    with serving(drop) as bad, serving(echo) as good:
        got = ask_several([bad.url, good.url], 20, backoff_s=3600.0, concurrency=20)
        assert len(bad.bodies) == 10
    assert got == sorted(str(index) for index in range(20))


def test_where_all_are_dead_the_attempts_end():
    with serving(echo) as one, serving(echo) as other:
        urls = [one.url, other.url]
    with pytest.raises(EvalError, match="in 4 attempts") as caught:
        ask_several(urls, 1, retries=1)
    assert all(url in str(caught.value) for url in urls)


def test_a_refusal_names_the_address_that_refused():
    with (
        serving(echo) as fine,
        serving(lambda number, body: (404, {"error": {"message": "no"}})) as strange,
    ):
        with pytest.raises(UsageError, match="HTTP 404") as caught:
            ask_several([fine.url, strange.url], 8, concurrency=2)
    assert strange.url in str(caught.value) and fine.url not in str(caught.value)


def test_an_empty_list_of_addresses_is_refused():
    with pytest.raises(UsageError, match="holds no address"):
        client([])
