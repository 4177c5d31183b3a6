"""Random and mutated data where candidates have a say: what their processes answer, their sources,
flags and names. Every case ends in a verdict's reason, or in an error of the verifier's own kind.

Each test runs a few cases, the same every time. As slow tests they run `$CONCUR_FUZZ_CASES` (2,000)
random ones.
"""

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels_eval import protocol
from kernels_eval.compile import extensions
from kernels_eval.compile.extensions import Builder
from kernels_eval.compile.prepared import Prepared
from kernels_eval.compile.torch_names import HeaderNames
from kernels_eval.config import EvalConfig
from kernels_eval.judge import attribution, comparison
from kernels_eval.judge.candidate_handle import CandidateProcess
from kernels_eval.judge.messages import Prepared as Outcome
from kernels_eval.judge.messages import Stop, VerdictDraft, verdict_of
from kernels_eval.judge.prepare import BoundedBuilds, Preparer
from kernels_eval.judge.trial import Stage, Trial
from kernels_eval.judge.trials import TRIALS
from kernels_eval.judge.turns import Turns
from kernels_eval.protocol import (
    CallReport,
    CaptureReport,
    Comparison,
    ErrorReport,
    LoadReport,
    ModelSpec,
    OperatorReport,
    OrnamentReport,
    OutputForm,
    PackedValues,
    RunUnseen,
    Sample,
    SampleReport,
    SharedMemory,
    ShareReport,
    StateReport,
    UnseenReport,
)
from kernels_eval.records import Candidate, KernelTask, Language, Reason
from kernels_eval.sandbox import machine
from kernels_eval.sandbox.child import Child
from kernels_eval.sandbox.server_handle import End
from kernels_eval.source.screening import screen, screen_native
from kernels_eval.source.spec import Build, ExtensionSpec

