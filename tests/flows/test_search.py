"""`concur search` on real C++ kernels with the scripted teacher: killed with SIGKILL and run again,
it verifies each candidate once, and its winners can be curated."""

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from flows import artifacts
from flows import search as search_flow
from flows.cli.render import render
from flows.config import PipelineConfig
from flows.forms import RunForm, SearchForm, VerdictsForm
from flows.search import (
    SOURCES,
    begun_with,
    keep_fresh,
    measured_anew,
    prompt_of,
    winners_of,
)
from flows.track import search_record
from kernels_eval.errors import UsageError
from kernels_eval.records import KernelTask, Language
from tasks.search import confirm
from tasks.search.gain import again, pair_of
from tasks.search.population import Member, Plan
from tasks.search.stage import run
from tasks.store.lookup import snapshots
from tasks.store.snapshot import Snapshot
from tasks.tables import VERDICTS
from tasks.verification.config import VerificationConfig
from tests.support.cases import cases
from tests.support.commands import Running, concur, kill_tree, start
from tests.support.recordings import written
from tests.support.searched import ONCE, Planted, PlantedPool, judge_of, planted_speed

PROFILE = cases("search")["profile"]


def test_verdicts_of_a_search_are_not_where_the_next_one_begins(tmp_path):
    planted = Planted(tmp_path)
    config, *found = begun_with(PipelineConfig(root=planted.root, language="cuda"), None)
    assert found == [planted.verdicts, planted.candidates, planted.tasks]
    assert config.language is Language.CPP and "improved" not in SOURCES
    named = begun_with(PipelineConfig(root=planted.root), planted.verdicts.fingerprint[:8])
    assert list(named[1:]) == found


def test_a_search_begins_with_training_tasks_not_with_the_benchmarks_later_answers(tmp_path):
    trained = Planted(tmp_path, stage="training-tasks")
    held_out = Planted(tmp_path)
    ages = [each.open().manifest["created_at"] for each in (trained.verdicts, held_out.verdicts)]
    assert ages == sorted(ages)
    config = PipelineConfig(root=str(tmp_path))
    assert begun_with(config, None)[1] == trained.verdicts
    assert begun_with(config, held_out.verdicts.fingerprint)[1] == held_out.verdicts


def test_without_verdicts_there_is_one_sentence(tmp_path):
    with pytest.raises(UsageError, match="no finished verdicts with their candidates"):
        begun_with(PipelineConfig(root=str(tmp_path)), None)
    said = concur("search", "--root", str(tmp_path / "none"))
    assert said.returncode == 2 and "concur run --only refresh" in said.stderr


def test_parents_and_their_scores_are_in_the_prompt(tmp_path):
    task = KernelTask(task_id="t", name="t", code="class Model: pass")
    slow, fast = (
        Member(f"c{speed}", f"# code {speed}", 0, "start", speedup=speed) for speed in (1.25, 2.5)
    )
    planted = Planted(tmp_path)
    verdicts = planted.verdicts.open()
    crossed = Plan(task, 1, "cross", (fast, slow))
    text = prompt_of(crossed, Language.CPP, None, verdicts)
    assert text.index("Speedup 1.25") < text.index("# code 1.25") < text.index("Speedup 2.5")
    known = Member("c/t/0/0", "# its code", 0, "start", speedup=1.0)
    rewritten = Plan(task, 1, "rewrite", (known,))
    text = prompt_of(rewritten, Language.CPP, "a small machine", verdicts)
    assert "# its code" in text and "takes 0.889 ms, yours 1 ms" in text
    assert "a small machine" in text and "takes less time" in text


def test_the_form_of_a_search_becomes_its_configuration():
    assert SearchForm().values() == {} and VerdictsForm().snapshot == ""
    filled = SearchForm(evaluations=8, tasks=3, device_s=60, method="random").values()
    assert filled == {
        "search.evaluations": 8,
        "search.tasks": 3,
        "search.device_s": 60,
        "search.method": "random",
    }
    assert RunForm().values() == {}


