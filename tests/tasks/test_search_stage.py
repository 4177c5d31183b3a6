"""A search finds the planted best, verifies each code once, and resumes after a stop."""

from collections import Counter
from itertools import islice

import pytest

from kernels_eval.errors import GpuLostError, UsageError
from tasks.curation.config import CurationConfig
from tasks.curation.pool import eligible_samples
from tasks.curation.tables import joined_on_candidate
from tasks.search import confirm, gain
from tasks.search.config import SearchConfig
from tasks.search.stage import run
from tasks.verification.config import VerificationConfig
from tests.support.searched import Planted, PlantedPool


def searched(planted, pool=None, config=None, write=None):
    search, pool = planted.search(config), pool or PlantedPool()
    with planted.judge(search, pool) as judge:
        run(search, judge, write)
    return search, pool


def evaluations(search):
    return sum(each.evaluations for each in search.populations.values())


def proposals(search):
    rows = search.snapshot.read(columns=["task_id", "step", "operator", "change", "code"])
    return sorted(rows.rows())


def confirmed(planted, search, speed=None):
    pool = PlantedPool(*([speed] if speed else []))
    fresh = planted.verified(confirm.confirmation(search), pool, VerificationConfig())
    summary = confirm.told_of(search, fresh.open())
    improved = confirm.improved(search, planted.candidates, fresh, summary)
    return summary, improved, pool


def test_the_best_of_the_planted_space_is_found_and_each_code_verified_once(tmp_path):
    search, pool = searched(Planted(tmp_path, evaluations=24, patience=None))
    assert {each.best.score for each in search.populations.values()} == {2.0}
    starts = [each.start.score for each in search.populations.values()]
    assert starts == pytest.approx([2 / 2.25] * 2)
    rows = proposals(search)
    assert len({(task, code) for task, *_, code in rows}) == len(rows) == len(pool.asked)
    assert search.gain == pytest.approx(2.25) and search.snapshot.finished
    steps = Counter(task for task, *_ in rows)
    assert all(count <= 25 for count in steps.values())
    best = search.populations["t/0"].best
    line = search.populations["t/0"].lineage(best)
    assert line[0].operator == "start" and line[-1] is best and len(line) >= 2


def test_a_finished_search_asks_nobody(tmp_path):
    planted = Planted(tmp_path)
    first, _ = searched(planted)
    again, pool = searched(planted)
    assert pool.asked == [] and proposals(again) == proposals(first)
    assert evaluations(again) == evaluations(first) > 0


@pytest.mark.parametrize("lost_after", [0, 1, 5, 9])
def test_one_that_was_stopped_ends_as_one_that_was_not_and_verifies_nothing_twice(
    tmp_path, lost_after
):
    whole, pool = searched(Planted(tmp_path / "whole"))
    stopped = Planted(tmp_path / "stopped")
    broken = PlantedPool(lost_after=lost_after)
    with pytest.raises(GpuLostError):
        searched(stopped, broken)
    rest = PlantedPool()
    search, _ = searched(stopped, rest)
    assert proposals(search) == proposals(whole)
    assert sorted(broken.asked + rest.asked) == sorted(pool.asked)
    assert len(set(broken.asked) & set(rest.asked)) == 0 and len(broken.asked) == lost_after


def test_a_generation_that_was_cut_while_it_was_written_is_completed_as_it_would_have_been(
    tmp_path,
):
    whole, _ = searched(Planted(tmp_path / "whole"))
    planted = Planted(tmp_path / "cut")
    search, pool = planted.search(), PlantedPool()
    with planted.judge(search, pool) as judge:
        search.begin(judge, None)
        search.run_generation(0)
        rows = search._rows

        def until_killed(asked):
            yield from islice(rows(asked), 4)
            raise KeyboardInterrupt

        search._rows = until_killed
        with pytest.raises(KeyboardInterrupt):
            search.run_generation(1)
    assert len(search.snapshot.keys("candidate_id")) == 2 + 4
    again, _ = searched(planted)
    assert proposals(again) == proposals(whole)


def test_equal_code_of_another_search_is_not_verified_again(tmp_path):
    planted = Planted(tmp_path)
    _, pool = searched(planted)
    more, extra = searched(planted, config=planted.config.model_copy(update={"evaluations": 18}))
    assert len(extra.asked) == len(more.snapshot.keys("candidate_id")) - len(pool.asked)


