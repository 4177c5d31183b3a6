"""The benchmark's configuration, the code that decides its scores, limits of tokens, and what is
said of verdicts that do not count."""

import ast
import math
from pathlib import Path

import pytest

import tasks
from flows.config import load_profile
from kernels_eval.source.syntax import parse_source
from tasks.benchmark.config import BenchmarkConfig
from tasks.benchmark.remarks import remarks, unknown_lengths, within_tokens
from tasks.benchmark.stage import Answers, run, scores_of
from tasks.scores import scores
from tasks.store import snapshots
from tasks.versions import LOGIC
from tests.support.recomputed import verdicts
from tests.support.samples import line_of
from tests.support.verdict_rows import BROKEN, WRONG, frame, outcomes, row, scored_row

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


def test_a_limit_of_tokens_is_scored_beside_the_answers_as_they_are(recomputed):
    (made,) = snapshots(str(recomputed), "benchmark")
    facts = {"model": "base", "track": "custom_kernel"}
    whole, cut = (
        scored_row(scores_of(made.ref, limit=limit), "exec", **facts) for limit in (None, 900)
    )
    assert 0 < cut["value"] < whole["value"]
    assert cut["tasks"] == whole["tasks"] == 80 - len(made.manifest["excluded_tasks"])
    assert any("left out for every model" in said for said in made.manifest["remarks"])


def test_an_answer_above_a_limit_of_tokens_is_none():
    rows = outcomes("m", a=(2.0, 3.0, WRONG), bad=(BROKEN,)) + outcomes("n", a=(2.0,))
    for each, tokens in zip(rows, (100, 101, None, 5, None), strict=True):
        each["completion_tokens"] = tokens
    cut = within_tokens(frame(*rows), 100)
    assert cut["status"].to_list() == ["correct", "no_code", "incorrect", "correct"]
    assert cut["reason"][1] == "truncated" and cut["timing"].is_null()[1]
    assert scored_row(scores(cut), "exec", model="m")["value"] == pytest.approx(1 / 3)
    assert unknown_lengths(cut) == {"n": 1}


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


def test_answers_of_unknown_length_have_no_score_at_a_limit(tmp_path):
    rows = [row | {"completion_tokens": None} for row in verdicts(1, 20, 2)]
    line = line_of(tmp_path, rows)
    judged, candidates = line.verdicts, line.candidates
    answers = [Answers(model="base", candidates=candidates, verdicts=judged)]
    ref = run(answers, BenchmarkConfig(samples_per_task=2, token_limits=(50,)))
    rows = scores_of(ref, limit=50)
    assert rows.height and rows["value"].null_count() == rows.height
    assert rows["why_not"].str.contains("right answers have no token count").all()


def test_the_papers_profile_scores_at_the_models_own_limit_and_at_half_of_it():
    paper = load_profile("paper")
    assert paper.benchmark.sampling.max_tokens == 32768
    assert paper.benchmark.token_limits == (16384,)
    assert paper.curation.criterion_sizes == (3934, 414, 544)