def test_a_winner_keeps_its_fresh_verdict_and_tables_say_the_gain(tmp_path, monkeypatch):
    planted = Planted(tmp_path, evaluations=24, patience=None)
    search = planted.search()
    with planted.judge(search, PlantedPool()) as judge:
        run(search, judge)
    again = confirm.confirmation(search)
    fresh = planted.verified(again, PlantedPool(lambda code: 3.0), VerificationConfig())
    told = confirm.told_of(search, fresh.open())
    assert told["gain"]["value"] == pytest.approx(1.0) and told["improved"] == 0
    told["results"] = [row | {"improved": True} for row in told["results"]]
    improved = confirm.improved(search, planted.candidates, fresh, told)
    pool = PlantedPool()
    with judge_of(pool)(improved, planted.tasks, VerificationConfig(), Language.CPP) as work:
        keep_fresh(work, fresh.open(), told["results"])
        keep_fresh(work, fresh.open(), told["results"])  # as after a kill
        for chunk in range(1, work.plan() + 1):
            work.verify_chunk(chunk)
        rows = work.snapshot.read(columns=["candidate_id", "timing.speedup"]).rows()
    assert len(rows) == 6 == len(dict(rows))
    assert [dict(rows)[row["winner"]] for row in told["results"]] == [3.0, 3.0]
    assert pool.asked == []  # those of the candidates it began with are known

    shown = {}
    monkeypatch.setattr(
        artifacts, "create_table_artifact", lambda key, table, _: shown.update({key: table})
    )
    artifacts.show_gains(told)
    assert shown["gains"][-1]["task"].startswith("all") and len(shown["gains"]) == 3
    assert shown["gains"][0]["gain (95 % interval)"].startswith("1.000 (0.9")
    text = render(told | {"snapshots": {"improved": "f00d", "verdicts": "beef"}})
    assert "TILE 16 -> " in text and "beef" in text


def test_a_search_is_a_run_with_gains_shares_and_lineages(tmp_path):
    planted = Planted(tmp_path, evaluations=12, operators=("parameters", "flags"))
    search = planted.search()
    with planted.judge(search, PlantedPool()) as judge:
        proposals = run(search, judge)
    fresh = planted.verified(
        confirm.confirmation(search), PlantedPool(), VerificationConfig(once_per_code=False)
    )
    told = confirm.told_of(search, fresh.open())
    improved = confirm.improved(search, planted.candidates, fresh, told)
    config = PipelineConfig(root=planted.root, name="n", search=planted.config)
    made = search_record(config, proposals, improved)
    assert made.metrics["gain"] == told["gain"]["value"] > 1
    assert made.metrics["gain_lower"] <= made.metrics["gain"] <= made.metrics["gain_upper"]
    shares = {name: value for name, value in made.metrics.items() if name.startswith("share.")}
    assert shares == {"share.parameters": 1.0}  # this source calls no compiler with flags
    assert made.metrics["evaluations"] == told["evaluations"] and made.metrics["device_s"] > 0
    assert [step for step, _ in made.series["curve"]] == list(range(1, 13))
    assert [row["task_id"] for row in made.tables["gains"]] == ["t/0", "t/1"]
    (first, *_, last) = [row for row in made.tables["lineage"] if row["task_id"] == "t/0"]
    assert first["operator"] == "start" and last["candidate_id"] == told["results"][0]["winner"]
    assert search_record(config, proposals, improved).run_fingerprint == made.run_fingerprint


def test_winners_are_measured_anew_once_and_keep_that_verdict(tmp_path, monkeypatch):
    planted, pool = Planted(tmp_path), PlantedPool()
    search = planted.search()
    with planted.judge(search, PlantedPool()) as judge:
        run(search, judge)

    def verified(candidates, tasks, config, language):
        return planted.verified(candidates, pool, config)

    monkeypatch.setattr(search_flow, "verify", verified)
    fresh = measured_anew(search, planted.tasks, ONCE)
    of_all = [each.key for population in search.populations.values() for each in again(population)]
    assert sorted(pool.asked) == sorted(of_all) and len(of_all) == 2 * 2 * 3
    assert measured_anew(search, planted.tasks, ONCE) == fresh and len(pool.asked) == len(of_all)
    told = confirm.told_of(search, fresh.open())
    assert told["improved"] == 2
    improved = confirm.improved(search, planted.candidates, fresh, told)
    assert improved.open().manifest["upstream"][2:] == [fresh.fingerprint]
    winners = [each.best.candidate_id for each in search.populations.values()]
    with judge_of(PlantedPool())(improved, planted.tasks, ONCE, Language.CPP) as work:
        keep_fresh(work, fresh.open(), told["results"])
        assert set(work.snapshot.read(columns=["candidate_id"])["candidate_id"]) == set(winners)


