"""What may not get into a training set: answers that were cut off, and a task's kernel twice; and
what the manifest says of both."""

import pytest

from tasks.curation import stage
from tasks.curation.checks import usable
from tasks.curation.config import CurationConfig
from tasks.curation.decisions import curate, decide, explained
from tasks.curation.kernels import with_kernels
from tasks.curation.pool import ends
from tasks.curation.tables import deciding_of
from tasks.decontamination.config import DeduplicationConfig
from tasks.decontamination.deduplication import equal_kernels
from tasks.synthesis.parsing import guessed_finish, is_unfinished
from tests.support.samples import FUSION, SINGLE, frame, line_of, sample, samples

CODE = "class ModelNew:\n    def forward(self, x):\n        scale = {}\n        return x * scale\n"
BLOCK = "Thoughts.</think>\n```python\nclass ModelNew: ...\n```\n"


def told(tmp_path, rows, equal=stage.same_text, **config):
    made = stage.run(line_of(tmp_path, rows), CurationConfig(**config), equal=equal).open()
    return made.read()["candidate_id"].to_list(), made.manifest


def test_an_answer_that_the_token_limit_cut_off_is_left_out_and_counted(tmp_path):
    rows = samples("a-0 10 2.0; a-1 20 1.0; b-0 10 2.0; c-0 10 2.0; d-0 10 2.0")
    known = (
        ("length", None, 50),
        ("stop", None, 60),
        ("length", True, None),
        (None, None, 16384),
        (None, None, 70),
    )
    for row, (reason, guessed, tokens) in zip(rows, known, strict=True):
        row |= {"finish_reason": reason, "finish_guessed": guessed, "completion_tokens": tokens}
        row["sampling"] = {"max_tokens": 16384}
    ids, manifest = told(tmp_path / "out", rows)
    assert ids == ["a-1", "d-0"]  # the next of the task is its shortest and fastest then
    assert manifest["answers_end"] == {
        "correct": {
            "by itself": 1,
            "cut off (recorded)": 1,
            "cut off (guessed from the text)": 1,
            "cut off (guessed from tokens)": 1,
            "unknown": 1,
        },
        "left_out": 3,
    }
    ids, manifest = told(tmp_path / "in", rows, cut_off_answers=True)
    assert ids == ["a-0", "b-0", "c-0", "d-0"] and manifest["answers_end"]["left_out"] == 0
    kept = stage.run(line_of(tmp_path / "more", rows), CurationConfig(cut_off_answers=True))
    reasons = kept.open().read()["finish_reason"].to_list()
    assert reasons == ["length", "length", "length", None]  # what training reads


def ended(table):
    return ends(usable(table, CurationConfig()))


def test_finish_reasons_are_read_as_servers_name_them():
    names = ("MAX_TOKENS", "max_length", "end_turn", "EOS", "abort", "content_filter")
    rows = [sample(name, 0, 9, 1.0) | {"finish_reason": name} for name in names]
    cut, whole = "cut off (recorded)", "by itself"
    assert ended(frame(*rows)).to_list() == [cut, cut, whole, whole, "unknown", "unknown"]


def test_a_length_that_answers_to_several_tasks_share_is_their_generators_limit():
    rows = samples("a-0 9 1.0; a-1 9 1.0; b-0 9 1.0; c-0 9 1.0; c-1 9 1.0")
    for row, tokens in zip(rows, (900, 800, 900, 300, 300), strict=True):
        row["completion_tokens"] = tokens
    of_one_task = [row | {"task_id": "a"} for row in rows]
    limit = "cut off (guessed from tokens)"
    assert ended(frame(*rows)).to_list() == [limit, "unknown", limit, "unknown", "unknown"]
    assert set(ended(frame(*of_one_task))) == {"unknown"}
    assert set(ended(frame(*rows).drop("completion_tokens", "finish_reason"))) == {"unknown"}


@pytest.mark.parametrize(
    "after, unfinished",
    [
        ("", False),
        ("It is fast.", False),
        ("已优化。", False),
        ("| a | b |", False),
        ("It is fast because the ker", True),
        ("First,", True),
        ("```python\nclass", True),
    ],
)
def test_a_recorded_answer_that_stops_in_mid_sentence_is_guessed_to_be_cut_off(after, unfinished):
    assert is_unfinished(BLOCK + after) is unfinished
    known = {"finish_reason": "length" if unfinished else "stop", "finish_guessed": True}
    assert guessed_finish(BLOCK + after) == known


