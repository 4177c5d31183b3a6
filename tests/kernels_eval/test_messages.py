"""What a candidate's process sends: whole messages however they arrive, and records with bounds."""

import ast
import gc
import socket
import struct
import threading
import time

import pytest

from kernels_eval.compile.extensions import _refusal
from kernels_eval.compile.process import READ_BYTES, log_of
from kernels_eval.config import (
    BUILDS_DEADLINE_SHARE,
    MOST_BUILDS,
    MOST_SOURCE_LETTERS,
    EvalConfig,
)
from kernels_eval.judge.messages import Stop, parse_report
from kernels_eval.judge.prepare import BoundedBuilds
from kernels_eval.protocol import (
    CaptureReport,
    ErrorReport,
    LoadReport,
    SampleReport,
    ShareReport,
    StateReport,
)
from kernels_eval.records import Candidate, Language, Reason
from kernels_eval.sandbox.channel import Channel, ChannelClosed, ChannelTimeout
from kernels_eval.source.screening import screen, screen_native
from kernels_eval.source.spec import Build, ExtensionSpec
from kernels_eval.source.syntax import parse_source


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with theirs:
        channel = Channel(ours)
        yield channel, theirs
        channel.close()


@pytest.mark.parametrize("cut", range(1, 14))
def test_a_message_that_stops_on_the_way_is_read_on(ends, cut):
    channel, theirs = ends
    data = struct.pack("!I", 10) + b'{"ns": 12}' + struct.pack("!I", 2) + b"{}"
    theirs.sendall(data[:cut])
    with pytest.raises(ChannelTimeout):
        channel.receive(0.01)
    assert channel.pending()
    theirs.sendall(data[cut:])
    assert channel.receive(10) == {"ns": 12}
    assert channel.receive(10) == {}
    assert not channel.pending()


def test_one_byte_after_the_other_arrives_within_the_deadline(ends):
    channel, theirs = ends

    def drip():
        for byte in struct.pack("!I", 2) + b"{}":
            theirs.sendall(bytes([byte]))
            time.sleep(0.001)

    thread = threading.Thread(target=drip)
    thread.start()
    assert channel.receive(60) == {}
    thread.join()


@pytest.mark.parametrize(
    "payload",
    [b"", b"[" * 100_000, b'{"ns": ' + b"9" * 5000 + b"}", b"\xff\xfe", b"\0" * 9],
    ids=["empty", "deep", "digits", "utf16", "zeros"],
)
def test_what_is_no_json_ends_the_channel(ends, payload):
    channel, theirs = ends
    theirs.sendall(struct.pack("!I", len(payload)) + payload)
    with pytest.raises(ChannelClosed):
        channel.receive(10)


def test_a_length_above_the_limit_ends_the_channel(ends):
    channel, theirs = ends
    theirs.sendall(struct.pack("!I", 1 << 31))
    with pytest.raises(ChannelClosed, match="above the limit"):
        channel.receive(10)


def nested(depth):
    made = []
    for _ in range(depth):
        made = [made]
    return made


@pytest.mark.parametrize(
    "model, answer",
    [
        (SampleReport, {"ns": -1}),
        (SampleReport, {"ns": 10**400}),
        (SampleReport, {"ns": 1.5}),
        (SampleReport, {"ns": True}),
        (SampleReport, {"ns": [[1]]}),
        (SampleReport, {}),
        (SampleReport, [1]),
        (ShareReport, {"share": float("nan")}),
        (ShareReport, {"share": float("inf")}),
        (ShareReport, {"share": 10**400}),
        (LoadReport, {"parameters": [[-1]]}),
        (LoadReport, {"parameters": nested(800)}),
        (LoadReport, {"parameters": ["x"] * 1_000_000}),
        (LoadReport, {"parameters": [[1] * 65]}),
        (StateReport, {"changed": {"x": 1}}),
        (ErrorReport, {"error": {}}),
        (ErrorReport, {"error": "x", "detail": nested(800)}),
        (CaptureReport, {"specs": "x"}),
        (ExtensionSpec, {"name": []}),
        (ExtensionSpec, {"name": "x", "surprise": 1}),
        (ExtensionSpec, nested(800)),
    ],
)
def test_an_answer_of_another_form_is_the_candidates_verdict(model, answer):
    with pytest.raises(Stop) as stop:
        parse_report(model, answer)
    assert stop.value.finding.reason is Reason.EXITED_EARLY
    assert len(stop.value.finding.detail) < 400


def test_honest_answers_pass():
    assert parse_report(SampleReport, {"ns": 0, "later": 1}).ns == 0
    assert parse_report(ShareReport, {"share": 1}).share == 1.0
    assert parse_report(LoadReport, {"parameters": [[]]}).parameters == [[]]
    assert parse_report(ErrorReport, {"error": "x", "detail": "\ud800"}).detail == "?"


# -- sources, flags and names ----------------------------------------------------------------------

REPEATED = (
    *("/* ", 'R"(', 'R"x(', '\\"', '"', "'", "\n", "  ", "#", "#include <", "a ", "std ", "::"),
    *("kill(", "a kill(", "name, ", "(", ")", "cublasA ", "int kill(a", "std::a", "__A"),
)


