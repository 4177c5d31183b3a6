"""A published folder as its readers see it: `datasets`, polars, pyarrow, a Markdown renderer; and
what is refused."""

import errno
import os
import shutil
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest
import yaml
from markdown_it import MarkdownIt

from kernels_eval.errors import UsageError
from tasks.publishing import publish as publishing
from tasks.publishing.columns import COLUMNS, licence_of
from tasks.publishing.config import PublishOptions
from tasks.publishing.lineage import find_curated, lineage
from tasks.publishing.publish import is_whole, publish, read_publication
from tasks.publishing.sets import publish_set
from tests.support.cases import cases
from tests.support.curated import line, sample
from tests.support.samples import SINGLE, finished

CASES = cases("publishing")

HOSTILE = (
    "a|b `code` ```\n---\nlicense: mit\n---\n</details><script>alert(1)</script>"
    " [x](javascript:alert(1)) ![i](http://e/x.png)\n# T\n\x07\u202e~~~"
)


MIT = PublishOptions(license="mit")


def many(tasks=12):
    """Tasks with two samples each: the first is taken as concise and fast, the second for its
    speedup."""
    return [
        sample(f"t/{n:02d}", i, 100 + 50 * i, 20.0 - i, ops=SINGLE if n % 2 else ["a", "b"])
        for n in range(tasks)
        for i in range(2)
    ]


@pytest.fixture
def curated(tmp_path):
    return line(tmp_path / "root", many())


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def again(curated, name, strategy, rows, **extra):
    """Another set of the same line."""
    above, config = curated.open().manifest["upstream"], {"strategy": strategy}
    table = rows.to_dicts(), rows.to_arrow().schema
    return finished(curated.root, "curation", *table, name, above, config, **extra)


def load(folder, split="train"):
    import datasets

    return datasets.load_dataset(str(folder), cache_dir=str(folder.parent / "cache"), split=split)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def card_of(folder):
    return (folder / "README.md").read_text(encoding="utf-8")


def section(folder, title):
    return card_of(folder).split(f"## {title}")[1].split("\n## ")[0]


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def front_matter(folder):
    return yaml.safe_load(card_of(folder).split("---\n", 2)[1])


# -- readers ---------------------------------------------------------------------------------------


def test_datasets_loads_the_folder(out, curated):
    publish(curated, out, PublishOptions(holdout_share=0.4))
    train, test = load(out), load(out, split="test")
    assert train.num_rows + test.num_rows == 24
    first = train[0]
    assert list(first) == list(COLUMNS)
    known = {"device": "GPU X", "task_license": "Apache-2.0", "prompt_hash": "prompt", "turn": 1}
    known |= {"verdict_schema_version": 2, "flags": ["flag"]}
    assert {name: first[name] for name in known} == known
    assert first["verdict_key"].startswith("key-") and first["sampling"]["temperature"] == 0.7
    assert first["speedup_lower"] < first["speedup"] < first["speedup_upper"]


def test_tasks_that_were_chosen_among_the_sources_keep_their_source_and_licence(tmp_path, out):
    """As every run of the line has them: between the source and the candidates stands the choice of
    training tasks."""
    publish(line(tmp_path / "root", many(3), chosen=True), out)
    first = load(out)[0]
    assert (first["task_source"], first["task_license"]) == ("bundled", "Apache-2.0")


def test_rows_that_are_not_the_response_as_written_say_so(tmp_path, out):
    """One text; a server that separates reasoning; code that the parser moved."""
    written = {
        "t/1": ("<think>\nwhy\n</think>\n\ncode", None, False),
        "t/2": ("code", "why", False),
        "t/3": ("<think>\nwhy code\n</think>", None, True),
    }
    rows = [
        sample(
            *(task, 0, 10, 9.0),
            **{"reasoning": "why", "answer": "code", "response": response, "separated": separated},
        )
        for task, (response, separated, _) in written.items()
    ]
    publish(line(tmp_path / "root", rows), out)
    found = dict(pl.read_parquet(out / "data/*.parquet").select("task_id", "repaired").iter_rows())
    assert found == {task: repaired for task, (*_, repaired) in written.items()}
    assert "1 of 3 rows (33.3%) are `repaired`" in card_of(out)


def test_the_card_says_what_it_holds_and_where_it_is_from(tmp_path, out):
    from tasks.observe import stage as analysis

    ref = line(tmp_path / "root", [*many(), sample("t/00", 7, 900, None, generator="evil](x)<b>")])
    above = lineage(ref)
    made = analysis.run(above.verdicts.ref, above.candidates.ref)
    publish(ref, out, PublishOptions(license="apache-2.0", holdout_share=0.4))
    text, told = card_of(out), front_matter(out)
    assert told["task_categories"] == ["text-generation"]
    assert [entry["split"] for entry in told["configs"][0]["data_files"]] == ["train", "test"]
    for words in (
        *("24 kernels for 12 PyTorch programs", "2510.07356", ref.fingerprint),
        *("concise_and_fast 12, high_speedup 12", analysis.found_in(made).finding[0][:30]),
    ):
        assert words in text
    assert "<b>" not in text and "](x)" not in text


