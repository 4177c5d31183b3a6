"""What tokens of native sources are certain enough to reject, and what is not."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kernels_eval.candidate.candidate import CandidateRole
from kernels_eval.candidate.kernel_tracer import KernelTracer
from kernels_eval.candidate.state import snapshot
from kernels_eval.protocol import ReadState
from kernels_eval.source.screening import screen_native

SOURCES = yaml.safe_load((Path(__file__).parents[1] / "data/screening.yaml").read_text())["native"]


@pytest.mark.parametrize(
    "name, source",
    [(name, source) for name, sources in SOURCES["forbidden"].items() for source in sources],
)
def test_what_no_kernel_needs_is_rejected_with_its_line(name, source):
    found = screen_native(source)
    assert found.reason == "forbidden_call"
    line = next(
        number
        for number, text in enumerate(source.splitlines(), 1)
        if name in text and "#include" not in text
    )
    assert found.detail == f"native source, line {line}: calls {name}"


@pytest.mark.parametrize(
    "source, detail",
    [
        ('int f() { return PyRun_SimpleString("x = 1"); }', "line 1: names PyRun_SimpleString"),
        ("\nauto run = &PyRun_StringFlags;", "line 2: names PyRun_StringFlags"),
        ('void f() { py::exec("x = 1"); }', "line 1: names py::exec"),
        ('void f() { pybind11 :: eval("1"); }', "line 1: names pybind11 :: eval"),
        ('auto m = PyImport_ImportModule("gc");', "line 1: names PyImport_ImportModule"),
        ("long f() { return getauxval(3); }", "line 1: names getauxval"),
        ("extern struct r_debug _r_debug;", "line 1: names _r_debug"),
        ("#include <link.h>", "includes link.h"),
        ("void* f(const char* n) { return (&dlsym)(nullptr, n); }", "line 1: names dlsym"),
        ('auto b = py::module_::import("builtins");', 'names module_::import("builtins'),
        ('auto b = PyDict_GetItemString(all, "builtins");', 'names "builtins"'),
        ("auto b = PyEval_GetBuiltins();", "line 1: names PyEval_GetBuiltins"),
    ],
)
def test_python_in_a_native_source_and_tables_of_the_loader_are_needed_by_no_kernel(source, detail):
    found = screen_native(source)
    assert found.reason == "forbidden_call" and found.detail.endswith(detail)
    assert screen_native(f"/* {source} */").reason is None


@pytest.mark.parametrize(
    "name",
    [
        "TORCH_LIBRARY_IMPL(aten, CPU, m)",
        "TORCH_LIBRARY_FRAGMENT( aten, m)",
        "#define OWN aten\nTORCH_LIBRARY_IMPL(OWN, CPU, m)",
        "# define OWN \\\n  prims\nTORCH_LIBRARY(OWN, m)",
    ],
)
def test_operators_are_not_registered_among_those_of_torch(name):
    found = screen_native(f"{name} {{}}")
    assert found.reason == "harness_tampering" and found.detail.startswith("native source, line 1")
    assert screen_native(f"// {name}\nTORCH_LIBRARY(aten_like, m) {{}}").reason is None


def test_an_operator_that_was_registered_among_those_of_torch_behind_a_macro_is_seen():
    role = CandidateRole(None)
    role.tracer = KernelTracer(False)
    role.state = snapshot("cpu")
    role.tracer.own_operators = {"own.product"}
    assert role.read_state(ReadState()).changed == {}
    role.tracer.own_operators.add("aten.product")
    assert role.read_state(ReadState()).changed == {"operators": "aten.product"}


@pytest.mark.parametrize("source", SOURCES["honest"])
def test_words_comments_strings_and_own_functions_are_no_evidence(source):
    assert screen_native(source).reason is None


def test_threads_and_streams_are_flags():
    found = screen_native(
        "void f() { cublasSgemm(h, a); std::thread t(g); t.join(); cudaStreamCreate(&s); }"
    )
    assert found.reason is None
    assert found.flags == ("native:own_stream", "native:threads")


@given(st.text(max_size=400))
def test_any_text_is_screened_without_an_error(text):
    assert screen_native(text).reason in (None, "forbidden_call")
