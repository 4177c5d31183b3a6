"""Every command, once as a person runs it and once with `--json`: both end well, and the page shows
every value of the JSON.

The commands read one finished workspace. Those that train, sample or serve are run with that work
replaced by its recorded result; what they do is tested where they are.
"""

import json
import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from flows.cli.common import NEEDS
from flows.cli.main import main
from flows.cli.render import label, render, text_of
from flows.morning.history import entered
from tasks.store import SnapshotRef
from tests.support import commands, curated, samples

TASK = (commands.ROOT / "tasks/sources/bundled/tasks/softmax_rows.py").read_text("utf-8")
SAMPLES = [
    curated.sample("kernelbench/L1/1", 0, 100, 6.0),
    curated.sample("kernelbench/L1/1", 1, 300, 2.0),
    curated.sample("kernelbench/L1/2", 0, 200, 7.0),
    curated.sample("kernelbench/L1/2", 1, 900, None),
    curated.sample("kernelbench/L1/3", 0, 400, 8.0, ops=samples.SINGLE),
    curated.sample("kernelbench/L1/4", 0, 400, 0.0042),
]
READY = {"loss_first": 0.6, "rows": 3, "base_model": "small", "rank": 4, "adapter": "/a"}
LINE = {"name": "x", "seconds": 1.0, "new_work_in": [], "summary": {"correct": "3"}}
DONE = {
    "run": LINE | {"report": "/r.html", "viewer": "/v.html", "mlflow_run": None},
    "train": READY,
    "reinforce": {"reward": [0.1, 0.2], "steps": 5, "adapter": "/a"},
    "search": {"gain": {"value": 1.2, "lower": 1.1, "upper": 1.3}, "results": [{"task_id": "t"}]},
    "ablate": {
        "name": "tried",
        "complete": True,
        "seconds": 61.0,
        "strategies": [],
        "branches": [
            {"name": "b", "state": "done", "rows": 3, "loss_last": 0.5, "error": None}
            | dict.fromkeys(("curated", "trained", "scores", "answers"), 32 * "f")
        ],
        **dict.fromkeys(("cautions", "comparison", "directory", "mlflow_run", "tracking_uri")),
        "mlflow_page": "http://127.0.0.1:5000/#/experiments/1/runs",
        "start_mlflow": "concur up --root .concur",
    },
}
"""What a long piece of work returns."""
ARGUMENTS = {
    "verify": "task.py broken.py",
    "verify-batch": "responses.jsonl --tasks tasks --out batch",
    "benchmark": "--root made",
    "export": "--root made --as kernelbench --out {out}",
    "run": "--root other",
    "import": "responses.jsonl --out {out}",
    "curate": "--root made --strategy concur --strategy speedup",
    "publish": "--root made --out {out}",
    "diff": "{curated} {curated} --root made",
    "analyze": "--root made --out {out}",
    "search": "--root made",
    "train": "--root made",
    "reinforce": "--root made",
    "ls": "--root made",
    "show": "{curated} --root made",
    "view": "made --out {out}",
    "morning": "--root made",
    "config": "show",
    "gc": "--root made --younger-than 0",
    "down": "--root made",
    "env": "--root made",
}
STAGES = {"tasks": "training-tasks", "candidates": "synthesis", "verdicts": "verification"}
STATUS_1 = {"status", "doctor"}
"""Commands that say by their status what they found: here is no stack, and perhaps no tool."""
NO_JSON = {"serve", "mcp", "env"}
BRIEF = {
    "ls": "root  made\n\nsnapshots\n",
    "gc": "0 snapshots would go (0 B), ",
    "analyze": "rows ",
    "ablate": "tried: 1 of 1 branches done in 61 s",
    "show": "curation ",
    "morning": "local, ",
    "verify-batch": "1 candidate of 1 task (cpp, ",
}
"""Commands whose page is shorter than their data, and how it begins."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder with a finished workspace `made`, task and candidate files."""
    place = tmp_path_factory.mktemp("workspace")
    root = place / "made"
    refs = curated.line(root, SAMPLES, chosen=True)
    snapshots = {"curated": refs}
    for name, stage in STAGES.items():
        (folder,) = (root / stage).iterdir()
        found = SnapshotRef(root="made", stage=stage, fingerprint=folder.name)
        snapshots[name] = found
    (root / "report.html").write_text("<p>")
    (place / "task.py").write_text(TASK)
    (place / "broken.py").write_text("class ModelNew(\n")
    (place / "tasks").mkdir()
    (place / "tasks/softmax.py").write_text(TASK)
    row = {"task_id": "softmax", "response": "I cannot write it."}
    (place / "responses.jsonl").write_text(json.dumps(row))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        with entered("made", "local", "cpp", "concur") as entry:
            entry.ends("finished", snapshots=snapshots)
    return place, refs.fingerprint