def test_a_winner_that_does_not_hold_is_replaced_before_its_gain_is_measured(tmp_path):
    """The fastest of the search fails when it is confirmed, the next one was luck: the gain is that
    of the third, and of the start as it was confirmed."""
    planted = Planted(tmp_path, evaluations=24, patience=None)
    search = planted.search()
    with planted.judge(search, PlantedPool()) as judge:
        proposals = run(search, judge)
        screened = planted.verified(proposals, PlantedPool(), ONCE)
    population = search.populations["t/0"]
    ranked = sorted(population.members.values(), key=lambda each: (-each.lower, each.step))
    best, second, third = (each.code for each in ranked[:3])

    def speed(code):
        return {best: None, second: 0.1}.get(code, planted_speed(code))

    pool = PlantedPool(speed)
    confirmed = planted.confirmed(screened, proposals, pool, winners_of(search))
    search.confirm(confirmed)
    assert search.populations["t/0"].best.code == third
    levels = dict(confirmed.open().read(columns=["candidate_id", "level"]).rows())
    pairs = [pair_of(each) for each in search.populations.values()]
    assert {levels[member.candidate_id] for pair in pairs for member in pair} == {"confirm"}
    assert len(pool.asked) == len(set(pool.asked)) < len(levels)

    again = confirm.confirmation(search)
    fresh = planted.verified(again, PlantedPool(speed), ONCE.confirming())
    told = confirm.told_of(search, fresh.open())
    assert [row["winner"] for row in told["results"]] == [pair[1].candidate_id for pair in pairs]
    assert told["results"][0]["gain"] == pytest.approx(planted_speed(third) / (2 / 2.25))


# -- real kernels ----------------------------------------------------------------------------------


def command(directory, *words):
    process = start(*words, "--profile", "searched.yaml", "--json", cwd=directory)
    try:
        out, err = process.communicate(timeout=3000)
    finally:
        kill_tree(process)
    assert process.returncode == 0, err[-4000:]
    return json.loads(out)


def rows_of(root):
    """Rows of proposals, in parts and journals: (candidate, code)."""
    found = Counter()
    for snapshot in root.glob("search/*"):
        for row in written(snapshot, ["candidate_id", "code"]):
            found[row["candidate_id"], row["code"]] += 1
        for journal in snapshot.glob(".journal-*.jsonl"):
            for line in journal.read_text().splitlines():
                row = json.loads(line)
                found[row["candidate_id"], row["code"]] += 1
    return found


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_evolution_that_was_killed_goes_on_and_judges_everything_once(tmp_path):
    (tmp_path / "searched.yaml").write_text(yaml.safe_dump(PROFILE))
    command(tmp_path, "run", "--only", "refresh")
    first = Running("search", "--root", "out", "--profile", "searched.yaml", cwd=tmp_path)
    try:
        first.wait_for(r"^search +[1-9]", 3000)
        first.wait_for("^verification", 3000)  # in the middle of the next generation
    finally:
        kill_tree(first.process)
    root = tmp_path / "out"
    before = rows_of(root)
    (proposed,) = snapshots(str(root), "search")
    assert before and not proposed.finished, "".join(first.stderr)
    (cut,) = [each for each in snapshots(str(root), "verification") if not each.finished]
    cut.save_journals(VERDICTS)
    judged = {row["candidate_id"]: row for row in cut.read().to_dicts()}
    assert len(judged) > 2

    summary = command(tmp_path, "search", "--root", "out")
    after = rows_of(root)
    assert set(before) <= set(after) and set(after.values()) == {1}
    verdicts = Snapshot(str(root), "verification", cut.fingerprint)
    rows = written(Path(verdicts.path), ["candidate_id", "verdict_key"])
    assert len(rows) == len({row["candidate_id"] for row in rows}) == len(after)
    again = {row["candidate_id"]: row for row in verdicts.read().to_dicts()}
    assert all(again[key] == row for key, row in judged.items())
    table = Snapshot(str(root), "search", proposed.fingerprint).read()
    assert set(table["operator"]) > {"start", "rewrite", "cross"}
    assert summary["evaluations"] == len(after) - summary["tasks"] > 0
    assert summary["tasks"] == 2 and len(summary["results"]) == 2

    # a finished one does nothing, and says the same
    once_more = command(tmp_path, "search", "--root", "out")
    known = set(summary) - {"seconds"}
    assert {key: once_more[key] for key in known} == {key: summary[key] for key in known}
    taken = concur(
        *("curate", "--root", root, "--set", "later_turns=true", "--json"),
        *("--verdicts", root / "verification" / summary["snapshots"]["verdicts"]),
    )
    assert taken.returncode == 0, taken.stderr