def test_budget_and_patience_end_a_search(tmp_path):
    planted = Planted(tmp_path, device_s=8.0)
    search, _ = searched(planted)
    # two starts and two generations of six: looked at between generations
    assert search.device_s() == 8.0 and evaluations(search) == 6
    flat = PlantedPool(lambda code: 1.0)
    impatient = planted.config.model_copy(update={"device_s": None, "patience": 4, "seed": 1})
    stopped, _ = searched(planted, flat, impatient)
    # verdicts of the same code are those of the first search, where it has them
    assert evaluations(stopped) < 24


def test_random_search_makes_every_change_to_a_start(tmp_path):
    planted = Planted(tmp_path, method="random")
    search, _ = searched(planted)
    rows = search.snapshot.read(columns=["parents", "operator"]).filter(
        search.snapshot.read(columns=["operator"])["operator"] != "start"
    )
    assert {tuple(parents) for parents in rows["parents"]} == {("c/t/0/0",), ("c/t/1/0",)}


def test_without_a_correct_candidate_there_is_one_sentence(tmp_path):
    planted = Planted(tmp_path)
    wrong = PlantedPool(lambda code: None)
    planted.verdicts = planted.verified(
        planted.candidates, wrong, VerificationConfig(eval={"timing": {"max_s": 0.3}})
    )
    with pytest.raises(UsageError, match=r"no cpp candidate of .* is correct"):
        searched(planted)


def test_a_task_whose_start_is_wrong_here_is_left_alone(tmp_path):
    planted = Planted(tmp_path)
    pool = PlantedPool(lambda code: None if "task t0" in code else 1.0)
    search, _ = searched(planted, pool)
    summary, _, _ = confirmed(planted, search)
    assert [row["gain"] is None for row in summary["results"]] == [True, False]
    assert summary["results"][0]["evaluations"] == 0 < summary["results"][1]["evaluations"]


# -- confirmed -------------------------------------------------------------------------------------


def test_winners_become_samples_of_a_later_turn_with_the_reasoning_of_their_start(tmp_path):
    planted = Planted(tmp_path, evaluations=24, patience=None)
    search, _ = searched(planted)
    summary, improved, pool = confirmed(planted, search)
    assert summary["improved"] == 2 and summary["gain"]["value"] == pytest.approx(2.25)
    assert summary["share_above_5_percent"] == 1.0 and len(pool.asked) == 2 * 2 * 3
    assert not set(pool.asked) & search.snapshot.keys("candidate_id")  # measured anew
    assert summary["curve"][-1] == pytest.approx(2.25) and len(summary["curve"]) == 24
    rows = {row["candidate_id"]: row for row in improved.open().read().to_dicts()}
    assert len(rows) == 4 + 2
    won = rows[summary["results"][0]["winner"]]
    assert (won["turn"], won["parent"]) == (2, "c/t/0/0")
    assert won["reasoning"] == "I think, 0 times." and won["reasoning_tokens"] == 4
    assert won["generator"] == "writer + search" and won["code"].rstrip() in won["answer"]
    assert "TILE = 64" in won["code"] and won["finish_reason"] == "stop"
    judged = planted.verified(improved, PlantedPool(), VerificationConfig())
    frame = joined_on_candidate(
        *(ref.open().read(unique="candidate_id") for ref in (judged, improved))
    )
    assert len(eligible_samples(frame, CurationConfig())) == 2
    assert len(eligible_samples(frame, CurationConfig(later_turns=True))) == 4


def test_luck_is_not_confirmed(tmp_path):
    """All kernels are equally fast, and the search's clock is wrong by up to a third."""
    planted = Planted(tmp_path)
    search, _ = searched(planted, PlantedPool(lambda code: 1 + (hash_of(code) % 100) / 300))
    assert search.gain > 1.05
    summary, improved, _ = confirmed(planted, search, lambda code: 1.0)
    assert summary["gain"]["value"] == 1.0 and summary["improved"] == 0
    assert len(improved.open().keys("candidate_id")) == 4


def hash_of(text):
    import zlib

    return zlib.crc32(text.encode())


def test_a_winner_that_fails_once_is_no_winner(tmp_path):
    planted = Planted(tmp_path)
    search, _ = searched(planted)
    best = {each.best.code for each in search.populations.values()}
    calls = Counter()

    def flaky(code):
        calls[code] += 1
        return None if code in best and calls[code] == 2 else 2.0

    summary, _, _ = confirmed(planted, search, flaky)
    assert [row["gain"] for row in summary["results"]] == [None, None]
    assert summary["improved"] == 0


