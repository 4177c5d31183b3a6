"""The benchmark's snapshot: which code decides its identity, and which k it asks for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from pydantic import ValidationError

import tasks
from tasks.benchmark.config import BenchmarkConfig
from tasks.benchmark.stage import CODE, Answers, planned
from tasks.store import snapshot as store
from tasks.store.snapshot import SnapshotRef

ROOT = Path(tasks.__file__).parent.parent


def ref(stage: str) -> SnapshotRef:
    return SnapshotRef(root="memory://scores", stage=stage, fingerprint="f")


ANSWERS = [Answers(model="m", candidates=ref("synthesis"), verdicts=ref("verification"))]


def edited(monkeypatch: pytest.MonkeyPatch, file: str) -> str:
    """The fingerprint as it would be with the logic of one file changed."""
    digest = store._logic_digest
    with monkeypatch.context() as patch:
        patch.setattr(
            store,
            "_logic_digest",
            lambda path: digest(path) + ("edited" if path == ROOT / file else ""),
        )
        return planned(ANSWERS, BenchmarkConfig()).fingerprint


@pytest.mark.parametrize(
    "file",
    [
        "tasks/benchmark/report/sections.py",
        "tasks/reporting/page.py",
        "tasks/benchmark/diagnosis.py",
    ],
)
def test_a_reworded_report_scores_nothing_anew(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    assert (ROOT / file).exists()
    assert edited(monkeypatch, file) == planned(ANSWERS, BenchmarkConfig()).fingerprint


@pytest.mark.parametrize("file", [f"{name.replace('.', '/')}.py" for name in CODE])
def test_other_scoring_gives_other_scores(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    assert edited(monkeypatch, file) != planned(ANSWERS, BenchmarkConfig()).fingerprint


def test_no_module_that_scoring_reads_is_missing() -> None:
    """What is imported from the benchmark, by any of them, is one of them. Records and errors hold
    no formula."""
    bare = {"tasks.benchmark.config"}  # its values are in the fingerprint already
    for name in CODE:
        tree = ast.parse((ROOT / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"))
        read = {
            node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
        }
        own = {
            module
            for module in read
            if module.startswith("tasks.benchmark") or module == "tasks.benchmark.metrics"
        }
        assert own <= {*CODE, *bare}, name


@pytest.mark.parametrize(
    ("samples", "ks"),
    [(1, (1,)), (2, (1,)), (5, (1, 5)), (9, (1, 5)), (10, (1, 5, 10)), (100, (1, 5, 10))],
)
def test_only_what_the_samples_can_estimate_is_asked_for(samples: int, ks: tuple[int, ...]) -> None:
    assert BenchmarkConfig(samples_per_task=samples).ks == ks


def test_a_k_that_is_asked_for_stays_though_it_has_no_estimate() -> None:
    assert BenchmarkConfig(samples_per_task=2, ks=(1, 10)).ks == (1, 10)
    again = BenchmarkConfig.model_validate(
        BenchmarkConfig(samples_per_task=2).model_dump(mode="json")
    )
    assert again == BenchmarkConfig(samples_per_task=2)


def test_a_fault_in_the_samples_is_the_one_that_is_told() -> None:
    with pytest.raises(ValidationError) as caught:
        BenchmarkConfig(samples_per_task=0)
    assert [error["loc"] for error in caught.value.errors()] == [("samples_per_task",)]