def test_a_set_has_the_name_of_its_folder_and_few_rows_no_deciles(tmp_path, curated):
    publish_set(str(tmp_path / "root"), str(tmp_path / "relu set"))
    assert front_matter(tmp_path / "relu set")["pretty_name"] == "relu set"
    assert "| quantile of 24 rows | 0% | 10% | 50% | 90% | 100% |" in card_of(tmp_path / "relu set")
    two = line(tmp_path / "two", [sample("t/1", 0, 10, 2.0), sample("t/2", 0, 20, 0.5)])
    publish(two, tmp_path / "set", PublishOptions(name="mine"))
    text = card_of(tmp_path / "set")
    assert front_matter(tmp_path / "set")["pretty_name"] == "mine"
    assert "| quantile of 2 rows | 0% | 50% | 100% |" in text
    assert "| speedup (times the program's speed) | 0.5 | 1.25 | 2 |" in text


def test_hostile_text_stays_text(tmp_path, out):
    evil = [sample("t/|<b>x</b>", 0, 10, 9.0, reasoning=HOSTILE, code=HOSTILE, generator=HOSTILE)]
    source = {"source": "user", "location": "/home/somebody/x"}
    ref = line(tmp_path / "root", evil, programs={"t/|<b>x</b>": HOSTILE}, source=source)
    publish(ref, out, PublishOptions(name=HOSTILE))
    assert front_matter(out)["license"] == "unknown"
    body = card_of(out).split("---\n", 2)[2]
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(body)
    kinds = [token.type for token in tokens]
    inline = {child.type for token in tokens for child in token.children or ()}
    assert "html_block" not in kinds and not inline & {"html_inline", "image", "link_open"}
    headings = [tokens[at + 1].content for at, kind in enumerate(kinds) if kind == "heading_open"]
    assert len(headings) == 7 and "T" not in headings
    # a pipe in the data makes no column
    cells = kinds.count("th_open") + kinds.count("td_open")
    assert cells == 5 * 4 + 2 * 3 + 4 * 4 + 4 * 5 + (len(COLUMNS) + 1) * 2
    assert load(out)[0]["reasoning"] == HOSTILE


# -- the same in, the same out ---------------------------------------------------------------------


def test_the_same_again_is_the_same_folder_and_no_work(tmp_path, out, curated, monkeypatch):
    made = publish(curated, out)
    assert made.rows == {"train": 24}
    publish(curated, tmp_path / "b")
    assert contents(out) == contents(tmp_path / "b")
    with monkeypatch.context() as patch:
        patch.setattr(publishing, "published_rows", lambda *_, **__: pytest.fail("written again"))
        assert publish(curated, out) == made == read_publication(out)
    with pytest.raises(ValueError, match="frozen"):
        made.tag = "other"
    (out / "README.md").write_text("short")  # tampered with: made again
    assert not is_whole(out, made)
    assert publish(curated, out) == made and is_whole(out, made)


def test_another_option_is_another_revision_and_replaces_the_folder(tmp_path, out, curated):
    before = publish(curated, out, PublishOptions(holdout_share=0.4))
    after = publish(curated, out, MIT)
    assert before.tag != after.tag and after.tag.startswith("refresh-20")
    assert not list((out / "data").glob("test-*")) and front_matter(out)["license"] == "mit"
    assert names_in(tmp_path) == ["out", "root"]  # nothing is left beside it


def test_a_task_stays_in_its_split_whatever_else_is_there(tmp_path):
    splits = []
    for tasks in (12, 40):
        out = tmp_path / f"out{tasks}"
        options = PublishOptions(holdout_share=0.4)
        publish(line(tmp_path / "root", many(tasks)), out, options)
        found = {
            split: pl.read_parquet(out / f"data/{split}-*.parquet") for split in ("train", "test")
        }
        splits.append({name: split for split, rows in found.items() for name in rows["task_id"]})
    before, after = splits
    assert (len(before), len(after)) == (12, 40) and before.items() <= after.items()


# -- the card and the metadata ---------------------------------------------------------------------


def test_what_a_manifest_knows_of_this_machine_is_not_published(tmp_path, out):
    source = {"source": "files", "location": "/home/somebody/tasks"}
    publish(line(tmp_path / "root", many(2), source=source), out)
    everything = b"".join(contents(out).values())
    for secret in ("somebody", "secret-host", str(tmp_path)):
        assert secret.encode() not in everything


def test_a_program_in_both_splits_is_said(tmp_path, out):
    programs = {f"t/{task:02d}": "the same" for task in range(12)}
    ref = line(tmp_path / "root", many(12), programs=programs)
    publish(ref, out, PublishOptions(holdout_share=0.4))
    assert "1 programs are in both splits" in card_of(out)