@pytest.fixture
def typed(workspace, monkeypatch, tmp_path):
    """Run a command in the workspace, its long work replaced by `DONE`."""
    place, fingerprint = workspace
    monkeypatch.chdir(place)
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "CONCUR_ROOT"):
        monkeypatch.delenv(name, raising=False)

    @contextmanager
    def shown():
        yield SimpleNamespace(seconds=1.0, worked=set())

    def returns(value):
        return lambda *args, **options: value

    snapshot = SimpleNamespace(root="made")
    replaced = {
        "flows.launch.launch": returns(DONE["run"]),
        "flows.launch.embed": returns(None),
        "flows.launch.require_ready": returns(None),
        "flows.launch.served_and_shown": shown,
        "flows.stack.control.join_stack": returns(None),
        "flows.search.begun_with": returns(()),
        "flows.search.search_and_track": returns((snapshot, None)),
        "flows.search.summary_of": returns(DONE["search"]),
        "flows.train.of_line": returns((None, None, None)),
        "flows.train.train_and_track": returns((None, None)),
        "flows.train.summary_of": returns(DONE["train"]),
        "flows.reinforce.of_training": returns((None, None, None)),
        "flows.reinforce.reinforce_and_track": returns((None, None)),
        "flows.reinforce.summary_of": returns(DONE["reinforce"]),
        "flows.launch.launch_ablation": returns(DONE["ablate"]),
        "flows.stack.control.up": returns({"healthy": True, "parts": []}),
        "flows.stack.control.export_lines": returns(["export A=b"]),
        "kernels_eval.service.app.run": returns(None),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(name, value)

    def run(name, *more):
        words = ARGUMENTS.get(name, "").format(out=tmp_path / more[0], curated=fingerprint)
        return CliRunner().invoke(main, [name, *words.split(), *more[1:]])

    return run


@pytest.mark.parametrize(
    "name",
    # test_cli has a doctor, who takes seconds
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "doctor" else name
        for name in sorted(NEEDS)
    ],
)
def test_a_command_prints_its_page_and_the_same_as_json(typed, name):
    page = typed(name, "page")
    assert page.exit_code in ({0, 1} if name in STATUS_1 else {0}), (page.output, page.exception)
    assert page.exception is None or isinstance(page.exception, SystemExit)
    if name in NO_JSON:
        return
    done = typed(name, "data", "--json")
    assert done.exit_code == page.exit_code, (done.output, done.exception)
    data = json.loads(done.stdout)
    if name == "verify":  # the judge prints its own verdict
        assert data["status"] in page.stdout
        return
    if name in BRIEF:  # the rest is for --json
        assert page.stdout.startswith(BRIEF[name]) and len(page.stdout) < len(done.stdout)
        assert "import torch" not in page.stdout, "sources and answers are for --json"
        return
    if name == "doctor":  # what runs is said of each, not of all
        del data["runnable"]
        data |= data.pop("runs")
    shown = [key for key, value in data.items() if value not in (None, {})]
    assert [key for key in shown if label(key) not in page.stdout] == []
    assert not re.search(r"^\w.* -$", page.stdout, re.MULTILINE), "a name without a value"


@pytest.mark.parametrize("name", ["show", "morning", "curate", "publish"])
def test_what_shows_a_training_set_says_what_it_kept_and_what_is_slow_of_it(typed, name, tmp_path):
    page = typed(name, "set").stdout
    if name == "publish":
        page = (tmp_path / "set/README.md").read_text("utf-8")
    said = " ".join(page.split())
    assert "kept 4 of 5 correct; 1: a correct sample of its task has shorter reasoning" in said
    slower = "1 of 4 kept samples is slower than the reference, down to 0.0042 times its speed"
    assert slower in said


def test_a_hint_about_a_stack_names_its_root(typed):
    page = typed("status", "page", "--root", "other place").stdout
    assert "concur up --root 'other place'` starts one" in page


