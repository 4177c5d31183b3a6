"""What `concur view` writes: the index and the chunks of candidates, and when it refuses."""

import re
import shlex
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest
from click.testing import CliRunner

from flows.artifacts import show_kernels
from flows.cli.main import main
from flows.config import PipelineConfig
from flows.launch import launch
from flows.view import viewer_page, write_view
from kernels_eval.errors import UsageError
from kernels_eval.records import Reason
from tasks.curation.config import CurationConfig
from tasks.curation.source import Source
from tasks.tables import KERNEL_PROFILES
from tasks.viewer import site as viewer
from tests.support.cases import cases
from tests.support.curated import line, sample
from tests.support.payloads import HOSTILE, LINES
from tests.support.samples import finished, frame
from tests.support.samples import sample as verified
from tests.support.typed import data_of
from tests.support.viewed import details_of, hostile_site, index_of, root_with_benchmark, unpacked

CASES = cases("view")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return root_with_benchmark(tmp_path_factory.mktemp("viewed") / "root")


@pytest.fixture(scope="module")
def site(root):
    return Path(write_view(str(root))["page"]).parent


def test_the_index_holds_the_training_candidates_and_those_of_the_benchmark(site):
    rows = pl.DataFrame(index_of(site))
    assert rows.columns == list(viewer.COLUMNS)
    assert dict(rows["set"].value_counts().iter_rows()) == {"training": 13, "benchmark": 8}
    one = rows.row(by_predicate=pl.col("id") == "t-2-1", named=True)
    assert one | {"strategies": ""} == {
        **{"id": "t-2-1", "task": "t/2", "set": "training", "model": "org/writer"},
        **{"status": "correct", "reason": "ok", "flags": "flag", "strategies": "", "tokens": 150},
        **{
            "speedup": 4.0,
            "lower": 3.6,
            "upper": 4.4,
            "screened": False,
            "share": None,
            "bottleneck": "",
            "sol_score": None,
        },
    }
    assert rows.filter(id="t-0-1")["flags"].item() == "flag\trepetitive"
    wrong = rows.filter(id="t-0-9").row(0, named=True)
    assert (wrong["status"], wrong["speedup"]) == ("incorrect", None)


def test_the_artifact_of_a_run_has_the_code_and_says_how_to_open_the_viewer(
    root, site, monkeypatch
):
    """A browser follows no link to a file: the code is on the page, the viewer behind a command."""
    shown = {}
    monkeypatch.setattr(
        "flows.artifacts.create_markdown_artifact", lambda key, text, _: shown.update({key: text})
    )
    source = Source(None, None, str(root))
    show_kernels(source.verdicts.ref, source.candidates.ref)
    assert "```python" in shown["kernels"]
    program, *words = shlex.split(re.findall(r"`(.*)`\n", shown["kernels"])[0])
    words.remove("--open")
    assert program.endswith("concur")
    assert data_of(*words)["page"] == str(site / "index.html") == viewer_page(str(root))


@pytest.mark.parametrize("refresh_only", [True, False])
def test_every_run_ends_with_the_command_of_its_viewer(monkeypatch, tmp_path, refresh_only):
    shown = nullcontext(SimpleNamespace(seconds=1.0, worked=set()))
    ends = {"embed": None, "make_headers": None, "served_and_shown": shown}
    ends |= {"_refresh": ({}, None), "_whole_line": ({}, None)}
    for name, value in ends.items():
        monkeypatch.setattr(f"flows.launch.{name}", lambda *_, value=value: value)
    found = launch(PipelineConfig(root=str(tmp_path)), refresh_only=refresh_only)
    assert found["viewer"].endswith(f"view --root {tmp_path} --open")
    assert found["training_set"].endswith(f"publish --root {tmp_path} --out FOLDER")


def test_a_profile_is_beside_its_candidate(site, root, tmp_path):
    again = shutil.copytree(root, tmp_path / "root")
    verdicts = Source(None, None, str(again)).verdicts
    row = {"candidate_id": "t-2-1", "limit": "latency", "cause": "spills", "sol_score": 0.625}
    empty = {"numbers": [], "operators": [], "kernels": [], "reference_operators": []}
    rows, of = [row | empty], [verdicts.fingerprint]
    finished(again, "kernel-profiles", rows, KERNEL_PROFILES, "k", of)
    shown = pl.DataFrame(index_of(Path(write_view(str(again))["page"]).parent))
    limited = shown.filter(pl.col("bottleneck") != "")
    assert limited.select("id", "bottleneck", "sol_score").rows() == [("t-2-1", "spills", 0.625)]