LIMITS = EvalConfig().limits.model_copy(update={"run_s": 0.3, "load_s": 0.3})
BUILD = EvalConfig().build.model_copy(update={"capture_timeout_s": 0.3})
CONFIG = EvalConfig(limits=LIMITS, build=BUILD)
TASK = KernelTask(task_id="t", name="t", code="x = 1")
FEW, MANY = 40, int(os.environ.get("CONCUR_FUZZ_CASES", "2000"))
COUNTS = [
    pytest.param(FEW, id="few"),
    pytest.param(MANY, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
]


def outcomes(count, case, **strategies):
    """What a case came to on so many random inputs."""
    seen = set()
    how = settings(
        max_examples=count,
        derandomize=count == FEW,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    how(given(**strategies)(lambda **drawn: seen.add(case(**drawn))))()
    return seen


def candidate(code="load"):
    return Candidate(candidate_id="c", task_id="t", language=Language.CPP, generator="g", code=code)


# -- values ----------------------------------------------------------------------------------------

ODD_TEXTS = ("", "..", "\0", "\ud800", "a" * 300, "x" * 300_000, "/etc/passwd", "-o", "int", "ok")
ODD_NUMBERS = (0, -1, 1e308, float("nan"), float("inf"), -0.0, 2**31, 2**63, 10**400, -(10**300))
LETTERS = st.sampled_from("abz09_ -./\\'\"\n\t\0\ud800\u202e\U0001f600é%{}()<>,;:#@$")
TEXT = st.sampled_from(ODD_TEXTS) | st.text(LETTERS, max_size=30)
DEEP = json.loads("[" * 900 + "]" * 900)
JSON = st.recursive(
    st.none() | st.booleans() | st.sampled_from(ODD_NUMBERS) | TEXT | st.just(DEEP),
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=60,
)


def mutated(honest):
    """The same with one part replaced, added or gone."""
    if isinstance(honest, dict) and honest:
        keys = st.sampled_from(sorted(honest))
        return st.one_of(
            keys.flatmap(lambda key: mutated(honest[key]).map(lambda new: honest | {key: new})),
            keys.map(lambda key: {name: honest[name] for name in honest if name != key}),
            st.builds(lambda key, new: honest | {key: new}, EXTRA_KEYS, JSON),
            JSON,
        )
    if isinstance(honest, list) and honest:
        return st.integers(0, len(honest) - 1).flatmap(
            lambda at: mutated(honest[at]).map(lambda new: [*honest[:at], new, *honest[at + 1 :]])
        )
    return JSON


EXTRA_KEYS = st.sampled_from(("error", "build", "specs")) | TEXT

# -- what a child answers --------------------------------------------------------------------------

SPEC = ExtensionSpec(
    name="ext",
    cpp_sources=("torch::Tensor f(torch::Tensor x);",),
    functions=("f",),
    extra_cflags=("-O3",),
    extra_cuda_cflags=("-Xcompiler=-O3", "-DX=1"),
    extra_ldflags=("-lm",),
).model_dump(mode="json")
FILES = SPEC | {"kind": "files", "files": [["a.cpp", "int x;"], ["b.h", ""]], "functions": None}
CALLED = CallReport(
    plain=True,
    tensors=True,
    kinds=["Tensor"],
    devices=["cpu"],
    structure="tensor",
    custom_calls=1,
    outputs=[{"shape": [4, 4], "dtype": "float32"}],
)
HONEST = {
    type(report): report.model_dump(mode="json")
    for report in (
        LoadReport(parameters=[[4, 4]]),
        CALLED,
        OperatorReport(operators=["aten.add"], custom=["f"]),
        ShareReport(share=0.5),
        StateReport(changed={"matmul": "x"}),
        OrnamentReport(ornamental=False),
        SampleReport(ns=100, custom_calls=1),
        UnseenReport(forms=[CALLED], custom_calls=1),
        CaptureReport(specs=[SPEC, FILES]),
    )
}
ANSWERS = {
    request.command: HONEST[request.answer]
    for request in vars(protocol).values()
    if getattr(request, "answer", None) in HONEST and hasattr(request, "command")
}
PLACE = SharedMemory(on_device=False, size=64)
PACKED = PackedValues(on_device=False, size=64, packed=[], count=0, stride=0)
ERROR = ErrorReport(error="exception", detail="no", trace="line 1").model_dump()


def frame(data):
    return struct.pack("!I", len(data)) + data


def framed(answer):
    return frame(json.dumps(answer).encode("utf-8", "surrogatepass"))


ODD_FRAMES = (
    frame(b"[" * 100_000),
    frame(b'{"ns": ' + b"9" * 5000 + b"}"),
    frame(b'{"ns": 1e400}'),
    frame(b"\xff\xfe\x00"),
    frame(b""),
    struct.pack("!I", 1 << 31) + b"x" * 100,
    struct.pack("!I", 50) + b"x",
    frame(b"{}") * 3,
    b"",
)


def reply(honest):
    """The bytes that a child writes when it is asked, in two parts."""
    asks = st.sampled_from((SPEC, FILES)).flatmap(mutated).map(lambda spec: {"build": spec})
    answers = st.just(honest) | st.just(honest) | mutated(honest) | mutated(ERROR) | asks
    data = answers.map(framed) | st.sampled_from(ODD_FRAMES) | st.binary(min_size=1, max_size=40)
    cuts = st.just(0) | st.integers(0, 40)
    return st.tuples(st.just(framed(honest)) | data, cuts)


REPLIES = st.fixed_dictionaries({command: reply(answer) for command, answer in ANSWERS.items()})


class HostileServer:
    """Stands for a fork server: its children are threads that answer what they like."""

    isolation = ()
    alive = True

    def __init__(self, folder, holder):
        self.folder, self.holder = folder, holder

    def scratch_for(self, role):
        scratch = Path(tempfile.mkdtemp(dir=self.folder))
        (scratch / "work").mkdir()
        return scratch

    def spawn(self, request, fds):
        theirs = socket.socket(fileno=os.dup(fds[0]))
        threading.Thread(target=self._serve, args=(theirs, self.replies), daemon=True).start()
        return self.holder

    def reap(self, pid):
        return End()

    def kill(self, pid):
        pass

    def _serve(self, theirs, replies):
        with theirs, suppress(OSError, ValueError):
            while head := theirs.recv(4, socket.MSG_WAITALL):
                message = json.loads(theirs.recv(struct.unpack("!I", head)[0], socket.MSG_WAITALL))
                data, cut = replies.get(message.get("command"), (framed({}), 0))
                theirs.sendall(data[:cut])
                if cut == 7:
                    time.sleep(0.12)  # longer than a poll
                theirs.sendall(data[cut:])


@pytest.fixture
def server(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield HostileServer(tmp_path, holder.pid)
    holder.communicate(b"\n")


class Refusing:
    """A builder of nothing."""

    config = CONFIG.build
    tools = SimpleNamespace(nvcc=None)

    def known(self, spec):
        return Build(ok=False, key="k", reason=Reason.BUILD_FAILED, log="no")


@pytest.fixture
def reference():
    memory = machine.sealed_memory(64)
    seen = SimpleNamespace(
        config=CONFIG,
        device="cpu",
        spec=ModelSpec(entry_point="Model", init_form="args", device="cpu", construct_on="cpu"),
        construct_on="cpu",
        turns=Turns(),
        expected=SimpleNamespace(bit_identical=False, oracle="float64"),
        output_precision="fp32",
        sums_products=False,
        trials=[
            Trial(
                "declared",
                TRIALS[0],
                seed=1,
                outputs=[OutputForm(shape=[4, 4], dtype="float32", bytes=64, device="cpu")],
            )
        ],
        loaded=SimpleNamespace(
            layout=0,
            parameters=[[4, 4]],
            parameter_names=["weight"],
            parameter_digests=[""],
            statistics=[],
            structure="tensor",
            effects=None,
            gradients=None,
        ),
        memory=SimpleNamespace(
            arguments=lambda: (PACKED, memory),
            shared=lambda whose: (PLACE, memory),
            draw=lambda *_: (PACKED, memory),
        ),
        compare=lambda *_: Comparison(rms=0.0, reference_rms=1e-7, max=0.0),
        judge=lambda *_: Reason.OK,
        used_statistics=list,
        weights_matter=lambda missing: False,
    )
    yield seen
    os.close(memory)


def judged(child, reference, builder):
    """The protocol's questions, in its order; the verdict is made, too."""
    draft = VerdictDraft()
    prepared = Outcome(candidate_id="c")
    process = CandidateProcess(child, candidate(), prepared, reference, builder, draft)
    try:
        process.load()
        comparison.compare_outputs(process)
        attribution.attribute_work(process)
        attribution.check_repeatable(process)
        comparison.compare_trials(process, Stage.VARIATIONS)
        attribution.check_state(process)
        process.request(Sample(calls=1))
        for form in process.request(RunUnseen(inputs=PACKED, into="unseen")).forms:
            process.check_form(form, reference.trials[0])
        attribution.check_ornamental(process)
    except Stop as stop:
        verdict = verdict_of(TASK, candidate(), prepared, stop.finding, draft)
        verdict.model_dump_json()
        return verdict.reason
    return Reason.OK


@pytest.mark.parametrize("count", COUNTS)
def test_whatever_a_child_answers_is_its_own_verdict(count, server, reference):
    def case(replies):
        server.replies = replies
        with Child(server, "candidate", LIMITS) as child:
            return judged(child, reference, Refusing())

    seen = outcomes(count, case, replies=REPLIES)
    assert Reason.EXITED_EARLY in seen and len(seen) > 2, seen


# -- sources ---------------------------------------------------------------------------------------

PYTHON = [
    *"import torch subprocess os gc class ModelNew ( ) : [ ] { } . , = + - * ** not lambda".split(),
    *"if elif else for in while try except def return await yield setattr torch.allclose x".split(),
    *"exec 1 1e999 0x 'a' \"b\" ''' # := -> ; @ ~ import* from f'{x}' é".split(),
    *('"""', "\\", "\n", "\t", "\x0c", "\0", "\ud800", " "),
]
NATIVE = [
    *'/* */ // R"( )" R"x( " \' \\" \\ #include <torch/extension.h> # define if endif'.split(),
    *"{ } ( ) < > :: std ::system( system( kill( fork int void return kill enum A, a1,".split(),
    *"cublasX( PYBIND11_MODULE std::vector<int> const & * = 1'000 0x é __global__ -> .".split(),
    *("\n", "\0", "\ud800", " ", "\t", ";"),
]


def source(words):
    """Words in any order, or one pattern again and again: what costs a slow reader most."""
    word = st.sampled_from(words)
    gaps = st.sampled_from((" ", "", "\n"))
    begin = st.sampled_from(("", "x = ", "class ModelNew: pass\n"))
    unit = st.builds(str.join, gaps, st.lists(word, min_size=1, max_size=3))
    again = st.builds(
        lambda begin, unit, times: begin + unit * times,
        begin,
        unit,
        st.sampled_from((2, 900, 9000)),
    )
    return st.builds(str.join, gaps, st.lists(word, max_size=200)) | again


@pytest.mark.parametrize("count", COUNTS)
def test_every_source_is_screened(count):
    def case(python, native):
        for screened in (screen(python), screen_native(native)):
            assert screened.reason is None or screened.detail

    outcomes(count, case, python=source(PYTHON), native=source(NATIVE))


# -- flags and names -------------------------------------------------------------------------------


@pytest.fixture
def builder(tmp_path, monkeypatch):
    """A builder that writes the sources and starts a program with the flags, which always fails."""
    true = shutil.which("false")

    def run(command, work, deadline, environment, confine=None):
        subprocess.run([true, *command[1:]], cwd=work, env=environment)
        return "failed"

    monkeypatch.setattr(extensions, "run", run)
    monkeypatch.setattr(Prepared, "precompiled", lambda self: None)
    monkeypatch.setattr(Prepared, "once", lambda self, target, make: target)
    monkeypatch.setattr(HeaderNames, "means_torchs", lambda *_: False)
    monkeypatch.setattr(Prepared, "least_cplusplus", "")
    monkeypatch.setattr(extensions.Builder, "is_certain", lambda *_: False)
    return Builder(CONFIG.build, cache=tmp_path / "cache")


FLAGS = [
    *"-O3 -DX=1 -Xcompiler=-O3 -Xcompiler -Xcompiler=-Xcompiler=-O2 -I -L/x -lm -o x".split(),
    *"-fplugin=x -Wl,-rpath,/x ' \" é --threads 4 -gencode=arch=compute_90 @file".split(),
    *('-DX="a b"', "-DX=\0", "-DX=\ud800", "\0", "\ud800", "\n", ""),
]


REQUESTED_FLAGS = st.lists(
    st.builds(str.__mul__, st.sampled_from(FLAGS), st.sampled_from((1, 1, 1, 2000))), max_size=3
) | st.just(["-w"] * 2000)
CHANGES = {
    **dict.fromkeys(("extra_cflags", "extra_cuda_cflags", "extra_ldflags"), REQUESTED_FLAGS),
    "name": TEXT,
    "files": st.lists(st.tuples(TEXT, source(NATIVE)), min_size=2, max_size=2),
    "cpp_sources": source(NATIVE).map(lambda text: [text, "int " + "a" * 300 + ";"]),
    "functions": st.lists(TEXT, min_size=1, max_size=1),
}
ASKED = st.builds(
    dict.__or__, st.sampled_from((SPEC, FILES)), st.fixed_dictionaries({}, optional=CHANGES)
)


@pytest.mark.parametrize("count", COUNTS)
def test_every_request_for_a_build_has_an_outcome(count, builder):
    def case(asked):
        try:
            found = BoundedBuilds(builder, candidate(), []).build(asked)
        except Stop as stop:
            return stop.finding.reason
        assert found.reason and found.log is not None
        return found.reason

    seen = outcomes(count, case, asked=ASKED | ASKED.flatmap(mutated))
    # few draws need not hold one: hypothesis draws constants of whatever modules are loaded, too
    seen.add(case(SPEC | {"cpp_sources": ['int f() { return system("x"); }']}))
    assert {Reason.BUILD_FAILED, Reason.FORBIDDEN_CALL} <= seen, seen


@pytest.mark.parametrize("count", COUNTS)
def test_whatever_a_module_asks_to_build_is_prepared(count, server, builder, monkeypatch):
    monkeypatch.setattr(Preparer, "server", server)
    made = Preparer(CONFIG)
    made.builder = builder

    def case(replies, code):
        server.replies = replies
        made.prepare(candidate(code), TASK).model_dump_json()

    outcomes(count, case, replies=REPLIES, code=st.just("load") | source(PYTHON))
