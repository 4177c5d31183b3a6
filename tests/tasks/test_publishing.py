"""A published folder as its readers see it: `datasets`, polars, pyarrow, a Markdown renderer; and
what is refused."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from markdown_it import MarkdownIt

from kernels_eval.errors import UsageError
from tasks.publishing import publish as publishing
from tasks.publishing import shards as sharding
from tasks.publishing.columns import COLUMNS, licence_of
from tasks.publishing.config import PublishOptions
from tasks.publishing.lineage import find_curated, lineage
from tasks.publishing.publish import Published, is_whole, publish, read_publication
from tasks.publishing.shards import split_of
from tasks.reporting.text import cell, fenced
from tasks.store.snapshot import Snapshot, SnapshotRef
from tests.support.curated import SINGLE, line, sample
from tests.support.planted import QUICK

HOSTILE = (
    "a|b `code` ```\n---\nlicense: mit\n---\n</details><script>alert(1)</script>"
    " [x](javascript:alert(1)) ![i](http://e/x.png)\n# T\n\x07\u202e~~~"
)


def many(tasks: int = 12) -> list[dict[str, Any]]:
    """Tasks with two samples each: the first is taken as concise and fast, the second for its
    speedup."""
    return [
        sample(
            f"t/{task:02d}",
            index,
            100 + 50 * index,
            20.0 - index,
            ops=SINGLE if task % 2 else ["a", "b"],
        )
        for task in range(tasks)
        for index in range(2)
    ]


@pytest.fixture
def curated(tmp_path: Path) -> SnapshotRef:
    return line(tmp_path / "root", many())


def load(folder: Path, tmp_path: Path, *config: str, **named: Any) -> Any:
    import datasets

    return datasets.load_dataset(str(folder), *config, cache_dir=str(tmp_path / "cache"), **named)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def front_matter(folder: Path) -> dict[str, Any]:
    _, text, _ = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(text)


# -- readers ---------------------------------------------------------------------------------------


def test_datasets_loads_the_folder_with_and_without_a_configuration(tmp_path, curated):
    publish(curated, tmp_path / "out", PublishOptions(holdout_share=0.4))
    found = load(tmp_path / "out", tmp_path)
    assert (
        set(found) == {"train", "test"} and found["train"].num_rows + found["test"].num_rows == 24
    )
    named = load(tmp_path / "out", tmp_path, "concur", split="train")
    assert named[0] == found["train"][0]
    first = named[0]
    assert list(first) == list(COLUMNS)
    assert (
        first["device"] == "GPU X"
        and first["verdict_key"].startswith("key-")
        and first["task_license"] == "Apache-2.0"
    )
    assert (
        first["sampling"]["temperature"] == 0.7
        and first["prompt_hash"] == "prompt"
        and first["verdict_schema_version"] == 2
    )
    assert (
        first["speedup_lower"] < first["speedup"] < first["speedup_upper"]
        and first["flags"] == ["flag"]
        and first["turn"] == 1
    )


def test_polars_and_pyarrow_read_the_same_rows_in_order(tmp_path, curated):
    publish(curated, tmp_path / "out")
    by_polars = pl.read_parquet(tmp_path / "out/data/train-*.parquet")
    by_arrow = pq.read_table(tmp_path / "out/data")
    assert by_polars.to_dicts() == by_arrow.to_pylist()
    keys = [
        (row["task_id"], row["sample_index"], row["candidate_id"]) for row in by_polars.to_dicts()
    ]
    assert keys == sorted(keys) and len(keys) == 24
    assert by_polars["reasoning"].to_list() == [
        f"thought {index} about {task}" for task, index, _ in keys
    ]
    assert (
        by_polars["candidate_ms"].to_list() == [1.0] * 24
        and by_polars["speedup"].to_list() == by_polars["reference_ms"].to_list()
    )


def test_each_strategy_is_a_configuration_of_its_own(tmp_path, curated):
    other = Snapshot(curated.root, "curation", "other")
    rows = curated.open().read().head(5)
    other.append(rows.to_dicts(), pa.schema(rows.to_arrow().schema))
    manifest = curated.open().manifest
    other.publish(
        config={"strategy": "random/../x"},
        upstream=manifest["upstream"],
        extra={"created_at": "2031-01-02T00:00:00+00:00"},
    )
    made = publish(curated, tmp_path / "out", strategies=[other.ref, curated])
    assert made.configs == ("concur", "random_x") and made.tag.startswith("refresh-2031-01-02-")
    assert load(tmp_path / "out", tmp_path, split="train").num_rows == 24
    assert load(tmp_path / "out", tmp_path, "random_x", split="train").num_rows == 5
    assert [config["config_name"] for config in front_matter(tmp_path / "out")["configs"]] == [
        "concur",
        "random_x",
    ]


def test_tasks_that_were_chosen_among_the_sources_keep_their_source_and_licence(
    tmp_path,
):
    """As every run of the line has them: between the source and the candidates stands the choice of
    training tasks."""
    publish(line(tmp_path / "root", many(3), chosen=True), tmp_path / "out")
    first, *_ = load(tmp_path / "out", tmp_path, split="train")
    assert (first["task_source"], first["task_license"]) == ("bundled", "Apache-2.0")


def test_columns_that_a_later_curation_adds_are_published_and_older_snapshots_have_nulls(
    tmp_path, curated
):
    later = Snapshot(curated.root, "curation", "later")
    rows = (
        curated.open()
        .read()
        .with_columns(another_column=pl.lit("t/00-1"))
        .drop("entry_point", "operator_kind")
    )
    later.append(rows.to_dicts(), rows.to_arrow().schema)
    later.publish(config={"strategy": "concur"}, upstream=curated.open().manifest["upstream"])
    publish(later.ref, tmp_path / "out")
    found = load(tmp_path / "out", tmp_path, split="train")
    assert found.column_names == [*COLUMNS, "another_column"] and set(found["another_column"]) == {
        "t/00-1"
    }
    assert set(found["entry_point"]) == {None} == set(found["operator_kind"])
    assert "| another_column | as curation wrote it |" in (tmp_path / "out/README.md").read_text()


def test_the_card_says_what_the_tasks_compute(tmp_path):
    """Of the tasks in the set, not of all that were counted."""
    counted = [
        {
            "task_id": f"t/{n:02d}",
            "families": ["matmul", "activation"] if n % 2 else ["matmul"],
            "executed": "meta",
        }
        | {"flops": 100 * n, "bytes_min": 50, "arithmetic_intensity": 2.0 * n}
        for n in range(1, 4)
    ]
    counted += [
        {"task_id": "t/00", "families": [], "problem": "it hung"},
        {"task_id": "elsewhere", "families": ["fft"], "executed": "meta"},
    ]
    publish(line(tmp_path / "root", many(4), workloads=counted), tmp_path / "out")
    text = (tmp_path / "out/README.md").read_text()
    said = text.split("## What the tasks compute")[1].split("\n## ")[0]
    assert (
        "3 of 4 tasks" in said
        and "| matmul | 3 | 100% |" in said
        and "| activation | 2 | 67% |" in said
        and "fft" not in said
    )
    (intensity,) = [row for row in said.splitlines() if "FLOPs a byte" in row]
    assert [cell.strip() for cell in intensity.split("|")[2:-1]] == [
        "2",
        "2.4",
        "3",
        "4",
        "5",
        "5.6",
        "6",
    ]
    publish(line(tmp_path / "other", many(4)), tmp_path / "without")
    assert "What the tasks compute" not in (tmp_path / "without/README.md").read_text()


def test_the_cards_observations_are_the_lines_own_unless_others_are_given(tmp_path):
    from tasks.analysis import stage as analysis

    ref = line(tmp_path / "root", [*many(), sample("t/00", 7, 900, None, generator="evil](x)<b>")])
    above = ref.open().manifest["upstream"]
    verdicts, candidates = (
        SnapshotRef(root=ref.root, stage=name, fingerprint=above[n])
        for n, name in enumerate(("verification", "synthesis"))
    )
    made = analysis.run(verdicts, candidates, QUICK)
    plain = publish(ref, tmp_path / "out")
    text = (tmp_path / "out/README.md").read_text()
    section = text.split("## Observations")[1].split("\n## ")[0]
    assert (
        analysis.found_in(made).finding[0][:30] in section
        and "<b>" not in section
        and "](x)" not in section
    )
    assert (
        "](figures/difficulty.png)" in section
        and (tmp_path / "out/figures/difficulty.png").stat().st_size
    )
    mine = publish(ref, tmp_path / "mine", observations="Mine.")
    text = (tmp_path / "mine/README.md").read_text()
    assert "Mine." in text and "difficulty.png" not in text and mine.tag != plain.tag


# -- the same in, the same out ---------------------------------------------------------------------


def test_bytes_depend_on_the_rows_and_not_on_how_they_were_divided(tmp_path, monkeypatch):
    """Rows in one part or in parts of one row, in this order or another."""
    monkeypatch.setattr(sharding, "GROUP_ROWS", 5)
    one = line(tmp_path / "one", many())
    copy = Snapshot(str(tmp_path / "one"), "curation", "copy")
    rows = one.open().read()
    for row in reversed(rows.to_dicts()):
        copy.append([row], rows.to_arrow().schema)
    copy.publish(config=one.open().manifest["config"], upstream=one.open().manifest["upstream"])
    made = publish(one, tmp_path / "a", PublishOptions(shard_bytes=1))
    publish(copy.ref, tmp_path / "b", PublishOptions(shard_bytes=1))
    first, second = contents(tmp_path / "a"), contents(tmp_path / "b")
    names = [name for name in first if name.startswith("data/")]
    assert names and all(first[name] == second[name] for name in names)
    assert [shard.path for shard in made.shards] == [
        f"data/train-0000{number}-of-00005.parquet" for number in range(5)
    ]
    assert [shard.rows for shard in made.shards] == [5, 5, 5, 5, 4]


def test_the_same_again_is_the_same_folder_and_no_work(tmp_path, curated, monkeypatch):
    made = publish(curated, tmp_path / "a")
    publish(curated, tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    monkeypatch.setattr(
        publishing, "write_shards", lambda *args, **named: pytest.fail("it was written again")
    )
    assert publish(curated, tmp_path / "a") == made == read_publication(tmp_path / "a")


def test_another_option_is_another_revision_and_replaces_the_folder(tmp_path, curated):
    before = publish(curated, tmp_path / "out", PublishOptions(holdout_share=0.4))
    after = publish(curated, tmp_path / "out", PublishOptions(license="mit"))
    assert before.tag != after.tag and after.tag.startswith("refresh-20")
    assert (
        not list((tmp_path / "out/data").glob("test-*"))
        and front_matter(tmp_path / "out")["license"] == "mit"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "out",
        "root",
    ]  # nothing is left beside it


def test_a_task_stays_in_its_split_whatever_else_is_there(tmp_path):
    options = PublishOptions(holdout_share=0.3, seed=7)
    publish(line(tmp_path / "small", many(12)), tmp_path / "a", options)
    publish(line(tmp_path / "large", many(40)), tmp_path / "b", options)

    def splits(folder: Path) -> dict[str, str]:
        found = {}
        for split in ("train", "test"):
            found |= dict.fromkeys(
                pl.read_parquet(folder / f"data/{split}-*.parquet")["task_id"], split
            )
        return found

    before, after = splits(tmp_path / "a"), splits(tmp_path / "b")
    assert (
        len(before) == 12 and len(after) == 40 and {name: after[name] for name in before} == before
    )


def test_the_share_that_is_held_out_is_about_the_share_asked_for():
    held_out = sum(split_of(f"kernelbook/{number}", 0, 0.1) == "test" for number in range(10_000))
    assert 900 < held_out < 1100
    assert {split_of("a", 0, 0.0), split_of("b", 0, 0.0)} == {"train"}


# -- the card and the metadata ---------------------------------------------------------------------


def test_hostile_text_stays_text(tmp_path):
    evil = [sample("t/|<b>x</b>", 0, 10, 9.0, reasoning=HOSTILE, code=HOSTILE, generator=HOSTILE)]
    ref = line(
        tmp_path / "root",
        evil,
        programs={"t/|<b>x</b>": HOSTILE},
        source={"source": "user", "location": "/home/somebody/x"},
    )
    publish(ref, tmp_path / "out", PublishOptions(name=HOSTILE))
    text = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    told = front_matter(tmp_path / "out")
    assert told["license"] == "unknown" and [
        config["config_name"] for config in told["configs"]
    ] == ["concur"]
    body = text.split("---\n", 2)[2]
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(body)
    assert not [token for token in tokens if token.type == "html_block"]
    inline = [child for token in tokens for child in token.children or ()]
    assert not [child for child in inline if child.type in ("html_inline", "image", "link_open")]
    headings = [
        tokens[at + 1].content for at, token in enumerate(tokens) if token.type == "heading_open"
    ]
    assert len(headings) == 11 and "T" not in headings
    assert (
        len([token for token in tokens if token.type == "fence" and "alert(1)" in token.content])
        == 4
    )  # and the BibTeX title
    rows = [token for token in tokens if token.type == "tr_open"]
    cells = [token for token in tokens if token.type in ("th_open", "td_open")]
    assert (
        rows and len(cells) == 5 * 4 + 2 * 6 + (len(COLUMNS) + 1) * 2 + 3 * 8
    )  # a pipe in the data makes no column
    assert load(tmp_path / "out", tmp_path, split="train")[0]["reasoning"] == HOSTILE


def test_what_a_manifest_knows_of_this_machine_is_not_published(tmp_path):
    ref = line(
        tmp_path / "root", many(2), source={"source": "files", "location": "/home/somebody/tasks"}
    )
    publish(ref, tmp_path / "out")
    everything = b"".join(contents(tmp_path / "out").values())
    assert (
        b"somebody" not in everything
        and b"secret-host" not in everything
        and str(tmp_path).encode() not in everything
    )


def test_the_card_has_what_its_readers_look_for(tmp_path, curated):
    figure = tmp_path / "lengths.png"
    figure.write_bytes(b"\x89PNG")
    publish(
        curated,
        tmp_path / "out",
        PublishOptions(license="apache-2.0", holdout_share=0.4),
        observations="# Lengths\n\n```\n# not a heading\n```\nshorter is better",
        decontamination="2 of 12 tasks overlap",
        figures=[figure],
    )
    text, told = (tmp_path / "out/README.md").read_text(), front_matter(tmp_path / "out")
    assert told["size_categories"] == ["n<1K"] and told["task_categories"] == ["text-generation"]
    assert [entry["split"] for entry in told["configs"][0]["data_files"]] == ["train", "test"]
    assert (
        "### Lengths" in text and "\n# not a heading\n" in text and "2 of 12 tasks overlap" in text
    )
    assert (
        "![lengths](figures/lengths.png)" in text
        and (tmp_path / "out/figures/lengths.png").read_bytes() == b"\x89PNG"
    )
    assert (
        "2510.07356" in text
        and curated.fingerprint in text
        and "24 kernels (CUDA) for 12 PyTorch programs" in text
    )
    assert "concise_and_fast 12, high_speedup 12" in text


def test_a_program_in_both_splits_is_said(tmp_path):
    ref = line(
        tmp_path / "root", many(12), programs={f"t/{task:02d}": "the same" for task in range(12)}
    )
    publish(ref, tmp_path / "out", PublishOptions(holdout_share=0.4))
    assert "- 1 programs are in both splits" in (tmp_path / "out/README.md").read_text()


def test_croissant_describes_every_file_and_column_and_its_reader_finds_the_rows(tmp_path, curated):
    import mlcroissant

    out = tmp_path / "out"
    options = {"creator": "us", "url": "https://example.org/set", "license": "mit"}
    publish(curated, out, PublishOptions(holdout_share=0.4, **options))
    described = json.loads((out / "croissant.json").read_text())
    assert described["conformsTo"] == "http://mlcommons.org/croissant/1.0"
    assert described["license"] == "https://spdx.org/licenses/MIT.html"
    assert described["url"] == options["url"] and described["creator"]["name"] == "us"
    assert described["datePublished"] and described["description"]
    files = [entry for entry in described["distribution"] if entry["@type"] == "cr:FileObject"]
    for entry in files:
        data = (out / entry["contentUrl"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == entry["sha256"]
        assert entry["contentSize"] == f"{len(data)} B"
    assert {path.name for path in (out / "data").iterdir()} == {entry["name"] for entry in files}
    reader = mlcroissant.Dataset(str(out / "croissant.json"))
    assert [each.name for each in reader.metadata.record_sets] == ["concur-train", "concur-test"]
    for records in reader.metadata.record_sets:
        assert [field.name for field in records.fields] == list(COLUMNS)
        split = records.name.removeprefix("concur-")
        expected = pl.read_parquet(out / f"data/{split}-*.parquet")["candidate_id"].to_list()
        found = [row[f"{records.name}/candidate_id"] for row in reader.records(records.name)]
        assert [name.decode() for name in found] == expected


@pytest.mark.parametrize(
    ("source", "config", "licence"),
    [
        ("bundled", {"source": "bundled"}, "Apache-2.0"),
        ("kernelbook", {"source": "kernelbook"}, "MIT"),
        ("kernelbook", {"source": "kernelbook", "location": "GPUMODE/KernelBook"}, "MIT"),
        ("kernelbook", {"source": "kernelbook", "location": "later.parquet"}, "unknown"),
        ("kernelbench", {"source": "kernelbench"}, "unknown"),
        ("bundled", {"source": "files", "location": "x"}, "unknown"),
    ],
)
def test_a_licence_is_named_only_where_the_source_states_it(source, config, licence):
    assert licence_of(source, config) == licence


@pytest.mark.parametrize("text", [HOSTILE, "&lt;", "`" * 9, "\ud800 x", "a\r\nb", "|" * 500])
def test_text_of_others_is_one_cell_and_one_block(text):
    tokens = (
        MarkdownIt()
        .enable("table")
        .parse(
            f"| a | b |\n| --- | --- |\n| {cell(text).encode('utf-8', 'replace').decode()} | x |\n"
        )
    )
    assert [token.type for token in tokens].count("td_open") == 2
    assert [token.type for token in MarkdownIt().parse(fenced(text))] == ["fence"]


# -- what is refused -------------------------------------------------------------------------------


def test_an_unfinished_snapshot_is_refused(tmp_path, curated):
    os.remove(Path(curated.open().path) / "manifest.json")
    with pytest.raises(UsageError, match="unfinished"):
        publish(curated, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="no finished curated set"):
        find_curated(curated.root)


@pytest.mark.parametrize("column", ["reasoning", "task_code", "criterion"])
def test_a_column_that_is_missing_is_named(tmp_path, curated, column):
    part = Path(curated.open().parts()[0])
    pq.write_table(pq.read_table(part).drop_columns([column]), part)
    with pytest.raises(UsageError, match=f"lacks the columns {column}"):
        publish(curated, tmp_path / "out")


def test_a_damaged_part_is_told_from_a_disk_that_cannot_be_written(tmp_path, curated):
    made = publish(curated, tmp_path / "out")
    for stage in ("verification", "curation"):
        snapshot = curated.open() if stage == "curation" else lineage(curated).verdicts
        part = Path(snapshot.parts()[0])
        data = part.read_bytes()
        for damaged in (
            b"not a table at all",
            data[: len(data) // 2],
            data[:4] + bytes(len(data) - 400) + data[-396:],
        ):
            part.write_bytes(damaged)
            with pytest.raises(UsageError, match="cannot read"):
                publish(curated, tmp_path / "out", PublishOptions(license="mit"))
        part.write_bytes(data)
    assert is_whole(tmp_path / "out", made, content=True)


@pytest.mark.parametrize("rows", [True, False])
def test_an_empty_set_is_refused(tmp_path, curated, rows):
    part = Path(curated.open().parts()[0])
    if rows:
        pq.write_table(pq.read_table(part).slice(0, 0), part)
    else:
        part.unlink()
    with pytest.raises(UsageError, match="is empty"):
        publish(curated, tmp_path / "out")


def test_without_the_snapshots_above_there_is_no_provenance(tmp_path, curated):
    shutil.rmtree(Path(curated.root) / "verification")
    with pytest.raises(UsageError, match="verification snapshot .* is not there"):
        publish(curated, tmp_path / "out")


def test_a_folder_that_holds_something_else_is_kept(tmp_path, curated):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="something else"):
        publish(curated, tmp_path / "out")
    assert contents(tmp_path / "out") == {"thesis.tex": b"years of work"}
    (tmp_path / "out/thesis.tex").unlink()
    made = publish(curated, tmp_path / "out")  # an empty folder is nothing else
    (tmp_path / "out/data/notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="data/notes.txt"):
        publish(curated, tmp_path / "out", PublishOptions(license="mit"))
    assert (tmp_path / "out/data/notes.txt").read_text() == "mine" and is_whole(
        tmp_path / "out", made, content=True
    )


def test_a_full_disk_leaves_what_was_published_before(tmp_path, curated, monkeypatch):
    made = publish(curated, tmp_path / "out")

    def full(*args: Any, **named: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("write_table", "__init__"):
        with monkeypatch.context() as patched:
            patched.setattr(pq.ParquetWriter, name, full)
            with pytest.raises(UsageError, match="No space left on device.*intact"):
                publish(curated, tmp_path / "out", PublishOptions(license="mit"))
    assert (
        is_whole(tmp_path / "out", made, content=True)
        and read_publication(tmp_path / "out") == made
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "root"]


def test_a_place_that_cannot_be_written_is_one_error(tmp_path, curated):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        publish(curated, tmp_path / "file" / "out")
    with pytest.raises(UsageError, match="is not a folder"):
        publish(curated, tmp_path / "file")


def test_killed_between_the_renames_the_old_folder_comes_back(tmp_path, curated):
    made = publish(curated, tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / ".out.old")
    (tmp_path / ".out.999999999.new").mkdir()  # of a process that is no more
    assert publish(curated, tmp_path / "out") == made
    other = publish(curated, tmp_path / "out", PublishOptions(license="mit"))
    assert other != made and sorted(path.name for path in tmp_path.iterdir()) == ["out", "root"]


def test_a_folder_that_was_tampered_with_is_made_again(tmp_path, curated):
    made = publish(curated, tmp_path / "out")
    (tmp_path / "out/README.md").write_text("short")
    assert not is_whole(tmp_path / "out", made)
    assert publish(curated, tmp_path / "out") == made and is_whole(
        tmp_path / "out", made, content=True
    )


def test_a_hold_out_that_takes_everything_is_refused(tmp_path):
    with pytest.raises(UsageError, match="takes all 1 tasks"):
        publish(
            line(tmp_path / "root", many(1)),
            tmp_path / "out",
            PublishOptions(holdout_share=0.999999),
        )


def test_the_newest_set_of_the_rule_is_found_and_others_by_name(tmp_path, curated):
    root, manifest = curated.root, curated.open().manifest
    for name, strategy, created in (
        ("aaaa1", "random", "2040-01-01"),
        ("aaaa2", "concur", "2030-01-01"),
    ):
        Snapshot(root, "curation", name).publish(
            config={"strategy": strategy},
            upstream=manifest["upstream"],
            rows=0,
            extra={"created_at": created},
        )
    assert find_curated(root).fingerprint == "aaaa2"
    assert (
        find_curated(root, "aaaa1").fingerprint == "aaaa1"
        and lineage(find_curated(root, "aaaa1")).strategy == "random"
    )
    assert (
        find_curated("elsewhere", f"{root}/curation/{curated.fingerprint}").open().path
        == curated.open().path
    )
    for name, problem in (("aaaa", "2 curated snapshots"), ("zz", "no curated snapshot")):
        with pytest.raises(UsageError, match=problem):
            find_curated(root, name)


def test_the_record_of_a_publication_is_frozen(tmp_path, curated):
    made = publish(curated, tmp_path / "out")
    assert isinstance(made, Published) and made.rows == {"concur": {"train": 24}}
    with pytest.raises(ValueError, match="frozen"):
        made.tag = "other"
