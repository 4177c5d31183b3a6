"""The benchmark's configuration, the code that decides its scores, and what is
said of verdicts that do not count."""

import ast
import math
from pathlib import Path

import pytest

import tasks
from flows.config import load_profile
from kernels_eval.source.syntax import parse_source
from tasks.benchmark.config import BenchmarkConfig
from tasks.benchmark.remarks import remarks
from tasks.versions import LOGIC
from tests.support.verdict_rows import BROKEN, WRONG, frame, outcomes, row

ROOT = Path(tasks.__file__).parent.parent


def test_no_module_that_scoring_reads_is_missing():
    """Every import from the benchmark in a module of SCORING_VERSION is one of them."""
    code = LOGIC["SCORING_VERSION"]
    bare = {"tasks.benchmark.config"}  # its values are in the fingerprint already
    for name in code:
        tree = parse_source((ROOT / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"))
        read = {
            node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
        }
        own = {module for module in read if module.startswith(("tasks.benchmark", "tasks.scores"))}
        assert own <= {*code, *bare}, name


@pytest.mark.parametrize(
    "samples, ks",
    [(1, (1,)), (2, (1,)), (5, (1, 5)), (9, (1, 5)), (10, (1, 5, 10)), (100, (1, 5, 10))],
)
def test_only_what_the_samples_can_estimate_is_asked_for(samples, ks):
    assert BenchmarkConfig(samples_per_task=samples).ks == ks


def test_what_does_not_count_is_said():
    rows = outcomes("m", a=(2.0, BROKEN, WRONG), bad=(BROKEN, BROKEN, 2.0, "truncated"))
    rows += outcomes("n", a=(math.inf, math.nan, -1.0), even=(BROKEN, 2.0, WRONG))
    rows.append(row("m", "even", WRONG) | {"status": None})
    said = remarks(frame(*rows))
    for words in (
        "reached it: bad (2 candidates).",
        "2 candidates of tasks where it works for most",
        "a (1), even (1).",
        "n has no sample on 1 of 3 tasks",
        "m has 1 to 4 samples per task",
        "1 verdicts have no status",
        "3 speedups are infinite",
    ):
        assert any(words in sentence for sentence in said), words
    assert remarks(frame(*outcomes("m", a=(2.0, WRONG)))) == []
    (said,) = remarks(
        frame(row("m", "a", 2.0, level="screen"), row("m", "a", WRONG, level="screen"))
    )
    assert said.startswith("1 right answers were only screened: they count as not right (m 1)")


def test_the_papers_profile_has_its_limit_and_sizes():
    paper = load_profile("paper")
    assert paper.benchmark.sampling.max_tokens == 32768
    assert paper.curation.criterion_sizes == (3934, 414, 544)
