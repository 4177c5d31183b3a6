"""What tokens of native sources are certain enough to reject, and what is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_eval.checks.native_screening import screen_native

CERTAIN = {
    'int f() { system("true"); return 0; }': "system",
    'int f() { return system("true"); }': "system",
    "void f() { ::fork(); }": "fork",
    'void f() { std::system("true"); }': "system",
    "void f() {\n\n  if (true) _exit(0);\n}": "_exit",
    "long f() { long p = ptrace(0, 1, 0, 0); return p; }": "ptrace",
    "void f() { auto r = kill(getppid(), 9); }": "kill",
    "#include <sys/socket.h>\nint f() { int s = socket(2, 1, 0); return s; }": "socket",
    'void* f() { return dlopen("libc.so.6", 1); }': "dlopen",
}


@pytest.mark.parametrize("source", CERTAIN)
def test_what_no_kernel_needs_is_rejected_with_its_line(source):
    found = screen_native(source)
    name = CERTAIN[source]
    assert found.reason == "forbidden_call"
    line = next(
        number
        for number, text in enumerate(source.splitlines(), 1)
        if name in text and "#include" not in text
    )
    assert found.detail == f"native source, line {line}: calls {name}"


HONEST = [
    '// system("x") in a comment\nint f();',
    "/* fork(); */ int f();",
    'const char* text = "system(1); fork();";',
    'const char* raw = R"(ptrace(1))";',
    "void kill(int a) {}\nvoid f() { kill(3); }",
    "struct Q { void fork(); };\nvoid f(Q& q) { q.fork(); }",
    "void f(Q* q) { q->system(1); }",
    "void f() { mine::kill(2); }",
    "int system(int);",
    (
        "torch::Tensor send(torch::Tensor x) { return x; }\ntorch::Tensor f(torch::Tensor x) {"
        " return send(x); }"
    ),
    # no socket header: words like any other
    "void bind(int a) {}\nint f() { bind(3); connect(1); return 0; }",
    "__global__ void listen_kernel(float* x) { x[0] = 1.0f; }",
]


@pytest.mark.parametrize("source", HONEST)
def test_words_comments_strings_and_own_functions_are_no_evidence(source):
    assert screen_native(source).reason is None


def test_libraries_and_threads_are_flags():
    found = screen_native(
        "void f() { cublasSgemm(h, a); std::thread t(g); t.join(); cudaStreamCreate(&s); }"
    )
    assert found.reason is None
    assert found.flags == ("library:cublasSgemm", "native:own_stream", "native:threads")


@given(st.text(max_size=400))
def test_any_text_is_screened_without_an_error(text):
    assert screen_native(text).reason in (None, "forbidden_call")
