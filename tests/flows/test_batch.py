"""`concur verify-batch` as a user runs it: interrupted in the middle, started again, served for
nothing; and what it refuses."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import polars as pl
import psutil
import pytest

from flows.cli.pages import of_batch
from flows.cli.render import render
from flows.view import write_view
from kernels_eval.errors import DeviceError, UsageError
from kernels_eval.records import Language, Verdict
from kernels_eval.settings import load_protocol
from tasks.sources import bundled
from tasks.store.snapshot import Snapshot
from tasks.synthesis.tables import CandidateTable
from tasks.verification import batch
from tasks.verification.batch import _tasks_of, verify_batch
from tasks.verification.config import VerificationConfig
from tests.support import processes
from tests.support import typed as command_line
from tests.support.commands import ROOT, Running, concur, kill_tree
from tests.support.programs import EMPTY
from tests.support.typed import typed
from tests.support.viewed import unpacked

NAMES = ("cumulative_sum", "softmax_rows")
QUICK = ("--workers", "1", "--builders", "1", "--set", "timing.max_s=0.3")
DEFAULTS = VerificationConfig()
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def inputs(tmp_path):
    """Six candidates of two bundled tasks: five responses, of which two are wrong, and one without
    code."""
    tasks = [task for task in bundled.load("train") if task.name in NAMES]
    recorded = [(task, bundled.responses(task.name, "cpp")) for task in tasks]
    texts = [(task, answers[number]) for task, answers in recorded for number in (0, 1)]
    texts += [(tasks[0], recorded[0][1][4]), (tasks[1], "I would rather not.")]
    rows = [
        {"task_id": task.task_id, "candidate_id": f"mine-{row}", "response": text}
        for row, (task, text) in enumerate(texts)
    ]
    paths = tmp_path / "candidates.parquet", tmp_path / "tasks.parquet"
    pl.DataFrame(rows).write_parquet(paths[0])
    pl.DataFrame([{"task_id": task.task_id, "code": task.code} for task in tasks]).write_parquet(
        paths[1]
    )
    return paths


@pytest.fixture
def commands():
    """Every command that a test starts ends with it, and all that it had started."""
    started = []
    yield started
    for command in started:
        kill_tree(command.process)


def kept(out):
    """Verdicts in the unfinished or finished snapshot under `out`; what is there twice fails."""
    (path,) = (out / "snapshots" / "verification").iterdir()
    rows = Snapshot(str(out / "snapshots"), "verification", path.name).read().to_dicts()
    assert len({row["candidate_id"] for row in rows}) == len(rows)
    return {row["candidate_id"]: row for row in rows}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_interrupted_then_finished_then_served(tmp_path, inputs, commands):
    arguments = ("candidates.parquet", "--tasks", "tasks.parquet", "--out", "out", *QUICK)
    out = tmp_path / "out"

    # 1. Ctrl-C once there is a verdict of a worker, as a terminal sends it: to the whole group; and
    # again while it is stopping
    first = Running("verify-batch", *arguments, cwd=tmp_path, **NO_GPU)
    commands.append(first)
    first.wait_for(r"^verification +[2-5]/6 ")  # the one without code is the first
    workers = first.below()
    assert workers
    os.killpg(first.process.pid, signal.SIGINT)
    while not psutil.wait_procs(workers, timeout=0.1)[0]:
        assert first.process.poll() is None  # until workers are being stopped
    os.killpg(first.process.pid, signal.SIGINT)
    assert (first.finish(), first.text) == (130, ""), "".join(first.stderr)
    assert first.stderr[-1].startswith("interrupted: finished work is kept")
    assert "Traceback" not in "".join(first.stderr)
    assert psutil.wait_procs(workers, timeout=300)[1] == []
    before = kept(out)
    assert 2 <= len(before) < 6
    assert sorted(path.name for path in out.iterdir()) == ["snapshots"]  # no half of a result

    # 2. the same command does the rest, and nothing twice
    second = Running("verify-batch", *arguments, "--json", cwd=tmp_path, **NO_GPU)
    commands.append(second)
    assert second.finish() == 0, "".join(second.stderr)
    after = kept(out)
    assert len(after) == 6
    assert {key: after[key] for key in before} == before  # the very same rows, timings included
    data = json.loads(second.text)  # alone on stdout
    this_run, correct = data["this_run"], data["statuses"]["correct"]
    assert (this_run["judged"], this_run["reused_or_without_code"]) == (
        6 - len(before),
        len(before),
    )
    assert data["candidates"] == sum(data["statuses"].values()) == 6 and data["tasks"] == 2
    assert data["reasons"]["no_code"] == {"no_code_block": 1}
    assert "no_code_block" in [row["reason"] for row in data["not_correct"]]
    assert len(data["not_correct"]) == 6 - correct
    speedups = [row["speedup"] for row in data["correct"]]
    assert len(speedups) == correct and speedups == sorted(speedups, reverse=True)
    assert all(
        row["speedup_lower"] < row["speedup"] < row["speedup_upper"] for row in data["correct"]
    )
    assert data["speedup"]["timed"] == correct >= 2
    marked = sum(row["unstable"] for row in data["correct"])
    assert data["speedup"]["unstable"] == marked
    assert set(data["speedup"]["quantiles"]) == set("0.1 0.25 0.5 0.75 0.9".split())
    assert data["seconds"]["timing_s"]["candidates"] == correct
    assert sum(data["builds"]["tiers"].values()) == 5
    assert data["telemetry"]["candidates"] == 6 - len(before)
    assert data["protocol"]["timing"]["max_s"] == 0.3
    stored = json.loads((out / "summary.json").read_text())
    assert stored == {name: value for name, value in data.items() if name != "this_run"}

    # the table is under the ids of the user's own, and every row is a legal verdict
    rows = pl.read_parquet(out / "verdicts.parquet").sort("row").to_dicts()
    ids = [(row["candidate_id"], row["row"]) for row in rows]
    assert ids == [(f"mine-{row}", row) for row in range(6)]
    assert rows[-1]["status"] == "no_code"
    assert {row["sample_index"] for row in rows} == {0, 1, 2}
    for row in rows:
        Verdict.model_validate({name: row[name] for name in Verdict.model_fields})

    assert sum("unstable" in row["flags"] for row in rows) == marked

    # 3. once more: served from the snapshot, no worker is started
    if "ray" in sys.modules:  # one that a test before this one has left
        import ray

        ray.shutdown()
    data = call(*inputs, config=VerificationConfig(eval=load_protocol(["timing.max_s=0.3"])))
    assert data["this_run"]["judged"] == 0 and data["statuses"] == stored["statuses"]
    assert "ray" not in sys.modules or not batch._ray_runs()


def test_the_first_line_says_who_holds_the_devices_before_anything_is_read(tmp_path):
    """Imports and tables may take a minute on a machine that others use."""
    script = """
        import sys
        from kernels_eval.pool.held import call_it, held
        call_it("flow run ruby-fox")
        with held("cpu", shared=False, patience_s=None, say=print):
            print("held", flush=True)
            sys.stdin.read()
    """
    locks = {"CONCUR_LOCKS": str(tmp_path)}
    with processes.started(script, **locks) as holder:
        assert holder.stdout.readline() == "held\n"
        words = ("verify-batch", "nowhere.parquet", "--tasks", "nowhere", "--out", "out")
        said, error = concur(*words, cwd=tmp_path, **locks).stderr.splitlines()
    assert re.fullmatch(
        rf"flow run ruby-fox \(process {holder.pid}, since \d\d:\d\d\) uses the CPU: work for it"
        " waits its turn",
        said,
    )
    assert error.startswith("error: ")


def test_a_table_without_any_code_needs_no_worker(tmp_path, inputs):
    """Everything but the workers: the snapshots, both files, the numbers of a batch in which
    nothing ran, and growing it by a row."""
    tasks = pl.read_parquet(inputs[1])["task_id"].to_list()
    rows = [
        {"task_id": tasks[0], "response": "no"},
        {"task_id": tasks[1], "response": "```python\nclass ModelNew:"},
    ]
    ids = []
    for count in (1, 2, 2):
        pl.DataFrame(rows[:count]).write_parquet(inputs[0])
        data = call(*inputs)
        assert data["candidates"] == count and data["this_run"]["judged"] == 0
        verdicts = pl.read_parquet(tmp_path / "out" / "verdicts.parquet").sort("row")
        ids.append(verdicts["candidate_id"].to_list())
    expected = {
        "reasons": {"no_code": {"no_code_block": 1, "truncated": 1}},
        "telemetry": None,
        "speedup": dict(timed=0, above_1=0, unstable=0, quantiles={}, share_of_own_kernels={}),
        "builds": {"tiers": {}, "cached": 0},
    }
    assert expected.items() <= data.items()
    assert all(phase["candidates"] == 0 for phase in data["seconds"].values())
    assert ids[1] == ids[2] and ids[1][0] == ids[0][0]
    snapshots = (tmp_path / "out" / "snapshots" / "verification").iterdir()
    assert len(list(snapshots)) == 2  # one a table; the third call found the second's
    assert "truncated 1" in render(data)


def test_kernels_of_a_folder_keep_the_names_of_their_files(tmp_path, inputs):
    (tmp_path / "kernels").mkdir()
    for number in range(2):
        (tmp_path / f"kernels/softmax_rows_sample_{number}.md").write_text("I cannot write it.")
    task = next(task for task in bundled.load("train") if task.name == "softmax_rows")
    program = {"task_id": task.name, "code": task.code}
    pl.DataFrame([program]).write_parquet(inputs[1])
    data = call(tmp_path / "kernels", inputs[1])
    assert data["this_run"]["waited_for_other_runs_s"] == 0
    names = {f"softmax_rows_sample_{number}" for number in range(2)}
    assert {row["given_id"] for row in data["not_correct"]} == names
    shown = typed(f"show {tmp_path / 'out'}")
    for row in data["not_correct"]:
        short = row["candidate_id"][:12]
        assert all(row["given_id"] in page and short in page for page in (of_batch(data), shown))
    assert all(name in of_batch(data) for name in names)
    one = data["not_correct"][0]
    command = re.search(r"one of them +\S+ (show) ID (--root .+)", of_batch(data))
    for name in (one["candidate_id"][:12], one["given_id"]):
        page = typed(f"{command[1]} {name} {command[2]}")
        assert page.startswith(f"{one['given_id']} of {one['task_id']}\n")
        assert f"({one['reason']})" in page
    assert "--out of verify-batch" in command_line.refused("show abcdef012345")
    site = Path(write_view(str(tmp_path / "out"))["page"]).parent
    assert set(unpacked(site / "data/index.js")["columns"]["id"]) == names


def test_a_compilers_message_names_the_candidate_and_not_the_judges_copy():
    fields = {"task_id": "t", "status": "compile_error", "reason": "build_failed"}
    detail = "candidate.py:15:9: error: 'flaot' was not declared"
    ids = [("a" * 32, "t_sample_0"), ("b" * 32, None)]
    rows = [{"candidate_id": own, "given_id": given} for own, given in ids]
    named = pl.DataFrame([fields | {"detail": detail} | row for row in rows])
    told = {row["candidate_id"]: row["detail"] for row in batch._not_correct(named)}
    assert told["a" * 32] == "t_sample_0:15:9: error: 'flaot' was not declared"
    assert told["b" * 32] == detail, "a row without a name of its own"


# -- what is refused, before anything is written ---------------------------------------------------


def refused(tmp_path, *arguments):
    done = concur("verify-batch", *arguments, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(lines)) == (2, "", 1), done
    assert not (tmp_path / "out").exists()
    return lines[0]


def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, inputs):
    pl.DataFrame({"task_id": ["t"], "text": ["x"]}).write_parquet(tmp_path / "bad.parquet")
    for words, parts in REFUSED.items():
        line = refused(tmp_path, *words.split(), "--tasks", "tasks.parquet", "--out", "out")
        assert all(part in line for part in parts), line


REFUSED = {
    "bad.parquet": [
        "bad.parquet is no table of candidates: its columns are task_id, text",
        "wanted: task_id, code",
    ],
    "candidates.parquet --set timing.max=1 --json": [
        "unknown key 'timing.max'",
        "did you mean timing.max_s?",
    ],
    "candidates.parquet --set timing.max_s=soon": ["timing.max_s = 'soon'"],
    "candidates.parquet --address ray://head:10001": ["Ray Client", "the address auto"],
}


def call(candidates, tasks, language=None, config=DEFAULTS):
    out = str(candidates.parent / "out")
    return verify_batch(CandidateTable(candidates), str(tasks), out, config, language)


def test_candidates_without_their_task_are_left_out_and_said_at_the_end(tmp_path):
    rows = [
        {"task_id": name, "response": "no"}
        for name in ("here", "gone\x1b[1m", "gone\x1b[1m", "far", "here")
    ]
    pl.DataFrame(rows).write_parquet(tmp_path / "c.parquet")
    pl.DataFrame([{"task_id": "here", "code": EMPTY}]).write_parquet(tmp_path / "t.parquet")
    data = call(tmp_path / "c.parquet", tmp_path / "t.parquet")
    assert data["candidates"] == 2
    said = data["left_out"]
    assert said.startswith("3 candidates of tasks that are not in ") and said.endswith("'far'")
    assert "gone?[1m" in said and "\x1b" not in render(data)
    pl.DataFrame(rows[1:4]).write_parquet(tmp_path / "c.parquet")
    said = "holds 3 candidates of tasks that are not in .*the same.*first ids there are 'here'"
    with pytest.raises(UsageError, match=said):
        call(tmp_path / "c.parquet", tmp_path / "t.parquet")


def test_a_problem_s_number_is_the_task_that_alone_has_it(tmp_path):
    for place in ("tasks/10_relu.py", "tasks/11_norm.py", "kernels/problem_10_kernel.py"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(EMPTY)
    asked = CandidateTable(tmp_path / "kernels").asked_tasks(Language.CPP)
    found = _tasks_of(str(tmp_path / "tasks"), asked, "kernels")
    assert [task.name for task in found.values()] == ["10_relu"]
    (tmp_path / "tasks/10_gelu.py").write_text(EMPTY)
    with pytest.raises(UsageError, match="not in .*: '10'.*10_gelu.*10_relu"):
        _tasks_of(str(tmp_path / "tasks"), asked, "kernels")


def test_a_language_without_its_device_and_an_out_that_is_a_file(inputs, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match="holds no triton candidate.*its language is cpp"):
        call(*inputs, language=Language.TRITON)
    triton = inputs[0].with_name("triton.parquet")
    pl.read_parquet(inputs[0]).with_columns(language=pl.lit("triton")).write_parquet(triton)
    with pytest.raises(DeviceError, match="triton kernels need an NVIDIA GPU"):
        call(triton, inputs[1])
    (inputs[0].parent / "out").write_text("mine")
    with pytest.raises(UsageError, match="cannot write to .*out"):
        call(*inputs)
    assert (inputs[0].parent / "out").read_text() == "mine"


def test_times_that_the_machine_disturbed_are_counted_and_marked():
    timed = {"speedup": 2.0, "speedup_lower": 1.9, "speedup_upper": 2.1}
    rows = [
        {"timing": timed, "flags": ["links", "unstable"]},
        {"timing": timed | {"speedup": 0.5}, "flags": ["links"]},
        {"timing": timed | {"speedup": 0.4}, "flags": []},
    ]
    same = {"task_id": "t", "given_id": None, "status": "correct", "custom_kernel_time_share": 1.0}
    frame = pl.DataFrame([row | same | {"candidate_id": str(n)} for n, row in enumerate(rows)])
    assert [row["unstable"] for row in batch._fastest(frame)] == [True, False, False]
    assert (batch._speedups(frame)["timed"], batch._speedups(frame)["unstable"]) == (3, 1)


# -- what is shown ---------------------------------------------------------------------------------


def test_the_end_shows_numbers_and_no_markup_of_others():
    data = json.loads((ROOT / "tests/data/batch_summary.json").read_text(encoding="utf-8"))
    shown = render(data)
    page = of_batch(data | {"this_run": {}})
    assert "\x1b" not in page and all(
        x in page for x in ("level_1/rows", "[red]60 s", "concur view")
    )
    assert "correct (the fastest 2 of 3)" in page and "not timed" in page
    assert "1 of 3 timed: the machine disturbed the timing: measure again" in page
    assert page.count("unstable") == 2 and "another --out" in page
    assert "disturbed" not in of_batch(data | {"speedup": data["speedup"] | {"unstable": 0}})
    fastest = next(line for line in page.splitlines() if "rows_sample_1" in line)
    assert (
        "12.35x (12.10 to 12.50), unstable" in fastest
        and "97.0 %" in fastest
        and "fedcba987654 " in fastest
    )

    assert "\x1b" not in shown and "[red]CPU" in shown and "[bold]GPU 0" in shown
    for text in ("1.25", "12.3", "build_s", "lite 3, full 1", data["verdicts"]):
        assert text in shown, text