def test_a_strategy_is_on_the_candidates_that_it_took(site, root):
    (curated,) = (root / "curation").iterdir()
    taken = set(pl.read_parquet(curated / "part-*.parquet")["candidate_id"])
    marks = dict(zip(*(index_of(site)[name] for name in ("id", "strategies")), strict=True))
    assert taken and {name for name, mark in marks.items() if mark} == taken
    assert {mark for mark in marks.values() if mark} == {"concur"}


def test_details_are_in_the_order_of_the_index_with_reference_texts_and_verdict(site):
    found = details_of(site)
    assert [row["candidate_id"] for row in found] == index_of(site)["id"]
    one = next(row for row in found if row["candidate_id"] == "t-2-1")
    assert "t/2" in one["reference"] and one["timing"]["pairs"] == 50
    assert (one["reasoning"], one["device"]) == ("thought 1 about t/2", "GPU X")
    assert "void add" in one["code"] and one["answer"].startswith("```")


def test_models_are_scored_within_their_set_with_intervals(site):
    told = unpacked(site / "data/index.js")
    rows = {(row["set"], row["model"]): row for row in told["models"]}
    assert rows.keys() == {
        ("training", "org/writer"),
        ("benchmark", "base"),
        ("benchmark", "tuned"),
    }
    assert rows["benchmark", "base"]["fast_1@1"].startswith("50.0 % (")
    assert rows["benchmark", "tuned"]["fast_1@1"].startswith("100.0 % (")


def test_scores_of_screened_answers_are_named_so_and_the_answers_marked(tmp_path):
    """After a refresh, which confirms no more than its training set."""
    rows = [sample("t/0", n, 100, 2.0 + n, level="screen") for n in range(3)]
    rows += [sample("t/0", 3, 100, 9.0, level="confirm"), sample("t/0", 4, 5, None)]
    line(tmp_path, rows)
    site = Path(write_view(str(tmp_path))["page"]).parent
    told = unpacked(site / "data/index.js")
    (model,) = told["models"]
    assert model["Exec@1"].startswith("80.0 %") and model["screened"] == "3 of 4"
    assert "only screened" in told["notes"][0]
    marked = pl.DataFrame(index_of(site)).filter("screened")
    assert marked["speedup"].to_list() == [2.0, 3.0, 4.0]


def test_the_same_snapshots_are_not_written_again_and_a_new_training_set_is(root, tmp_path):
    copy = Path(shutil.copytree(root, tmp_path / "root"))
    before = Path(write_view(str(copy))["page"]).parent / "data/index.js"
    before.write_text("kept")
    write_view(str(copy))
    assert before.read_text() == "kept"
    rows = [sample(f"t/{n}", m, 100, 1.0 + m) for n in range(4) for m in range(3)]
    line(copy, rows, config=CurationConfig(strategy="random"))
    write_view(str(copy))
    assert set(index_of(before.parents[1])["strategies"]) == {"", "random"}


def test_chunks_are_bounded_and_those_of_an_earlier_site_go(tmp_path, monkeypatch):
    monkeypatch.setattr(viewer, "CHUNK_BYTES", 2000)
    rows = [verified("t", n, 10, 1.0) | {"code": f"{n:0300d}"} for n in range(20)]
    table = tmp_path / "verdicts.parquet"
    frame(*rows).write_parquet(table)
    site = Path(write_view(str(table), out=str(tmp_path / "site"))["page"]).parent
    told = unpacked(site / "data/index.js")
    assert len(told["chunks"]) > 3 and told["starts"][0] == 0
    for name, start in zip(told["chunks"], told["starts"], strict=True):
        assert unpacked(site / f"data/{name}.js")[0]["candidate_id"] == f"t-{start}"
    frame(rows[0]).write_parquet(table)
    write_view(str(table), out=str(site))
    assert len(list((site / "data").glob("chunk-*"))) == 1


