"""What a library asks others to compute, read from its symbols."""

import subprocess
import sys

import pytest

from kernels_eval.compile import linked
from kernels_eval.compile.linked import (
    Unreadable,
    _demangled,
    _undefined,
    forbidden_link,
    library_work,
    reaches_elements,
)
from kernels_eval.config import MOST_SYMBOL_LETTERS
from kernels_eval.toolchain import NEW_SUBMODULES, Toolchain
from tests.support.cases import cases

CASES = cases("linked")

SOURCE = """
extern "C" {{ void sgemm_(); void cublasSgemm_v2(); void vsExp();
  void SGEMM(); void scipy_cblas_sgemm64_(); void VSEXP_();
  void aoti_torch_cpu_mm_out(); void aoti_torch_cpu_zeros();
  void own_sgemm(const char* = nullptr) {{}}
  void* dlsym(void*, const char*); }}
namespace fbgemm {{ void cblas_gemm_compute(); }}
namespace torch::jit::tensorexpr {{ void nnc_aten_mm(int); }}
namespace c10 {{ struct Dispatcher {{ static void findSchemaOrThrow(const char*); }}; }}
namespace at {{
void enableRecordFunction(bool);
bool hasGlobalCallbacks();
struct ThreadLocalState {{ static void setThreadLocalState(const ThreadLocalState&); }};
void clearCallbacks();
namespace cpu {{ void mm(); void empty(); }}
namespace native {{ void softmax(int); void getThing();
struct structured_mm_out_cpu {{ static void impl(); }};
struct DispatchStubImpl {{ static void choose(); }};
namespace cpublas {{ void brgemm(int); }} }}
namespace cuda {{ void getCurrentCUDAStream(); namespace blas {{ void gemm(float); }}
namespace detail {{ void generator(); }} }}
namespace _ops {{
struct mm {{ static void call(int); static void redispatch(int, int); }};
struct empty_like {{ static void redispatch(int); }};
}} }}
namespace at {{ struct TensorBase {{ template <class T> T* data_ptr() const; }}; }}
namespace c10::impl::cow {{ void materialize_cow_storage(); }}
void own() {{ {calls} }}
"""


def built(tmp_path, calls):
    source, library = tmp_path / "library.cpp", tmp_path / "library.so"
    source.write_text(SOURCE.format(calls=calls))
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


def assembled(folder, text, name="assembled"):
    source, library = folder / f"{name}.s", folder / f"{name}.so"
    source.write_text(f".data\n{text}\n")
    subprocess.run(["g++", "-shared", "-o", library, source], check=True)
    return str(library)


@pytest.mark.parametrize(
    "calls, work",
    CASES["library_work_is_named_and_own_work_is_not"],
)
def test_library_work_is_named_and_own_work_is_not(tmp_path, calls, work):
    assert library_work([built(tmp_path, calls)])[0] == work


def test_unrecorded_calls_are_flagged(tmp_path):
    flags = library_work([built(tmp_path, "at::enableRecordFunction(false);")])[1]
    assert flags == {"links:at::enableRecordFunction"}
    flags = library_work([built(tmp_path, 'c10::Dispatcher::findSchemaOrThrow("");')])[1]
    assert flags == {"links:c10::Dispatcher::findSchemaOrThrow"}
    assert library_work([built(tmp_path, "own_sgemm();")])[1] == set()


PASTED = "#define J(a, b) a##b\n"


@pytest.mark.parametrize(
    "calls, name",
    [
        ('void quiet() __asm__("PyRun_SimpleStringFlags"); quiet();', "PyRun_SimpleStringFlags"),
        (f'\n{PASTED} J(dl, sym)(nullptr, "cublasSgemm_v2");', "dlsym"),
        (
            'void* named(const char*) __asm__("PyImport_ImportModule"); named("sys");',
            "PyImport_ImportModule",
        ),
        ("own_sgemm();", ""),
    ],
)
def test_what_no_kernel_needs_is_found_under_any_name(tmp_path, calls, name):
    assert forbidden_link(built(tmp_path, calls)) == name
    assert forbidden_link(str(tmp_path / "absent.so")) == ""


