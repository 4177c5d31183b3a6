"""Requests are made when they are read: the same each time, without what is done, and no further
ahead than answers are taken."""

import pytest

from kernels_eval.records import Language
from tasks.sources.stage import read_tasks
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.requests import Questions, first_requests
from tests.support.requests import named_sampler, tasks_snapshot


@pytest.fixture
def tasks(tmp_path):
    return tasks_snapshot(tmp_path, 3)


def asked(tasks, **changes):
    config = SynthesisConfig(
        sampler="openai", model="m", base_url="http://h/v1", samples_per_task=4, **changes
    )
    return first_requests(Questions(read_tasks(tasks), config, Language.CUDA, named_sampler()))


def test_each_reading_gives_the_same_requests_in_the_order_of_tasks(tasks):
    requests = asked(tasks)
    first = list(requests)
    assert first == list(requests) == [requests[request.request_key] for request in first]
    assert [request.task.task_id for request in first] == ["t/0"] * 4 + ["t/1"] * 4 + ["t/2"] * 4
    assert len(requests) == len({request.request_key for request in first}) == 12
    assert [request.sampling.seed for request in first[:4]] == [
        first[0].sampling.seed + index for index in range(4)
    ]


def test_what_is_done_is_left_out_and_a_key_names_what_was_asked(tasks):
    requests = asked(tasks)
    done = {request.request_key for request in list(requests)[2:9]}
    left = requests.without(done)
    assert len(left) == 5 and done.isdisjoint(request.request_key for request in left)
    assert requests.keys.isdisjoint(asked(tasks, hardware="one H200").keys)
    assert requests.keys == asked(tasks, concurrency=3).keys
