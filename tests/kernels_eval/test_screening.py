"""Screening rejects what is certain from the syntax tree, names the line, and takes neither words
nor honest habits for evidence."""

import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kernels_eval.source.screening import screen

SOURCES = yaml.safe_load((Path(__file__).parents[1] / "data/screening.yaml").read_text())["python"]


def pairs(said):
    """Each source with the reason or the flag that it gets."""
    return [(code, name) for name, sources in SOURCES[said].items() for code in sources]


def test_honest_code_passes_without_a_flag():
    screened = screen(SOURCES["honest"])
    assert screened.reason is None, screened.detail
    assert screened.flags == ()


@pytest.mark.parametrize("code, reason", pairs("rejected"))
def test_what_no_honest_kernel_needs_is_rejected(code, reason):
    screened = screen(code)
    assert screened.reason == reason
    assert screened.detail.startswith("line ")


@pytest.mark.parametrize("code", SOURCES["passing"])
def test_what_an_import_does_not_run_and_settings_of_torch_pass(code):
    screened = screen(code + "\nclass ModelNew: pass\n")
    assert screened.reason is None, screened.detail
    assert screened.flags == ()


def test_a_rejection_names_its_line():
    assert screen("import torch\n\n\nimport subprocess\n").detail == "line 4: imports subprocess"


def test_the_first_finding_is_the_one_reported():
    screened = screen("import torch\ntorch.allclose = None\nimport subprocess\n")
    assert (screened.reason, screened.detail) == (
        "harness_tampering",
        "line 2: assigns to torch.allclose",
    )


@pytest.mark.parametrize("code", SOURCES["suspicious"])
def test_what_is_only_suspicious_passes(code):
    assert screen(code).reason is None


@pytest.mark.parametrize(
    "code", ["def f(:\n    pass", "class A\n", "x = 1\n  y = 2", "return\x00", "(" * 10_000]
)
def test_what_python_cannot_read_is_a_syntax_error(code):
    assert screen(code).reason == "syntax_error"


def test_a_syntax_error_names_its_line():
    assert screen(textwrap.dedent("x = 1\ny = (\nz = 3\n")).detail.startswith("line 2")


@given(st.text(max_size=200))
def test_any_text_gets_an_answer(text):
    assert screen(text).reason in (None, "syntax_error", "forbidden_call", "harness_tampering")


@given(st.text(alphabet=st.characters(exclude_characters='"\\\x00\r', codec="utf-8"), max_size=100))
def test_a_string_is_never_evidence(words):
    code = (
        f'X = """{words} import subprocess; torch.allclose = 1; os.system("x"); """\nclass'
        " ModelNew: pass\n"
    )
    assert screen(code).reason is None
