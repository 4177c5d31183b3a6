"""Flags: each has a clause for its reader, in the verdict's text."""

from pathlib import Path

import pytest

import kernels_eval
from flows.cli.verdict import render
from kernels_eval.flags import FLAGS, meaning_of
from kernels_eval.records import Verdict

PACKAGE = Path(kernels_eval.__file__).parent


@pytest.mark.parametrize("name, clause", FLAGS.items())
def test_a_clause_is_one_and_fits_a_line(name, clause):
    assert clause[0].islower() or clause.startswith(("NaN", "GPU"))
    assert not clause.endswith(".") and ". " not in clause
    assert len(f"  flag {name}: {clause}") <= 120


@pytest.mark.parametrize("name", FLAGS)
def test_each_flag_is_one_that_the_verifier_gives(name):
    """By its name in the code beside the table."""
    sources = [path for path in PACKAGE.rglob("*.py") if path.name != "flags.py"]
    assert any(name in path.read_text(encoding="utf-8") for path in sources)


def test_a_verdict_says_what_its_flags_mean():
    told = {"candidate_id": "c", "task_id": "t", "language": "cpp", "status": "correct"}
    verdict = Verdict(**told, reason="ok", flags=("clock_drift", "native:threads"))
    lines = render(verdict).splitlines()
    assert f"  flag clock_drift: {FLAGS['clock_drift']}" in lines
    assert f"  flag native:threads: {FLAGS['native']}" in lines


def test_a_flag_of_an_earlier_protocol_means_nothing():
    assert meaning_of("try") == ""