SUBMODULES = """#include <pybind11/pybind11.h>
#define JOINED(a, b) a##b
PYBIND11_MODULE(nested, m) {
  m.def_submodule("inner").def("twice", [](int x) { return 2 * x; });
  m.def("module", [](const char* name) {
    return pybind11::reinterpret_borrow<pybind11::object>(JOINED(PyImp, ort_AddModule)(name));
  });
}
"""
NESTED = """import sys, nested
assert nested.inner.twice(3) == 6
assert nested.module("sys") is not sys
"""


@pytest.mark.slow
def test_a_submodule_is_new_and_its_function_reaches_no_loaded_module(tmp_path):
    source, library = tmp_path / "nested.cpp", tmp_path / "nested.so"
    source.write_text(SUBMODULES)
    tools = Toolchain(tmp_path)
    flags = ["-std=c++20", "-w", "-fPIC", "-shared", NEW_SUBMODULES, *tools.includes]
    subprocess.run([tools.cxx, *flags, "-o", library, source], check=True)
    assert forbidden_link(str(library)) == ""
    subprocess.run([sys.executable, "-c", NESTED], check=True, cwd=tmp_path)


@pytest.mark.parametrize("name", ["dlvsym", "dlinfo", "dl_iterate_phdr", "_r_debug"])
def test_tables_of_loaded_libraries_are_found(tmp_path, name):
    assert forbidden_link(assembled(tmp_path, f".quad {name}")) == name


def test_symbols_of_any_length_and_number_are_bounded(tmp_path, monkeypatch):
    (name,) = library_work([assembled(tmp_path, f".quad mkl_{'a' * 100_000}")])[0]
    assert len(name) == MOST_SYMBOL_LETTERS
    library = assembled(tmp_path, ".quad mkl_a, mkl_b, mkl_c")
    assert library_work([library])[0] == {"mkl_a", "mkl_b", "mkl_c"}
    monkeypatch.setattr(linked, "MOST_SYMBOLS", 2)
    assert library_work([library]) == (set(), {"symbols_unreadable"})


@pytest.mark.parametrize("length", [0, 7, 64, 200, 4000])
def test_a_file_that_is_cut_off_is_unreadable(tmp_path, length):
    library = tmp_path / "cut.so"
    with open(built(tmp_path, ""), "rb") as whole:
        library.write_bytes(whole.read(length))
    with pytest.raises(Unreadable):
        _undefined(library.read_bytes())
    assert library_work([str(library)]) == (set(), {"symbols_unreadable"})
    assert library_work([str(tmp_path / "none.so")])[1] == {"symbols_unreadable"}


def test_names_are_read_without_their_arguments():
    assert _demangled("_ZN2at4_ops2mm4callERKNS_6TensorES4_") == "at::_ops::mm::call"
    assert _demangled("_ZNK2at6native3sumEv") == "at::native::sum"
    assert _demangled("_ZNR5torch7Library9_fallbackEONS_E") == "torch::Library::_fallback"
    argument = "44softmax_lastdim_kernel_DECLARE_DISPATCH_type"
    table = f"_ZN2at6native12DispatchStubIPFvRKNS_6TensorES4_ENS0_{argument}EE4AVX2E"
    assert _demangled(table) == "at::native::softmax_lastdim_kernel"
    assert _demangled("sgemm_") == "sgemm_"
    assert _demangled("_ZN9999") == ""


@pytest.mark.parametrize(
    "calls, reaches",
    [
        ("at::_ops::mm::call(1);", False),
        ("at::TensorBase().data_ptr<float>();", True),
        ("c10::impl::cow::materialize_cow_storage();", True),
    ],
)
def test_whether_a_library_comes_to_the_elements_of_a_tensor(tmp_path, calls, reaches):
    assert reaches_elements(built(tmp_path, calls)) is reaches


def test_a_library_that_cannot_be_read_may_come_to_elements(tmp_path):
    assert reaches_elements(str(tmp_path / "none.so"))
