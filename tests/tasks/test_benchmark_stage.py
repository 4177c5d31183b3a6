"""The benchmark's configuration: which code decides its scores, and which k it asks for."""

import ast
from pathlib import Path

import pytest
from pydantic import ValidationError

import tasks
from flows.config import load_profile
from kernels_eval.source.syntax import parse_source
from tasks.benchmark.config import BenchmarkConfig
from tasks.benchmark.stage import Answers, run, scores_of
from tasks.store import snapshots
from tasks.versions import LOGIC
from tests.support.recomputed import verdicts
from tests.support.samples import line_of

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
        own = {module for module in read if module.startswith("tasks.benchmark")}
        assert own <= {*code, *bare}, name


@pytest.mark.parametrize(
    "samples, ks",
    [(1, (1,)), (2, (1,)), (5, (1, 5)), (9, (1, 5)), (10, (1, 5, 10)), (100, (1, 5, 10))],
)
def test_only_what_the_samples_can_estimate_is_asked_for(samples, ks):
    assert BenchmarkConfig(samples_per_task=samples).ks == ks


def test_a_k_that_is_asked_for_stays_though_it_has_no_estimate():
    assert BenchmarkConfig(samples_per_task=2, ks=(1, 10)).ks == (1, 10)
    again = BenchmarkConfig.model_validate(
        BenchmarkConfig(samples_per_task=2).model_dump(mode="json")
    )
    assert again == BenchmarkConfig(samples_per_task=2)


def test_a_fault_in_the_samples_is_the_one_that_is_told():
    with pytest.raises(ValidationError) as caught:
        BenchmarkConfig(samples_per_task=0)
    assert [error["loc"] for error in caught.value.errors()] == [("samples_per_task",)]


def test_a_limit_of_tokens_is_scored_beside_the_answers_as_they_are(recomputed):
    (made,) = snapshots(str(recomputed), "benchmark")
    rows = scores_of(made.ref) + scores_of(made.ref, limits=(900,))
    found = {
        (row.model, row.token_limit): row for row in rows if (row.metric, row.k) == ("exec", 1)
    }
    assert set(found) == {("base", None), ("base", 900), ("tuned", None), ("tuned", 900)}
    whole, cut = (found["base", limit] for limit in (None, 900))
    assert 0 < (cut.value or 0) < (whole.value or 0)
    assert cut.tasks == whole.tasks == 80 - len(made.manifest["excluded_tasks"])
    assert set(made.manifest["remarks"]) == {"excluded", "task_errors"}


def test_answers_of_unknown_length_have_no_score_at_a_limit(tmp_path):
    rows = [row | {"completion_tokens": None} for row in verdicts(1, 20, 2)]
    line = line_of(tmp_path, rows)
    judged, candidates = line.verdicts, line.candidates
    answers = [Answers(model="base", candidates=candidates, verdicts=judged)]
    ref = run(answers, BenchmarkConfig(ks=(1,), token_limits=(50,), resamples=100))
    for row in scores_of(ref, limits=(50,)):
        assert row.value is None and "right answers have no token count" in row.why_not


def test_the_papers_profile_scores_at_the_models_own_limit_and_at_half_of_it():
    paper = load_profile("paper")
    assert paper.benchmark.sampling.max_tokens == 32768
    assert paper.benchmark.token_limits == (16384,)
    assert paper.curation.criterion_sizes == (3934, 414, 544)