def test_the_interval_of_a_gain_is_that_of_its_formula():
    one, two = gain.Interval(1.0, 1 / 1.1, 1.1), gain.Interval(2.0, 2 / 1.1, 2 * 1.1)
    once = gain.gain_of([one], [two])
    wide = 1.1**2**0.5
    assert once == pytest.approx((2.0, 2 / wide, 2 * wide))
    narrower = gain.gain_of([one] * 4, [two] * 4)
    assert narrower.upper == pytest.approx(2 * wide**0.5)
    slow, fast = gain.Interval(1.0, 0.99, 1.01), gain.Interval(4.0, 3.99, 4.01)
    apart = gain.gain_of([slow, slow], [slow, fast])  # rounds that disagree say so themselves
    assert apart.value == pytest.approx(2.0) and apart.upper > 2 * 3.8
    assert gain.mean_gain([2.0, 0.5]).value == pytest.approx(1.0)
    assert gain.mean_gain([]) == (1.0, 1.0, 1.0)
    assert gain.mean_gain([3.0]) == pytest.approx((3.0, 3.0, 3.0))


def test_an_operator_that_asks_a_model_needs_one(tmp_path):
    planted = Planted(tmp_path, operators=("rewrite",))
    with pytest.raises(UsageError, match="no model is asked"):
        searched(planted)


def test_what_a_model_wrote_is_kept_and_not_asked_again(tmp_path):
    planted = Planted(tmp_path, operators=("rewrite", "cross", "parameters"), evaluations=9)
    asked = []

    def write(questions):
        for each in questions:
            asked.append((each.task.task_id, each.step))
            if len(asked) == 4:
                raise GpuLostError("the endpoint is gone")
            yield each, written(each)

    with pytest.raises(GpuLostError):
        searched(planted, write=write)
    search, _ = searched(planted, write=write)
    repeated = [key for key, count in Counter(asked).items() if count > 1]
    assert repeated == asked[3:4]  # the one that was not answered
    rows = search.snapshot.read(columns=["operator", "parents", "turn", "code"]).to_dicts()
    assert {len(row["parents"]) for row in rows if row["operator"] == "cross"} == {2}
    assert all(row["turn"] >= 2 for row in rows if row["operator"] != "start")


def written(asked):
    from kernels_eval.records import Candidate

    parent = asked.parents[0]
    tile = (32, 64, 128)[asked.step % 3]
    code = parent.code.replace("// task", f"// step {asked.step}\n// task")
    code = code.replace("TILE = 16", f"TILE = {tile}")
    return Candidate(
        candidate_id=f"{asked.task.task_id}/{asked.step}",
        task_id=asked.task.task_id,
        language="cpp",
        generator="model",
        sample_index=asked.step,
        response="written",
        code=code,
        turn=asked.turn,
        parent=parent.candidate_id,
    ).model_dump(mode="json") | {"request_key": f"r/{asked.task.task_id}/{asked.step}"}


def test_the_configuration_says_what_is_wrong():
    for wrong in ({"operators": []}, {"operators": ["shuffle"]}, {"evaluations": 0}):
        with pytest.raises((ValueError, UsageError)):
            SearchConfig.model_validate(wrong)


def test_only_so_many_tasks_and_starts_are_taken(tmp_path):
    planted = Planted(tmp_path, tasks=3)
    everything = PlantedPool(lambda code: 2.0 if "TILE = 256" in code else 1.0)
    planted.verdicts = planted.verified(
        planted.candidates, everything, VerificationConfig(eval={"timing": {"max_s": 0.3}})
    )
    config = planted.config.model_copy(update={"tasks": 2, "starts": 2, "evaluations": 2})
    search, _ = searched(planted, everything, config)
    rows = search.snapshot.read(columns=["task_id", "step", "candidate_id", "operator"])
    started = sorted(row[:3] for row in rows.rows() if row[3] == "start")
    assert started == [
        ("t/0", -1, "c/t/0/0"),
        ("t/0", 0, "c/t/0/1"),  # the fastest first
        ("t/1", -1, "c/t/1/0"),
        ("t/1", 0, "c/t/1/1"),
    ]
