"""A compiler's log names lines of the candidate's module, not of the file that was made of it."""

import pytest

from kernels_eval.compile.extensions import generated_lines
from kernels_eval.config import EvalConfig
from kernels_eval.judge.prepare import BoundedBuilds, confined_builder
from kernels_eval.records import Candidate, Language
from kernels_eval.source.own_lines import in_own_lines
from kernels_eval.source.spec import ExtensionSpec

CPP = "\nint one() {\n    return 1\n}\n"
CUDA = "\n__global__ void two() {\n    int x = 2\n}\n"
CODE = f'import torch\n\nCPP = r"""{CPP}"""\nCUDA = r"""{CUDA}"""\n'
"""`return 1` is on line 5, `int x = 2` on line 10."""


def spec(**sources):
    return ExtensionSpec(kind="inline", name="k", functions=("one",), **sources)


@pytest.mark.parametrize(
    "said, told",
    [
        ("main.cpp:4:13: error: no ;", "candidate.py:5:13: error: no ;"),
        ("cuda.cu(6): error: no ;", "candidate.py(10): error: no ;"),
        (
            "main.cpp:4:13: error: x\n    4 |     return 1",
            "candidate.py:5:13: error: x\n    5 |     return 1",
        ),
        ("main.cpp:40:1: error: x\n   40 | }", "main.cpp:40:1: error: x\n   40 | }"),
        ("a.h:4:1: error: x\n    4 | }", "a.h:4:1: error: x\n    4 | }"),
        ("torch/main.cpp:4:1: note: x", "torch/main.cpp:4:1: note: x"),
    ],
)
def test_places_and_quoted_lines_are_the_modules_own(said, told):
    files = generated_lines(spec(cpp_sources=(CPP,), cuda_sources=(CUDA,)), CODE)
    assert in_own_lines(said, files) == told


def test_a_text_that_the_module_does_not_hold_once_keeps_the_lines_of_the_file():
    made = spec(cpp_sources=("int a;\n", CPP))
    assert in_own_lines("main.cpp:6: error", generated_lines(made, CODE)) == "candidate.py:5: error"
    for code in ("", CODE + CODE):
        assert in_own_lines("main.cpp:6: error", generated_lines(made, code)) == "main.cpp:6: error"


def test_a_failed_build_is_told_in_the_modules_lines():
    candidate = Candidate(
        candidate_id="c", task_id="t", language=Language("cpp"), generator="g", code=CODE
    )
    builds = BoundedBuilds(confined_builder(EvalConfig()), candidate, [])
    build = builds.build(spec(cpp_sources=(CPP,)).model_dump(mode="json"))
    assert not build.ok and build.log.startswith("candidate.py:5:13: error: expected ';'")
