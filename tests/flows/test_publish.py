"""`concur publish` and `concur diff` as a user runs them."""

import json
import re
import shlex

import pytest

from tests.support.curated import line, sample
from tests.support.doc_commands import fences
from tests.support.processes import python
from tests.support.typed import data_of, refused, typed


@pytest.fixture
def curated(tmp_path):
    return line(
        tmp_path / "root",
        [sample("t/1", 0, 10, 6.0), sample("t/1", 1, 30, 5.5), sample("t/2", 0, 10, 6.0)],
    )


@pytest.fixture
def to_set(tmp_path):
    return ("publish", "--root", tmp_path / "root", "--out", tmp_path / "set")


def test_publish_says_where_and_which_revision(tmp_path, curated, to_set):
    options = ("--license", "mit", "--name", "Mine")
    out = typed(*to_set, *options)
    assert "train 3" in out and "refresh-20" in out
    card = (tmp_path / "set/README.md").read_text()
    assert "# Mine" in card
    told = data_of(*to_set, *options, "--curated", curated.fingerprint[:9])
    assert told["rows"] == {"train": 3} and told["hub"] is None
    assert told["curated"] == curated.fingerprint


def test_a_share_that_holds_out_no_task_is_said(tmp_path, curated, to_set):
    assert "raise --holdout" in " ".join(typed(*to_set, "--holdout", "0.000001").split())
    assert data_of(*to_set)["caution"] is None, "nothing was to be held out"


DEMO = ("leaky_integrator", "max_pool2d", "pairwise_l1_distance", "smooth_l1_rows")
"""The tasks that every training set of the demo has held so far."""


@pytest.mark.parametrize("names", [DEMO, DEMO[:1]], ids=["the demo's", "a single task"])
def test_the_page_s_example_on_a_small_set(tmp_path, monkeypatch, names):
    line(tmp_path / ".concur", [sample(f"bundled/{name}", 0, 10, 6.0) for name in names])
    monkeypatch.chdir(tmp_path)
    own = [fence for fence in fences() if fence.page.name == "publish-a-data-set.md"]
    command, script = own[0].text, own[1].text
    typed(*shlex.split(command.removeprefix(".venv/bin/concur ")))
    cache = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    done = python(script + "print(train.num_rows)", **cache)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(len(names))]


def test_a_share_that_holds_out_every_task_names_one_that_does_not(to_set, curated):
    said = refused(*to_set, "--holdout", "0.999999")
    share = re.search(r"`--holdout (0\.\d+)` leaves some to train on", said)[1]
    assert data_of(*to_set, "--holdout", share)["rows"]["train"]


def test_diff_in_words_and_as_json(tmp_path, curated, to_set):
    other = line(tmp_path / "root", [sample("t/1", 0, 10, 6.0)])
    typed(*to_set, "--curated", curated.fingerprint)
    out = typed("diff", to_set[-1], other.fingerprint, *to_set[1:3])
    assert "no_candidate 1, no_task 1" in out and "tasks  gained 0, lost 1" in out
    told = data_of("diff", curated.open().path, other.open().path)
    assert told["reasons"]["lost"] == {"no_candidate": 1, "no_task": 1}


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("publish --root {tmp}/nothing --out {tmp}/set", "no finished curated set"),
        ("publish --root {tmp}/root --out {tmp}/set --holdout 1.5", "holdout_share = 1.5"),
        ("publish --root {tmp}/root --out {tmp}/set --license 'My Own'", "license = 'My Own'"),
        ("publish --root {tmp}/root --out {tmp}/root", "contains other files"),
        (
            "publish --root {tmp}/root --out {tmp}/set --push a/b",
            "no token for the hub in HF_TOKEN",
        ),
        ("diff {tmp}/root zzzz --root {tmp}/root", "no curation snapshot"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_2(tmp_path, curated, arguments, said, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert said in refused(*shlex.split(arguments.format(tmp=tmp_path)))


def test_publishing_needs_no_framework(tmp_path, curated):
    """Neither torch nor Prefect nor Ray is loaded to write a folder or to compare two."""
    script = (
        "import json, sys; from flows.diff import diff_sets;"
        " from tasks.publishing.sets import publish_set;"
        f" publish_set({str(tmp_path / 'root')!r}, {str(tmp_path / 'set')!r});"
        f" diff_sets({str(tmp_path / 'root')!r}, {str(tmp_path / 'set')!r},"
        f" {curated.fingerprint!r}); print(json.dumps(sorted({{'torch', 'ray', 'prefect', 'mlflow',"
        " 'transformers'} & set(sys.modules))))"
    )
    done = python(script)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
