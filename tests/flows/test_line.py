"""The whole line as a user runs it, killed with SIGKILL while it verifies, started again, and run
once more for nothing."""

import json
import re
import signal
import sqlite3
from html.parser import HTMLParser
from pathlib import Path

import polars as pl
import pytest
import yaml

from tasks.store.lookup import snapshots
from tasks.tracking.writing import PARENT_TAG
from tests.support.commands import Running, kill_tree, tiny

PROFILE = tiny(
    "tiny",
    tasks=2,
    training={"batch_size": 2, "learning_rate": 2.0e-3},
    benchmark={"sampling": {"temperature": 0.8, "max_tokens": 32}},
)
CANDIDATES = 4
START_S, RUN_S = 600, 900  # the first run on a machine also precompiles headers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(PROFILE))
    return tmp_path


@pytest.fixture
def lines(directory):
    """Every line that a test starts ends with it."""
    started = []
    yield started
    for line in started:
        kill_tree(line.process)


def started(directory, lines):
    lines.append(Running("run", "--profile", "tiny.yaml", "--root", "out", cwd=directory))
    return lines[-1]


def verification(root):
    return [
        found for found in snapshots(str(root), "verification") if found.parts() or journals(found)
    ]


def journals(snapshot):
    return sorted(Path(snapshot.path).glob(".journal-*.jsonl"))


def whole_rows(root):
    """Verdicts that the killed run left: rows of parts and whole lines of journals, by
    candidate."""
    found = {}
    for snapshot in verification(root):
        for row in snapshot.read().to_dicts():
            found[row["candidate_id"]] = row
        for journal in journals(snapshot):
            for line in journal.read_text().split("\n")[:-1]:
                row = json.loads(line)
                found[row["candidate_id"]] = row
    return found


def said(value):
    """A row without what it does not say: a journal leaves absent fields out, a table holds them as
    nulls."""
    if isinstance(value, dict):
        return {key: said(inner) for key, inner in value.items() if inner is not None}
    return value


class Outside(HTMLParser):
    """Everything a page would load from elsewhere."""

    def __init__(self):
        super().__init__()
        self.found = []
        self.inside = []

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            loads = name in ("src", "srcset", "poster", "data") or (
                name == "href" and tag in ("link", "use", "image")
            )
            if loads and value:
                (self.inside if value.startswith(("data:", "#")) else self.found).append(
                    f"{tag} {name}={value[:80]}"
                )


def test_killed_started_again_and_run_for_nothing(directory, lines):
    root = directory / "out"

    # 1. killed in the middle of verification
    first = started(directory, lines)
    first.wait_for(rf"^verification +[1-{CANDIDATES - 1}]/{CANDIDATES} ", START_S)
    kill_tree(first.process)
    assert first.process.returncode == -signal.SIGKILL
    before = whole_rows(root)
    assert 1 <= len(before) < CANDIDATES
    (killed,) = verification(root)
    assert not killed.finished
    assert not (root / "report.html").exists()

    # 2. started again: it completes, and what was verified stays as it was
    second = started(directory, lines)
    assert second.finish(RUN_S) == 0, "".join(second.stderr)[-4000:]
    assert killed.finished and killed.manifest["rows"] == CANDIDATES
    rows = pl.concat([pl.read_parquet(part) for part in killed.parts()]).to_dicts()
    assert (
        len(rows) == len({row["candidate_id"] for row in rows}) == CANDIDATES
    )  # nothing twice, in the files themselves
    after = {row["candidate_id"]: row for row in rows}
    for key, row in before.items():  # timings included: none was measured again
        assert said(after[key]) == said(row)
    reached = {
        int(found[1])
        for line in second.stderr
        if (found := re.match(rf"verification +(\d+)/{CANDIDATES} ", line))
    }
    assert reached and min(reached) >= len(before)  # it counts on from what was kept
    assert journals(killed) == []
    assert re.search(r"new work in +.*(benchmark|training)", second.text.replace("\n", " ")), (
        second.text
    )
    history = snapshots(str(root), "training")[0].read()
    assert history["epoch"].max() == 3.0

    # 3. once more: everything comes from snapshots
    published = {path: path.stat().st_mtime_ns for path in root.glob("*/*/manifest.json")}
    third = started(directory, lines)
    assert third.finish(RUN_S) == 0, "".join(third.stderr)[-4000:]
    assert "nothing was new, all snapshots existed already" in " ".join(third.text.split())
    assert {path: path.stat().st_mtime_ns for path in root.glob("*/*/manifest.json")} == published
    assert len(published) == len(
        [
            found
            for stage in {path.parts[-3] for path in published}
            for found in snapshots(str(root), stage)
        ]
    )

    (curated,) = snapshots(str(root), "curation")
    # of the source's tasks and the benchmark's, which are compared, of the training tasks, which
    # curation reads, and of the suite's, by which the report groups scores
    (workloads,) = [
        found
        for found in snapshots(str(root), "workloads")
        if found.fingerprint in curated.manifest["upstream"]
    ]
    assert workloads.read()["problem"].to_list() == [None, None]
    assert set(workloads.read()["executed"]) == {"meta"}
    assert len(snapshots(str(root), "workloads")) == 4
    assert set(curated.manifest["operators_from"]) == {"verdict"}
    (analysis,) = snapshots(str(root), "analysis")
    manifest = analysis.manifest
    assert manifest["finding"]
    # of the verdicts in which what was kept is confirmed
    confirmed = curated.above("verification")
    assert manifest["upstream"][0] == confirmed.fingerprint
    assert confirmed.above("verification").fingerprint == killed.fingerprint
    assert curated.manifest["unconfirmed"] == 0 and confirmed.manifest["confirmation"]["confirmed"]
    assert all((Path(analysis.path) / name).stat().st_size for name in manifest["files"])

    check_report(root / "report.html", manifest["finding"][-1][:40])
    check_tracking(root)


def check_report(path, finding):
    """One file that can be mailed: it shows what ran, and loads nothing."""
    page = path.read_text(encoding="utf-8")
    outside = Outside()
    outside.feed(page)
    assert outside.found == []
    assert re.findall(r"@import|url\(\s*['\"]?(?!data:|#)[a-z/]", page) == []
    assert "<svg" in page or any("data:image" in found for found in outside.inside)
    for text in (
        "tiny",
        "recorded",
        "base",
        "tuned",
        "Exec",
        "fast_1",
        "Reasoning length",
        finding,
    ):
        assert text in page, text


def check_tracking(root):
    """MLflow holds one finished parent run, however often the line ran, and nothing unfinished."""
    with sqlite3.connect(f"file:{root / 'mlflow.db'}?mode=ro", uri=True) as database:
        runs = dict(
            database.execute(
                "select run_uuid, status from runs where lifecycle_stage = 'active'"
            ).fetchall()
        )
        children = {
            run
            for (run,) in database.execute("select run_uuid from tags where key = ?", (PARENT_TAG,))
        }
        names = {
            name
            for (name,) in database.execute(
                "select name from runs where lifecycle_stage = 'active'"
            )
        }
        models = database.execute("select name from model_versions").fetchall()
    parents = set(runs) - children
    assert [runs[run] for run in parents] == ["FINISHED"]
    assert len(runs) > 1 and set(runs.values()) == {"FINISHED"}
    assert {"synthesis", "verification", "curation", "analysis", "training"} <= names
    assert models == [("concur-tiny",)]