def twice(second=None):
    """Two fast samples of one task, and others: by criterion b both would be taken."""
    rows = samples("a-0 10 6.0; a-1 20 7.0; b-0 10 9.0; b-1 20 8.0")
    for row, code in zip(
        rows, (CODE.format(2), second or CODE.format(2), "x = 1", "x = 2"), strict=True
    ):
        row["code"] = code
    return rows


def test_a_kernel_is_taken_once_for_a_task(tmp_path):
    ids, manifest = told(tmp_path / "same", twice())
    assert ids == ["b-0", "a-0", "b-1"]
    assert manifest["equal_kernels"] == {"compared": 4, "left_out": 1}
    ids, manifest = told(tmp_path / "kept", twice(), equal=None)
    assert ids == ["b-0", "a-0", "a-1", "b-1"] and not manifest["equal_kernels"]["left_out"]


@pytest.mark.parametrize("other", [CODE.format(2) + "\n\n", CODE.format(2).replace("scale", "s")])
def test_a_program_whose_names_or_spaces_differ_is_the_same_kernel(tmp_path, other):
    equal = equal_kernels(DeduplicationConfig())
    ids, _ = told(tmp_path, twice(second=other), equal=equal)
    assert ids == ["b-0", "a-0", "b-1"]
    assert equal_kernels(DeduplicationConfig(enabled=False)) is None


def test_the_next_kernel_of_a_task_takes_the_place_of_an_equal_one(tmp_path):
    rows = samples("a-0 10 2.0 single; a-1 20 1.0 single; a-2 30 1.0 single; b-0 9 2.0")
    rows += [sample("c", index, 10 + index, 1.0 + index, ops=FUSION) for index in range(2)]
    for row, code in zip(rows, ("x = 1", "x = 1", "x = 3", "x = 4", "x = 5", "x = 6"), strict=True):
        row["code"] = code
    ids, _ = told(tmp_path, rows, single_operator_quota=0.9)
    assert ids == ["a-0", "b-0", "a-2"]
    refs = line_of(tmp_path / "again", rows)
    config = CurationConfig(single_operator_quota=0.9)
    known = deciding_of(refs)
    known = with_kernels(known, config, refs.candidates.open(), stage.same_text)
    said = explained(decide(known, config).decisions, "a-1")
    assert (said["why_not"], said["equals"]) == ("equal_kernel", "a-0")
    many = CurationConfig(strategy="min_length", size=9, max_per_task=None)
    known = with_kernels(known, many, refs.candidates.open(), stage.same_text)
    assert "a-1" not in curate(known, many)["candidate_id"].to_list()


def test_tasks_with_one_correct_sample_are_counted_and_a_control_leaves_them_out(tmp_path):
    rows = samples("a-0 10 2.0; b-0 10 2.0; b-1 20 1.0; c-0 10 1.0; c-1 20 2.0")
    ids, manifest = told(tmp_path / "one", rows)
    assert ids == ["a-0", "b-0"]
    assert manifest["concise_and_fast_tasks"] == {"all": 2, "one_correct": 1}
    ids, manifest = told(tmp_path / "two", rows, strategy="concur_two_correct")
    assert ids == ["b-0"]
    assert manifest["concise_and_fast_tasks"] == {"all": 1, "one_correct": 0}
    assert manifest["why_not"]["one_correct"] == 1


def test_the_sizes_of_the_criteria_can_be_the_papers(tmp_path):
    rows = [
        sample(f"t{task:03d}", index, 10 + index, speed, ops=SINGLE if task % 2 else FUSION)
        for task in range(60)
        for index, speed in enumerate((7.0, 6.0, 1.0) if task < 40 else (1.0, 2.0, 1.5))
    ]
    counts = told(tmp_path, rows, criterion_sizes=(20, 9, 12))[1]["criterion_counts"]
    assert counts == {"concise_and_fast": 20, "high_speedup": 9, "single_operator": 12}
    for control in ("concur_without_conciseness", "concur_without_speedup"):
        found = curate(frame(*rows), CurationConfig(strategy=control, criterion_sizes=(20, 9, 12)))
        assert found.height == 41
    small = told(tmp_path / "small", rows, criterion_sizes=(999, 1, 0))[1]["criterion_counts"]
    assert small == {"concise_and_fast": 40, "high_speedup": 1}  # where there are not as many


def test_verdicts_without_a_status_are_counted_and_never_taken(tmp_path):
    rows = samples("a-0 10 2.0; a-1 20 1.0; b-0 10 2.0")
    rows[0]["status"] = None
    ids, manifest = told(tmp_path, rows)
    assert ids == ["a-1", "b-0"] and manifest["without_status"] == 1