def test_scores_of_few_tasks_say_that_they_bound_no_speedup(typed):
    page = " ".join(typed("benchmark", "page").stdout.split())
    assert (
        "no interval of the speedup: it takes 5 tasks with a correct, timed sample, not 4" in page
    )


def leaves(data, name=""):
    """Every plain value of a command's data, with the name of its key."""
    if isinstance(data, dict) and data.keys() != {"value", "lower", "upper"}:
        for key, value in data.items():
            yield from leaves(value, key)
    elif isinstance(data, list):
        for value in data:
            yield from leaves(value, name)
    elif data not in (None, ""):
        yield name, data


NESTED = {
    "plain": 1,
    "text": "a path/with [markup]\x1b[2J",
    "counts": {"a": 1, "b": 20_000},
    "deep": {"one": {"two": {"three": 0.25}, "list": ["x", "y"]}, "flag": True},
    "rows": [
        {"name": "first", "interval": {"value": 1.0, "lower": 0.5, "upper": 2.0}, "size_bytes": 5},
        {"name": "second", "counts": {"n" * 40: 1, "m" * 40: 2}, "other": None},
    ],
    "wide": [{f"column_{number}": f"value {number}" for number in range(40)}],
    "keyed": {"build_s": {"sum": 8.0, "mean": 2.0}, "run_s": {"sum": 4.0, "mean": 1.0}},
    "none": None,
    "empty": {},
    "nothing": [],
}


def test_a_page_shows_every_value_and_acts_on_no_terminal():
    page = render(NESTED)
    assert [value for name, value in leaves(NESTED) if text_of(name, value) not in page] == []
    assert "\x1b" not in page and "[markup]" in page
    assert max(map(len, page.splitlines())) <= 140


def test_a_link_stays_on_one_line_beside_its_row():
    link = "http://127.0.0.1:5000/#/experiments/1/runs?searchFilter=&columns=" + "c" * 200
    parts = [{"part": "mlflow", "page": link}, {"part": "worker", "page": ""}]
    assert f"mlflow  {link}" in render({"parts": parts}).splitlines()


def test_what_all_rows_share_is_said_once():
    config = {"seed": 0, "quota": 0.5, "kernels": {"own": True, "n" * 60: 7}}
    rows = [{"name": name, "size": 9, "config": config} for name in ("a", "b", "c")]
    page = render({"sets": rows})
    assert page.count("seed 0") == 1 and "size 9" in page
    for name in "abc":
        assert f"│ {name} " in page
    assert [value for name, value in leaves(rows) if text_of(name, value) not in page] == []
    rows[1]["size"] = 8
    page = render({"sets": rows})
    assert "│ b    │    8 │" in page and "seed 0" in page


def test_a_continued_table_repeats_what_names_its_rows():
    wide = {f"column_{number}": f"value {number}" for number in range(20)}
    rows = [{"group": "all", "k": k} | wide | {"last": k} for k in (1, 5)]
    *_, second_to_last, last, _ = render({"scores": rows}).splitlines()
    assert "all │ 1 │" in " ".join(second_to_last.split())
    assert "all │ 5 │" in " ".join(last.split())


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("rows", 4800, "4800"),
        ("rows", 90_810, "90,810"),
        ("pid", 90_810, "90810"),
        ("size_bytes", 4_200_000, "4.2 MB"),
        ("busy_share", 0.25, "25.0%"),
        ("seconds", 61.24, "61.24"),
        ("seconds", 6124.0, "6,124"),
        ("flag", False, "no"),
        ("gain", {"value": 1.2, "lower": 1.1, "upper": 1.3}, "1.2 (1.1 to 1.3)"),
        ("fast_1", {"value": 0.6, "lower": 0.231, "upper": 0.869}, "60.0 % (23.1 to 86.9)"),
        ("gain", {"value": 1.2, "lower": None, "upper": None}, "1.2"),
        ("counts", {"correct": 3, "bad": 1}, "correct 3, bad 1"),
        ("names", ["a", "b"], "a, b"),
        ("missing", None, "-"),
    ],
)
def test_a_value_is_written_by_its_name_and_kind(name, value, text):
    assert text_of(name, value) == text


def test_a_page_says_nothing_of_an_empty_text_and_names_fast_p_as_the_paper_does():
    page = render({"note": "", "supervisor_pid": 16645, "fast_1": 0.5, "median_speedup": 2})
    assert page.split() == ["supervisor", "pid", "16645", "fast_1", "0.5", "median", "speedup", "2"]
