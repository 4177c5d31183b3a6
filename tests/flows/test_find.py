"""`concur ls`, `show`, `profiles` and `config`: what they find, and what they say where
there is nothing."""

import json
import os
from pathlib import Path

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from flows.cli.main import main
from flows.cli.pages import of_list, of_snapshot
from flows.config import load_profile, profile_names, shipped_dir
from flows.morning.history import entered, refreshes
from kernels_eval.records import Verdict
from tasks.store import Snapshot, fingerprint
from tasks.tables import CANDIDATES, TASKS, VERDICTS
from tasks.verification.config import VerificationConfig
from tests.support.samples import finished
from tests.support.typed import data_of, refused, typed

HOSTILE = "\x1b[2Jgone"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A root `made` with two finished snapshots, one that is unfinished, and one refresh that wrote
    them from inside its directory."""
    monkeypatch.chdir(tmp_path)
    rows = [{"task_id": f"t{n}", "name": f"{HOSTILE} {n}", "code": "x = 1"} for n in range(5)]
    made = {}
    for count in (2, 5):
        snapshot = Snapshot("made", "tasks", fingerprint("tasks", count))
        snapshot.append(rows[:count], TASKS)
        snapshot.publish(config={"source": "files"})
        made[count] = snapshot
    Snapshot("made", "tasks", fingerprint("tasks", 0)).append(rows, TASKS)
    with entered("made", "local", "cpp", "concur") as entry:
        entry.ends("finished", snapshots={"tasks": made[5].ref})
    return made


def test_ls_lists_snapshots_and_refreshes(root):
    data = data_of("ls --root made")
    found = {each["fingerprint"]: each for each in data["snapshots"]}
    assert sorted(str(each["rows"]) for each in found.values()) == ["2", "5", "None"]
    assert [each["finished"] for each in found.values()].count(False) == 1
    assert [each["ending"] for each in data["refreshes"]] == ["finished"]
    text = typed("ls --root made")
    assert any(each.fingerprint[:12] in text for each in root.values()) and "finished" in text
    assert data_of("ls --root made --stage curation")["snapshots"] == []
    assert "--root" in refused("ls --root gone")


def test_ls_shows_a_person_the_newest_of_each_stage_and_what_is_unfinished():
    """The data are oldest first."""
    stages = ("tasks", "synthesis", "synthesis", "synthesis", "tasks")
    made = [
        {"stage": stage, "fingerprint": str(number) * 32, "finished": number != 1, "rows": 7}
        | {"level": "", "bytes": 2_000, "changed_at": "2026-11-29T10:00:00+00:00"}
        for number, stage in enumerate(stages)
    ]
    page = of_list({"root": "made", "snapshots": made, "refreshes": []})
    shown = [str(number) * 12 in page for number in range(5)]
    assert shown == [False, True, False, True, True] and page.count("unfinished") == 1
    assert "4" * 13 not in page and max(map(len, page.splitlines())) < 100
    page = of_list({"root": "made", "snapshots": made[1:4], "refreshes": []})
    assert all(str(number) * 12 in page for number in (1, 2, 3))


def test_ls_tells_screened_verdicts_from_confirmed_ones(root):
    config = VerificationConfig()
    whole = config.confirming()
    done = {"confirmation": {"confirmed": 3, "proposed": 4}}
    for number, (asked, extra) in enumerate([(config, {}), (whole, {}), (whole, done)]):
        snapshot = Snapshot("made", "verification", fingerprint("verification", number))
        snapshot.publish(config=asked, upstream=(), rows=5, extra=extra)
    listed = data_of("ls --root made")["snapshots"]
    levels = [each["level"] for each in listed if each["stage"] == "verification"]
    assert sorted(levels) == ["confirmed", "screened", "screened, 3 of 5 confirmed"]
    assert {each["level"] for each in listed if each["stage"] == "tasks"} == {""}


@pytest.mark.parametrize("name", ["prefix", "directory"])
def test_show_prints_manifest_columns_and_rows(root, name):
    whole = root[5].fingerprint
    asked = f"{whole[:10]} --root made" if name == "prefix" else f"made/tasks/{whole}"
    data = data_of(f"show {asked} --rows 4")
    assert data["manifest"]["rows"] == 5 and data["columns"]["task_id"] == "string"
    assert [row["task_id"] for row in data["rows"]] == ["t0", "t1", "t2", "t3"]
    text = typed(f"show {asked}")
    assert "t2" in text and "t3" not in text and "\x1b" not in text
    assert "\nrows (3 of 5, --rows N for more)\n" in text
    assert "\nrows\n" in typed(f"show {asked} --rows 5")


def test_show_has_the_same_columns_in_every_row_and_none_whose_values_it_cannot_show():
    row = {"candidate_id": "a", "task_id": "t", "reasoning": "one line", "speedup": 1.5}
    extra = {f"n{number}": number for number in range(4)} | {"last": 7}
    rows = [row | extra, row | {"candidate_id": "b", "reasoning": "one\nmore"} | extra]
    data = {"path": "root/curation/abc", "finished": True, "manifest": {"rows": 2}}
    page = of_snapshot(data | {"rows": rows, "columns": {}})
    assert " - " not in page and "one line" not in page
    assert page.count("7 │") == 2


def test_show_takes_the_folder_of_a_batch_and_counts_its_statuses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"candidate_id": f"c{n}", "status": "correct", "reason": "ok"} for n in range(4)]
    made = Snapshot("verified/snapshots", "verification", fingerprint("verification", 1))
    made.append(rows, VERDICTS)
    counts = {"correct": 6, "incorrect": 9}
    made.publish(config={}, rows=15, extra={"status_counts": counts})
    (tmp_path / "verified/verdicts.parquet").touch()
    told = {"snapshots": {"verdicts": made.path}}
    (tmp_path / "verified/summary.json").write_text(json.dumps(told))
    text = typed("show verified")
    assert text.startswith(f"verification {made.fingerprint[:12]}: 15 rows")
    assert "incorrect 9" in text and "rows (3 of 15, --rows N for more)" in text


def test_show_finds_what_verify_batch_wrote_here(root, tmp_path):
    """Without --root: the default root first, then every folder of verify-batch below this one."""
    assert "no snapshot under .concur" in refused("show 1234abcd")
    for name, status in (("older", "incorrect"), ("verified", "correct")):
        batch = tmp_path / name
        row = {"candidate_id": "1234abcd" * 8, "task_id": "user/t", "status": status}
        finished(batch / "snapshots", "verification", [row | {"reason": "ok"}], VERDICTS)
    os.utime(tmp_path / "older", (0, 0))
    assert data_of("show 1234abcd")["verdict"]["status"] == "correct"
    assert data_of("show 1234abcd --root older")["verdict"]["status"] == "incorrect"
    assert "give --root" in refused("show 9999")


def test_show_prints_the_kernel_of_a_candidate_below_its_verdict(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = {"candidate_id": "1234abcd", "task_id": "user/t", "language": "cpp"}
    row = told | {"code": f"a = 1\n\tb = '{HOSTILE}'\n"}
    written = finished(".concur", "synthesis", [row], CANDIDATES)
    verdict = Verdict.model_validate(told | {"status": "correct", "reason": "ok"})
    rows = [verdict.model_dump(mode="json")]
    finished(".concur", "verification", rows, VERDICTS, upstream=[written.fingerprint])
    head, _, code = typed("show 1234").partition("\n\n")
    assert head.startswith("1234abcd of user/t\ncorrect (ok)")
    assert code == "a = 1\n    b = ' [2Jgone'\n"
    assert data_of("show 1234")["verdict"]["code"] == row["code"]


def test_every_command_takes_the_root_of_the_shell(root, tmp_path, monkeypatch):
    """That `concur env` sets. `show` and `run` look further where none is set."""
    named = {
        name: each.envvar
        for name, command in main.commands.items()
        for each in command.params
        if each.name == "root"
    }
    assert {"ls", "status", "morning", "gc", "diff", "view", "train", "up"} <= named.keys()
    others = {name for name, variable in named.items() if variable != "CONCUR_ROOT"}
    assert others == {"show", "run"}
    monkeypatch.setenv("CONCUR_ROOT", "made")
    assert data_of("ls")["root"] == "made"
    assert data_of(f"show {root[5].fingerprint[:10]}")["manifest"]["rows"] == 5
    assert data_of("ls --root .")["root"] == "."
    Path("own.yaml").write_text("root: own")
    Path("default.yaml").write_text("name: mine")
    used = []
    monkeypatch.setattr("flows.stack.control.join_stack", used.append)
    monkeypatch.setattr("flows.launch.require_ready", lambda *_: None)
    monkeypatch.setattr("flows.launch.launch", lambda *_, **__: {})
    for given in ("own.yaml", "default.yaml", "local", "local --set root=x", "local --root y"):
        data_of(f"run --only refresh --profile {given}")
    assert used == ["own", "made", "made", "x", "y"]


def test_show_says_which_name_is_none_or_several(root):
    unfinished = fingerprint("tasks", 0)
    assert data_of(f"show {unfinished} --root made")["manifest"] is None
    assert "no snapshot under made begins with 'zz'" in refused("show zz --root made")
    assert "no snapshot" in refused("show [a --root made")
    twin = root[5].fingerprint[:4]
    Snapshot("made", "other", f"{twin}{'0' * 28}").publish(config={}, rows=0)
    assert "2 snapshots" in refused(f"show {twin} --root made")


def test_a_refresh_is_read_from_another_directory(root, tmp_path, monkeypatch):
    """It noted its snapshots under the name that its own directory gave the root."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (found,) = refreshes("../made")
    assert found.snapshots["tasks"].open().manifest["rows"] == 5
    typed("ls --root ../made")