@pytest.mark.parametrize(
    "source, config, licence",
    CASES["a_licence_is_named_only_where_the_source_states_it"],
)
def test_a_licence_is_named_only_where_the_source_states_it(source, config, licence):
    assert licence_of(source, config) == licence


# -- what is refused -------------------------------------------------------------------------------


def unfinished(curated, part):
    (part.parent / "manifest.json").unlink()


def without(column):
    def drop(curated, part):
        pq.write_table(pq.read_table(part).drop_columns([column]), part)

    return drop


def no_rows(curated, part):
    pq.write_table(pq.read_table(part).slice(0, 0), part)


def no_parts(curated, part):
    part.unlink()


def no_verdicts(curated, part):
    shutil.rmtree(Path(curated.root) / "verification")


@pytest.mark.parametrize(
    "spoil, problem",
    [
        (unfinished, "unfinished"),
        *((without(name), f"needs the columns {name}") for name in ("reasoning", "task_code")),
        (without("criterion"), "needs the columns criterion"),
        (no_rows, "is empty"),
        (no_parts, "is empty"),
        (no_verdicts, "verdicts snapshot .* is missing"),
    ],
)
def test_what_is_no_whole_set_is_refused(out, curated, spoil, problem):
    spoil(curated, Path(curated.open().parts()[0]))
    with pytest.raises(UsageError, match=problem):
        publish(curated, out)
    assert not out.exists()
    if problem == "unfinished":
        with pytest.raises(UsageError, match="no finished curated set"):
            find_curated(curated.root)


def test_a_set_with_a_sample_that_was_only_screened_is_refused(tmp_path, out):
    rows = [sample("t/1", 0, 10, 6.0, level="screen"), sample("t/2", 0, 10, 6.0)]
    rows.append(sample("t/2", 1, 20, 1.0, level="screen"))  # not taken
    with pytest.raises(UsageError, match="1 of 2 samples .* only screened") as caught:
        publish(line(tmp_path / "root", rows), out)
    assert "verification.screen=false" in caught.value.hint and not out.exists()
    publish(line(tmp_path / "root", [rows[0] | {"level": "confirm"}, *rows[1:]]), out)


def test_a_damaged_part_is_told_from_a_disk_that_cannot_be_written(out, curated):
    made = publish(curated, out)
    for snapshot in (lineage(curated).verdicts, curated.open()):
        part = Path(snapshot.parts()[0])
        data = part.read_bytes()
        for damaged in (
            b"not a table at all",
            data[: len(data) // 2],
            data[:4] + bytes(len(data) - 400) + data[-396:],
        ):
            part.write_bytes(damaged)
            with pytest.raises(UsageError, match="cannot read"):
                publish(curated, out, MIT)
        part.write_bytes(data)
    assert is_whole(out, made)


def test_a_folder_that_holds_something_else_is_kept(out, curated):
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="other files"):
        publish(curated, out)
    assert contents(out) == {"thesis.tex": b"years of work"}
    (out / "thesis.tex").unlink()
    made = publish(curated, out)  # an empty folder is nothing else
    (out / "data/notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="data/notes.txt"):
        publish(curated, out, MIT)
    assert (out / "data/notes.txt").read_text() == "mine" and is_whole(out, made)


def test_a_full_disk_leaves_what_was_published_before(tmp_path, out, curated, monkeypatch):
    made = publish(curated, out)

    def full(*args, **named):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(publishing, "_write", full)
    with pytest.raises(UsageError, match="No space left on device.*intact"):
        publish(curated, out, MIT)
    assert is_whole(out, made) and read_publication(out) == made
    assert names_in(tmp_path) == ["out", "root"]


def test_a_place_that_cannot_be_written_is_one_error(tmp_path, curated):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        publish(curated, tmp_path / "file" / "out")
    with pytest.raises(UsageError, match="is not a folder"):
        publish(curated, tmp_path / "file")
    with pytest.raises(UsageError, match="takes all 12 tasks"):
        publish(curated, tmp_path / "out", PublishOptions(holdout_share=0.999999))


def test_the_newest_set_of_the_rule_is_found_and_others_by_name(curated):
    root, rows = curated.root, curated.open().read().clear()
    again(curated, "aaaa1", "random", rows, created_at="2040-01-01")
    again(curated, "aaaa2", "concur", rows, created_at="2030-01-01")
    assert find_curated(root).fingerprint == "aaaa2"
    named = find_curated(root, "aaaa1")
    assert named.fingerprint == "aaaa1" and lineage(named).strategy == "random"
    place = curated.open().path
    assert find_curated("elsewhere", place).open().path == place
    for name, problem in (("aaaa", "2 curation snapshots"), ("zz", "no curation snapshot")):
        with pytest.raises(UsageError, match=problem):
            find_curated(root, name)