@pytest.mark.parametrize("unit", REPEATED)
def test_native_sources_are_read_in_linear_time(unit):
    """A pattern that looks for the end of something again and again takes hours for this."""
    found = screen_native(unit * (50_000 // len(unit)) + "\n; system(x);")
    assert found.reason in (None, Reason.FORBIDDEN_CALL)


def test_six_thousand_names_hide_no_call():
    names = ",\n".join(f"name_{i}" for i in range(6000))
    source = f"enum all {{ {names} }};\nvoid f() {{ system(0); }}"
    found = screen_native(source)
    assert found.reason is Reason.FORBIDDEN_CALL and "calls system" in found.detail
    assert screen_native(source.replace("system", "own")).reason is None


@pytest.mark.parametrize(
    "code",
    [
        "x = " + "+".join(["1"] * 2500),
        "if x: pass\n" + "elif x: pass\n" * 500,
        "x = a" + ".b" * 2500,
        "x = " + "not " * 2500 + "a",
    ],
    ids=["sum", "elif", "attributes", "not"],
)
def test_a_deep_source_that_python_compiles_is_screened(code):
    compile(code, "candidate.py", "exec")
    assert screen(code).reason is None
    found = screen(code + "\nimport subprocess")
    assert found.reason is Reason.FORBIDDEN_CALL and "imports subprocess" in found.detail


def test_how_deep_the_caller_is_does_not_matter():
    code = "x = " + "+".join(["1"] * 2900)

    def call(depth):
        return call(depth - 1) if depth else parse_source(code)

    assert call(400)


def test_a_callback_of_the_collector_that_parses_does_not_upset_the_parser():
    code = f"x = [{','.join(f'[{i}, (a{i} + b) * c]' for i in range(3000))}]"

    def parses(phase, _):
        if phase == "start":
            ast.parse("y = (1 + 2) * 3")

    threshold = gc.get_threshold()
    gc.callbacks.append(parses)
    gc.set_threshold(50)
    try:
        assert isinstance(parse_source(code), ast.Module)
        assert gc.isenabled()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(parses)


@pytest.mark.parametrize(
    "code, said",
    [
        ("x = " + "+".join(["1"] * 9000), "recursion"),
        ("x = 1\0", "null"),
        ("x = '\ud800'", "surrogates"),
        ("x" * (MOST_SOURCE_LETTERS + 1), "limit"),
        ("(" * 300, ""),
    ],
)
def test_what_is_no_source_is_a_syntax_error_with_its_reason(code, said):
    found = screen(code)
    assert found.reason is Reason.SYNTAX_ERROR and said in found.detail and found.detail


@pytest.mark.parametrize(
    "given, said",
    [
        ({"name": "a" * 300}, "not an identifier"),
        ({"name": "ü" * 150}, "not an identifier"),
        ({"name": ".."}, "not an identifier"),
        ({"extra_cflags": ("-DX=" + "a" * 300_000,)}, "the limit is"),
        ({"extra_cuda_cflags": ("-w",) * 10_000}, "the limit is"),
        ({"files": (("..", ""),)}, "source file"),
        ({"files": (("a/b.cpp", ""),)}, "source file"),
        ({"files": (("script.o", "INPUT(/etc/passwd)"),)}, "source file"),
        ({"files": (("a\0.cpp", ""),)}, "source file"),
        ({"files": (("a" * 300 + ".cpp", ""),)}, "source file"),
        ({"functions": ("f); system(0",)}, "function"),
    ],
)
def test_what_no_compiler_can_be_asked_says_why(given, said):
    assert said in ExtensionSpec(**{"name": "x"} | given).unusable_reason


@pytest.mark.parametrize(
    "flags", [("", "-fplugin=x", "'"), ("-Xcompiler", "-fplugin=x"), ("-DX=\0",), ("-DX=\ud800",)]
)
def test_flags_that_load_or_break_things_are_refused(flags):
    spec = ExtensionSpec(name="x", extra_cflags=flags)
    found = _refusal(spec)
    assert found is not None and found.log.startswith("compiler flag not allowed")


def test_usual_requests_are_usable():
    spec = ExtensionSpec(
        name="größe_2",
        functions=("f", "ns::g", "h<float, 4>"),
        files=(("my kernel.cu", ""), ("a-b.cpp", "")),
        extra_cuda_cflags=("-gencode=arch=compute_90,code=sm_90",) * 20,
    )
    assert spec.unusable_reason == ""


class Slow:
    """A builder that says how long it took."""

    config = EvalConfig().build
    tools = None

    def __init__(self, **took):
        self.took = took

    def build(self, spec):
        return Build(ok=True, key=spec.key, **self.took)


def builds(**took):
    made = Candidate(candidate_id="c", task_id="t", language=Language.CUDA, generator="g", code="x")
    return BoundedBuilds(Slow(**took), made, [])


def test_builds_are_bounded_in_number_and_in_time():
    bounded = builds()
    for _ in range(MOST_BUILDS):
        assert bounded.build({"name": "x"}).ok
    with pytest.raises(Stop) as stop:
        bounded.build({"name": "x"})
    assert stop.value.finding.reason is Reason.BUILD
    long_s = EvalConfig().build.timeout_s
    late = builds(processor_s=long_s)
    for _ in range(BUILDS_DEADLINE_SHARE):
        assert late.build({"name": "x"}).ok
    with pytest.raises(Stop) as stop:
        late.build({"name": "x"})
    assert stop.value.finding.reason is Reason.BUILD
    for free in ({"seconds": 9 * long_s}, {"processor_s": long_s, "cached": True}):
        waited = builds(**free)
        assert all(waited.build({"name": "x"}).ok for _ in range(MOST_BUILDS))


def test_of_an_endless_log_both_ends_are_read(tmp_path):
    with open(tmp_path / "log", "wb") as log:
        log.write(b"first error\n")
        log.truncate(1 << 30)
        log.seek(0, 2)
        log.write(b"\nlast error")
    found = log_of(tmp_path)
    assert found.startswith("first error") and found.endswith("last error")
    assert len(found) <= 2 * READ_BYTES
