"""The morning report on planted snapshots: what is new, what failed, what to do; and the history it
compares with."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from prefect.exceptions import TerminationSignal

from flows.cli.main import main
from flows.morning import step
from flows.morning.history import BEGAN, PLACE, before, entered, refreshes
from flows.morning.report import report_of
from flows.morning.step import reported, write_files
from flows.morning.text import headline, markdown
from kernels_eval.errors import UsageError
from tasks.reporting.text import moment
from tasks.store.snapshot import Snapshot
from tasks.tables import CANDIDATES, CURATED, TASKS, VERDICTS
from tests.support.cases import cases
from tests.support.commands import ROOT
from tests.support.typed import data_of, typed

CASES = cases("flows")


def written(root, stage, night, rows, schema, **extra):
    snapshot = Snapshot(str(root), stage, f"{stage} {night}")
    if not snapshot.finished:
        snapshot.append(rows, schema)
        snapshot.publish(config={}, extra=extra)
    return snapshot.ref


def planted(root, night, tasks, statuses, taken):
    """The snapshots of one night: `statuses` by candidate; `taken` are those of the training set.
    The task of `c12` is `t1`."""
    programs = [{"task_id": f"t{n}", "name": f"task {n}", "code": f"# {n}"} for n in range(tasks)]
    samples = [{"candidate_id": name, "task_id": f"t{name[1]}"} for name in statuses]
    verdicts = [
        sample
        | {"status": status, "reason": "ok" if status == "correct" else "build_failed"}
        | {"verdict_key": f"{sample['candidate_id']} {status}", "detail": ""}
        | {"log_tail": f"m.cpp:3:1: error: '{sample['candidate_id']}' is unknown <b>here</b>"}
        for sample, status in zip(samples, statuses.values(), strict=True)
    ]
    told = {"status_counts": dict(Counter(statuses.values())), "quarantined": []}
    chosen = [each for each in samples if each["candidate_id"] in taken]
    return {
        "tasks": written(root, "training-tasks", tasks, programs, TASKS),
        "candidates": written(root, "synthesis", night, samples, CANDIDATES),
        "verdicts": written(root, "verification", night, verdicts, VERDICTS, **told),
        "curated": written(root, "curation", night, chosen, CURATED),
    }


def morning(root, ended):
    return report_of(ended, *before(root, ended))


def begun(root, name="nightly"):
    return entered(str(root), name, "cpp", "concur")


def night(root, snapshots, **changes):
    with begun(root) as entry:
        return entry.ends("finished", snapshots=snapshots, **changes)


FIRST = {"c01": "correct", "c02": "compile_error", "c11": "correct"}
SECOND = FIRST | {"c21": "correct", "c22": "compile_error", "c23": "runtime_error"}


def test_the_first_refresh_counts_what_is_there_and_the_same_again_is_nothing_new(tmp_path):
    snapshots = planted(tmp_path, "one", 2, FIRST, ["c01", "c11"])
    first = morning(str(tmp_path), night(tmp_path, snapshots))
    assert first.compared_with is None and not first.nothing_new
    assert {change.what: [change.rows, change.new] for change in first.changes} == CASES[
        "first_changes"
    ]
    again = morning(str(tmp_path), night(tmp_path, snapshots))
    assert again.nothing_new and headline(again).startswith("Nothing new")
    assert again.errors == ()
    assert again.new_status_counts == {}
    assert again.status_counts == {"correct": 2, "compile_error": 1}
    header = "| what | rows | new | gone |\n| --- | --- | --- | --- |\n"
    assert f"{header}| tasks |" in markdown(again)
    assert again.next_steps == () and "What to do" not in markdown(again)
    assert "| candidates | 3 | 0 | 0 |" in markdown(again)


def test_a_second_night_names_what_came_what_went_and_why(tmp_path):
    night(tmp_path, planted(tmp_path, "one", 2, FIRST, ["c01", "c11"]))
    found = morning(
        str(tmp_path),
        night(
            tmp_path, planted(tmp_path, "two", 3, SECOND, ["c01", "c21"]), cautions=("no figures",)
        ),
    )
    assert {change.what: [change.new, change.gone] for change in found.changes} == CASES[
        "second_changes"
    ]
    assert found.new_status_counts == {"correct": 1, "compile_error": 1, "runtime_error": 1}
    assert found.reason_counts == {"build_failed": 2}
    assert sum(group.count for group in found.errors) == 2
    assert found.cautions == ("no figures",)
    text = markdown(found)
    assert "1 new task, 3 new candidates" in text
    assert "1 training sample gone" in text
    assert "no figures" in text
    assert "- The most frequent error of new candidates, 2 times:" in text
    assert "<b>" not in text  # what candidates wrote does nothing on the page
    first, second = found.next_steps[:2]
    assert "error: 'c22' is unknown" in first, "the words of one of them, nothing masked"
    assert first.endswith(f"concur show --root {tmp_path} c22")
    assert second.endswith(f"concur view --root {tmp_path} --open")
    assert "training set by the strategy concur" in text
    assert "| build_failed | 2 | c22 |" in text, "a reason has a candidate to look at"
    assert f"concur show --root {tmp_path} CANDIDATE" in text


def test_another_strategy_is_named_and_its_set_is_no_new_candidates(tmp_path):
    night(tmp_path, planted(tmp_path, "one", 2, FIRST, ["c01", "c11"]))
    chosen = planted(tmp_path, "one", 2, FIRST, ["c01"])
    chosen["curated"] = written(tmp_path, "curation", "shortest", [], CURATED)
    with entered(str(tmp_path), "nightly", "cpp", "min_length") as entry:
        found = morning(str(tmp_path), entry.ends("finished", snapshots=chosen))
    assert f"{moment(found.compared_with.began_at)}, which had the strategy concur" in (
        markdown(found)
    )
    (step,) = found.next_steps
    assert step.startswith("See the training set: ")


def test_an_error_of_few_new_candidates_is_nothing_to_do(tmp_path):
    """Nine in ten are right: what a person does next is to look at them."""
    statuses = {f"c{n:02}": "correct" for n in range(10)}
    few = planted(tmp_path, "one", 2, statuses | {"c10": "compile_error"}, ["c01"])
    found = morning(str(tmp_path), night(tmp_path, few))
    (step,) = found.next_steps
    assert found.errors and step.startswith("See the new candidates: ")


def test_what_confirming_came_to_is_said_and_does_not_count_as_new(tmp_path):
    told = {"rounds": 2, "proposed": 3, "confirmed": 2, "failed": {"wrong_output": 1}}
    told["speedup_ratio"] = {"0.05": 0.9, "0.5": 0.953, "0.95": 1.2}
    for number, status in enumerate(("correct", "incorrect")):
        snapshots = planted(tmp_path, "one", 2, FIRST, ["c01"])
        screened = snapshots["verdicts"]
        rows = [
            row | {"verdict_key": f"{status} {row['candidate_id']}"}
            for row in screened.open().read().to_dicts()
        ]
        with begun(tmp_path) as entry:
            confirmed = written(tmp_path, "verification", status, rows, VERDICTS, confirmation=told)
            shots = snapshots | {"screened": screened, "verdicts": confirmed}
            ended = entry.ends("finished", snapshots=shots)
        found = morning(str(tmp_path), ended)
        assert found.nothing_new == bool(number), "another night confirms others"
    text = markdown(found)
    said = (
        "Confirmed 2 of 3 candidates proposed for the training set in 2 rounds; confirmed /"
        " screened speedup: 5th percentile 0.90, median 0.95, 95th percentile 1.20."
    )
    assert said in text
    assert said in " ".join(typed(f"morning --root {tmp_path}").split())
    assert "| wrong\\_output | 1 |" in text or "| wrong_output | 1 |" in text
    again = morning(str(tmp_path), night(tmp_path, ended.snapshots))
    made = moment(ended.snapshots["verdicts"].open().manifest["created_at"])
    reused = markdown(again)
    assert f"Reused from an earlier run ({made}): confirmed 2 of 3 candidates" in reused
    assert "wrong" not in reused, "nothing failed in this run"


def test_refreshes_that_failed_since_are_told_and_are_not_compared_with(tmp_path):
    snapshots = planted(tmp_path, "one", 2, FIRST, ["c01"])
    night(tmp_path, snapshots)
    with pytest.raises(RuntimeError), begun(tmp_path):
        raise RuntimeError("the <disk> is full")
    with pytest.raises(KeyboardInterrupt), begun(tmp_path, "by hand"):
        raise KeyboardInterrupt
    with begun(tmp_path):
        pass  # a process that is killed here writes nothing more
    with begun(tmp_path, "other") as entry:
        entry.ends("finished", snapshots=snapshots)
    found = morning(str(tmp_path), night(tmp_path, snapshots))
    assert [each.ending for each in found.unfinished] == ["failed", "stopped", "killed"]
    assert [each.name for each in found.unfinished] == ["nightly", "by hand", "nightly"]
    assert found.compared_with.name == "nightly"
    assert found.nothing_new
    assert "| failed | RuntimeError: the &#60;disk&#62; is full |" in markdown(found)
    failed = next(each for each in refreshes(str(tmp_path)) if each.ending == "failed")
    report = morning(str(tmp_path), failed)
    assert "The refresh failed after" in headline(report)
    assert "Mend the error, and start the refresh again. It resumes" in markdown(report)
    assert "RuntimeError: the &#60;disk&#62; is full" in markdown(report)
    with pytest.raises(UsageError), begun(tmp_path):
        raise UsageError("nothing is fast", "lower <it>")
    (step,) = morning(str(tmp_path), refreshes(str(tmp_path))[-1]).next_steps
    assert step.endswith("the same fails again: UsageError: nothing is fast (lower <it>)")


def test_the_history_survives_what_a_kill_and_a_damaged_disk_leave(tmp_path):
    kept = night(tmp_path, {})
    place = tmp_path / PLACE
    (place / f".{kept.id}.json.1.tmp").write_text("{")  # killed while it was written
    (place / "99990101T000000000000Z-x.json").write_text('{"id": "half')
    (place / f"99990101T000000000000Z-y{BEGAN}").write_bytes(b"\xff\x00")
    assert [each.id for each in refreshes(str(tmp_path))] == [kept.id]
    assert kept.seconds is not None and kept.seconds >= 0
    assert before(str(tmp_path), kept) == (None, [])


def test_snapshots_that_were_removed_since_are_a_caution(tmp_path):
    first = planted(tmp_path, "one", 2, FIRST, ["c01"])
    night(tmp_path, first)
    second = night(tmp_path, planted(tmp_path, "two", 3, SECOND, ["c01", "c21"]))
    (Path(first["candidates"].open().path) / "manifest.json").unlink()
    found = morning(str(tmp_path), second)
    assert any(
        "candidates of the previous refresh are no longer under the root" in caution
        for caution in found.cautions
    )
    assert next(change.new for change in found.changes if change.what == "candidates") == len(
        SECOND
    )


def test_the_report_is_a_file_and_a_command(tmp_path):
    snapshots = planted(tmp_path, "one", 2, FIRST, ["c01"])
    ended = night(tmp_path, snapshots)
    _, place = write_files(str(tmp_path), ended)
    assert Path(place).read_text() == (tmp_path / "morning.md").read_text()
    printed = CliRunner().invoke(main, ["morning", "--root", str(tmp_path)])
    assert printed.exit_code == 0 and "First refresh of this name" in printed.output
    data = json.loads(
        CliRunner().invoke(main, ["morning", "--root", str(tmp_path), "--json"]).output
    )
    assert (data["nothing_new"], data["refresh"]["ending"]) == (False, "finished")
    nothing = CliRunner().invoke(main, ["morning", "--root", str(tmp_path / "empty")])
    assert nothing.exit_code == 2 and "no refresh ended under" in nothing.stderr
    with entered(str(tmp_path / "begun"), "night", "cpp", "concur"):
        running = CliRunner().invoke(main, ["morning", "--root", str(tmp_path / "begun")])
    assert running.exit_code == 2 and re.search(
        "night is under way, since .* UTC.*status", running.stderr
    )


def test_what_prefect_shows_of_a_report_has_its_links_above_its_sections(tmp_path, monkeypatch):
    ended = night(tmp_path, planted(tmp_path, "one", 2, FIRST, ["c01"]))
    _, place = write_files(str(tmp_path), ended)
    shown = []
    monkeypatch.setattr(step, "create_markdown_artifact", lambda *told: shown.append(told))
    links = {"Code of the kernels": "/artifacts/artifact/7", "This run": "http://m/#/runs/1"}
    step.show_morning_report(str(tmp_path), ended.id, links)
    ((key, text, _),) = shown
    lines = [f"- [{words}]({url})" for words, url in links.items()]
    assert key == "morning-report" and "\n".join(lines) in text.partition("\n## ")[0]
    assert [line for line in text.splitlines() if line and line not in lines] == list(
        filter(None, Path(place).read_text().splitlines())
    )


@pytest.mark.parametrize("error", [TerminationSignal(15), RuntimeError("no disk")])
def test_what_morning_says_of_a_refresh_that_did_not_finish_its_file_says_too(tmp_path, error):
    write_files(str(tmp_path), night(tmp_path, planted(tmp_path, "one", 2, FIRST, ["c01"])))
    with pytest.raises(type(error)), reported(str(tmp_path), "nightly", "cpp", "concur"):
        raise error
    said = data_of(f"morning --root {tmp_path}")
    told = (said["refresh"]["ending"], said["refresh"]["error"])
    assert told in (
        ("stopped", "stopped by a signal, such as that of `concur down`"),
        ("failed", "RuntimeError: no disk"),
    )
    (step,) = said["next_steps"]
    assert step.startswith("Stopped by a signal" if told[0] == "stopped" else "Mend the error, and")
    assert said["headline"] in (tmp_path / "morning.md").read_text()


@pytest.mark.parametrize(
    ("state", "stopped_by"),
    [("Cancelling", "Cancel in Prefect"), ("Running", "a signal, such as that of `concur down`")],
)
def test_a_cancelled_refresh_says_who_cancelled_it_and_what_goes_on(
    tmp_path, monkeypatch, state, stopped_by
):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setattr(step.flow_run, "id", "77", raising=False)
    monkeypatch.setattr(step.deployment, "id", "88", raising=False)
    asked = []

    def answered(url, **options):
        asked.append(url)
        return httpx.Response(200, json={"state_name": state})

    monkeypatch.setattr(httpx, "get", answered)
    with pytest.raises(TerminationSignal), reported(str(tmp_path), "nightly", "cpp", "concur"):
        raise TerminationSignal(15)
    assert asked == ["http://127.0.0.1:1/api/flow_runs/77"]
    page = " ".join(typed(f"morning --root {tmp_path}").split())
    assert f"Stopped by {stopped_by}. To go on, start it again: `eval" in page
    assert "prefect flow-run retry 77`" in page and f"concur env --root {tmp_path})" in page
    assert "Mend" not in page


def test_an_interrupted_refresh_names_the_command_that_was_typed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/x/concur", "run", "--set", "root=a b"])
    with pytest.raises(KeyboardInterrupt), reported(str(tmp_path), "nightly", "cpp", "concur"):
        raise KeyboardInterrupt
    page = " ".join(typed(f"morning --root {tmp_path}").split())
    assert "Stopped by Ctrl-C in its terminal" in page and "concur run --set 'root=a b'`" in page


def test_a_refresh_runs_while_its_process_does(tmp_path):
    """Without any server. A killed one is told from one that runs, and by `morning` too."""
    script = f"""
import time
from flows.morning.history import entered
with entered({str(tmp_path)!r}, "night", "cpp", "concur"):
    print("begun", flush=True)
    time.sleep(600)
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "begun\n"
            while_it_runs = typed(f"ls --root {tmp_path}")
        finally:
            process.kill()
    assert "running" in while_it_runs and "killed" not in while_it_runs
    assert "killed" in typed(f"ls --root {tmp_path}")
    assert "The refresh was killed." in typed(f"morning --root {tmp_path}")
    with begun(tmp_path):
        assert refreshes(str(tmp_path))[-1].ending == "running"  # asked by its own process


def test_a_root_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UsageError, match="cannot write"),
        begun(tmp_path / "file"),
    ):
        pass
