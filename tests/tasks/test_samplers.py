"""Recorded responses are replayed exactly; the client speaks the protocol to a real server, faults
included."""

import polars as pl
import pytest

from kernels_eval.errors import UsageError
from kernels_eval.records import KernelTask, Language
from tasks.sources import bundled
from tasks.sources.stage import keep
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.recorded import RecordedSampler, ResponsesFile
from tasks.synthesis.sampler import Response
from tasks.synthesis.stage import Synthesis, candidate_row, parsed_again
from tests.support.cases import cases
from tests.support.requests import client, make_request

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


def test_a_sampler_without_any_response_is_named_with_the_language(tmp_path):
    tasks = keep(bundled.load("train"), str(tmp_path), {})
    synthesis = Synthesis(tasks, SynthesisConfig(sampler="recorded"), Language.TRITON)
    said = "'recorded' has no response to any of .* requests for triton kernels.*set language"
    with pytest.raises(UsageError, match=said):
        synthesis.run()


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


def test_no_draft_counts_in_a_cut_answer_whose_prompt_opened_the_thought(tmp_path):
    from tasks.sources.small_model import build_small_model

    model = build_small_model(tmp_path / "model", ["some text to learn from"])
    asked = request(bundled.load()[0])
    draft = "Perhaps\n```python\nclass ModelNew: pass\n```\nNo, wait"
    for tokenizer, reason in ((None, None), (str(model), "truncated")):
        sampler = client("http://127.0.0.1:1/v1", tokenizer=tokenizer)
        for finish, expected in (("stop", None), ("length", reason)):
            answer = Response(request_key="r", text=draft, finish_reason=finish)
            row = candidate_row(asked, answer, sampler)
            assert row["parse_reason"] == expected, (tokenizer, finish)
            assert parsed_again(row, sampler.count_tokens) == row


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
    with pytest.raises(UsageError, match="is no table of candidates: its columns are level"):
        ResponsesFile(tmp_path / "short.parquet")
    with pytest.raises(UsageError, match="does not exist"):
        ResponsesFile(tmp_path / "absent.parquet")
