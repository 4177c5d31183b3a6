"""The benchmark's configuration: which code decides its scores, and which k it asks for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from pydantic import ValidationError

import tasks
from tasks.benchmark.config import BenchmarkConfig
from tasks.versions import LOGIC

ROOT = Path(tasks.__file__).parent.parent


def test_no_module_that_scoring_reads_is_missing():
    """Every import from the benchmark in a module of SCORING_VERSION is one of them."""
    code = LOGIC["SCORING_VERSION"]
    bare = {"tasks.benchmark.config"}  # its values are in the fingerprint already
    for name in code:
        tree = ast.parse((ROOT / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"))
        read = {
            node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
        }
        own = {module for module in read if module.startswith("tasks.benchmark")}
        assert own <= {*code, *bare}, name


@pytest.mark.parametrize(
    ("samples", "ks"),
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