def files_of(site):
    """The chunks of a site, and when each was written."""
    return {path.stem: path.stat().st_mtime_ns for path in site.glob("data/chunk-*.js")}


def ids_of(details):
    return {row["candidate_id"] for row in details}


def test_another_night_writes_the_chunks_of_its_new_candidates_only(tmp_path, monkeypatch):
    monkeypatch.setattr(viewer, "CHUNK_BYTES", 3000)
    rows = [sample(f"t/{n}", m, 100, 1.0 + m) for n in range(6) for m in range(2)]
    line(tmp_path / "first", rows)
    out = str(tmp_path / "site")
    site = Path(write_view(str(tmp_path / "first"), out=out)["page"]).parent
    before = files_of(site)
    # a third sample of each task stands between the others in the order of the tasks
    more = [sample(f"t/{n}", m, 100, 1.0 + m) for n in range(6) for m in range(3)]
    line(tmp_path / "second", more, config=CurationConfig(strategy="random"))
    write_view(str(tmp_path / "second"), out=out)
    assert len(before) > 3 and before.items() < files_of(site).items()
    found = details_of(site)
    assert [row["candidate_id"] for row in found] == index_of(site)["id"] and len(found) == 18
    added = [unpacked(site / f"data/{name}.js") for name in files_of(site).keys() - before.keys()]
    assert ids_of([row for chunk in added for row in chunk]) == {f"t-{n}-2" for n in range(6)}


def test_what_changed_or_went_is_in_no_file_any_more(tmp_path, monkeypatch):
    monkeypatch.setattr(viewer, "CHUNK_BYTES", 3000)
    rows = [sample(f"t/{n}", 0, 100, 1.0) for n in range(9)]
    line(tmp_path / "first", rows)
    out = str(tmp_path / "site")
    site = Path(write_view(str(tmp_path / "first"), out=out)["page"]).parent
    before = files_of(site)
    line(tmp_path / "second", [sample("t/0", 0, 100, 7.0), *rows[1:-1]])
    write_view(str(tmp_path / "second"), out=out)
    kept, found = before.keys() & files_of(site).keys(), details_of(site)
    assert 0 < len(kept) < len(before)
    assert set(files_of(site)) == set(unpacked(site / "data/index.js")["chunks"])
    assert ids_of(found) == {f"t-{n}-0" for n in range(8)}
    (one,) = (row for row in found if row["candidate_id"] == "t-0-0")
    assert one["timing"]["speedup"] == 7.0