def test_profiles_are_those_that_ship():
    found = data_of("profiles")["profiles"]
    assert [each["name"] for each in found] == profile_names()
    assert all(each["about"].endswith(".") or each["about"] for each in found)
    assert "paper" in typed("profiles")


def test_config_says_where_each_value_comes_from():
    words = "config show --profile nightly --set verification.workers=3 --set tasks={limit: 2}"
    done = CliRunner().invoke(main, [*words.split()[:-2], "tasks={limit: 2}", "--json"])
    data = json.loads(done.stdout)
    keys = {key: tuple(each.values()) for key, each in data["keys"].items()}
    assert keys["verification.workers"] == (3, "--set")
    assert keys["tasks.limit"] == (2, "--set")
    assert keys["verification.chunk_size"][1] == keys["root"][1] == "profile"
    assert keys["search.method"][1] == "default"
    values = {key: value for key, (value, _) in keys.items()}
    overrides = ["verification.workers=3", "tasks={limit: 2}"]
    assert load_profile("nightly", overrides, values) == load_profile("nightly", overrides)
    assert "did you mean" in refused("config show --set verification.worker=1")


def test_a_password_in_an_address_is_not_shown():
    text = typed("config show --set tracking.uri=http://me:secret@host")
    assert "secret" not in text and "host" in text


def test_every_profile_fits_the_schema_and_a_wrong_key_does_not():
    schema = json.loads(typed("config schema"))
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    for name in profile_names():
        keys = yaml.safe_load((shipped_dir("profiles") / f"{name}.yaml").read_text("utf-8"))
        assert not list(check.iter_errors(keys)), name
    assert list(check.iter_errors({"verification": {"worker": 1}}))


def test_every_key_is_explained_without_a_site():
    keys = data_of("config keys")["keys"]
    assert data_of("config show")["keys"].keys() <= keys.keys()
    assert [key for key, about in keys.items() if not about["meaning"]] == []
    timing = data_of("config keys eval.timing")["keys"]
    assert timing["verification.eval.timing.max_s"]["default"] == 2.0
    assert len(timing) < len(keys) and "95 % interval" in typed("config keys eval.timing")
    assert "no key has 'nope'" in refused("config keys nope")