def test_a_writing_that_was_interrupted_is_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(viewer, "CHUNK_BYTES", 3000)
    line(tmp_path / "root", [sample(f"t/{n}", 0, 100, 1.0) for n in range(9)])
    written, packed = [], viewer._packed

    def stopped(data):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(data)
        return packed(data)

    monkeypatch.setattr(viewer, "_packed", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_view(str(tmp_path / "root"))
    monkeypatch.setattr(viewer, "_packed", packed)
    site = tmp_path / "root/view"
    before = files_of(site)
    write_view(str(tmp_path / "root"))
    assert len(before) == 2 and before.items() < files_of(site).items()
    assert [row["candidate_id"] for row in details_of(site)] == index_of(site)["id"]


def test_no_file_holds_hostile_text_that_is_not_packed(tmp_path):
    site = hostile_site(tmp_path).parent
    for path in (site / "data").iterdir():
        unpacked(path)  # one call with base64 in it, and nothing else
    for path in site.rglob("*.html"):
        assert path.read_bytes() == (viewer.STATIC / path.name).read_bytes()
    assert index_of(site)["model"] == [HOSTILE] * 2
    assert details_of(site)[0]["reasoning"] == LINES


def test_our_page_makes_no_markup_of_text_and_permits_no_other_script():
    page = (viewer.STATIC / "index.html").read_text(encoding="utf-8")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "default-src 'none'" in policy and "script-src 'self'" in policy
    assert "unsafe" not in policy and not re.search(r"<script(?![^>]* src=)|\son\w+=", page)
    script = (viewer.STATIC / "viewer.js").read_text(encoding="utf-8")
    assert not re.search(r"(inner|outer)HTML|insertAdjacent|document\.write|\beval\b", script)


def test_what_is_bundled_has_its_licence_and_stays_small():
    bundled = viewer.STATIC / "lib"
    assert sum(path.stat().st_size for path in viewer.STATIC.rglob("*.*")) < 1_000_000
    for name in ("tabulator", "highlight", "diff"):
        licence = (bundled / f"LICENSE-{name}.txt").read_text(encoding="utf-8")
        assert "Copyright" in licence and (bundled / f"{name}.min.js").exists()


def test_every_reason_has_its_sentence():
    assert viewer.reasons().keys() == {reason.value for reason in Reason}
    assert viewer.reasons()["ok"] == "Every check passed."


def test_a_table_without_timing_model_or_texts_is_shown(tmp_path):
    table = tmp_path / "verdicts.parquet"
    rows = {"candidate_id": [1, 2], "task_id": ["t", "t"], "status": ["correct", "incorrect"]}
    pl.DataFrame(rows).write_parquet(table)
    site = Path(write_view(str(table), out=str(tmp_path / "site"))["page"]).parent
    found = index_of(site)
    assert (found["id"], found["model"]) == (["1", "2"], ["unnamed"] * 2)
    assert found["speedup"] == [None, None] and details_of(site)[0]["reference"] is None


def test_verdicts_of_two_devices_are_shown_and_not_scored(tmp_path):
    rows = [verified("t", n, 10, 1.0) | {"device": f"GPU {n}"} for n in range(2)]
    frame(*rows).write_parquet(tmp_path / "verdicts.parquet")
    page = write_view(str(tmp_path / "verdicts.parquet"), out=str(tmp_path / "site"))["page"]
    told = unpacked(Path(page).parent / "data/index.js")
    assert told["models"] == [] and "2 devices" in told["notes"][0]


def test_verdicts_that_were_only_screened_count_and_are_named_so(tmp_path):
    rows = [
        verified("t", n, 10, 1.0) | {"level": level}
        for n, level in enumerate(("screen", "confirm"))
    ]
    frame(*rows).write_parquet(tmp_path / "verdicts.parquet")
    page = write_view(str(tmp_path / "verdicts.parquet"), out=str(tmp_path / "site"))["page"]
    told = unpacked(Path(page).parent / "data/index.js")
    assert "only screened" in told["notes"][0]
    (model,) = told["models"]
    assert (model["screened"], model["Exec@1"][:7]) == ("1 of 2", "100.0 %"), model


def test_a_folder_of_verify_batch_is_found_and_gets_the_site(tmp_path, root):
    shutil.copytree(root, tmp_path / "verified" / "snapshots")
    page = Path(write_view(str(tmp_path / "verified"))["page"])
    assert page == tmp_path / "verified/view/index.html" and page.exists()
    assert set(index_of(page.parent)["set"]) == {"training", "benchmark"}
    shutil.rmtree(tmp_path / "verified/snapshots/benchmark")
    write_view(str(tmp_path / "verified"))
    assert set(index_of(page.parent)["set"]) == {""}, "of one set there is none to choose"


@pytest.mark.parametrize(
    "place, more, said",
    CASES["what_cannot_be_shown_is_said_in_one_line"],
)
def test_what_cannot_be_shown_is_said_in_one_line(tmp_path, monkeypatch, root, place, more, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "root").symlink_to(root)
    (tmp_path / "empty").mkdir()
    (tmp_path / "unfinished/verification").mkdir(parents=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    pl.DataFrame({"a": [1]}).write_parquet("other.parquet")
    frame(verified("t", 0, 1, 1.0)).clear().write_parquet("none.parquet")
    with pytest.raises(UsageError, match=re.escape(said)) as caught:
        write_view(place, **more)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "full/mine.txt").exists()


def test_the_command_prints_the_page_and_json(root, tmp_path):
    done = CliRunner().invoke(main, ["view", str(root), "--out", str(tmp_path / "a"), "--json"])
    assert done.exit_code == 0 and f'"page": "{tmp_path}/a/index.html"' in done.output
    done = CliRunner().invoke(main, ["view", "--root", str(root), "--out", str(tmp_path / "a")])
    assert f"{tmp_path}/a/index.html" in done.output
