"""Random and mutated data where candidates have a say: what their processes answer, their sources,
flags and names. Every case ends in a verdict's reason, or in an error of the verifier's own kind.

Each test runs a fixed number of cases with a fixed seed. As slow tests they run for
`$CONCUR_FUZZ_S` seconds each (60), from a seed that is printed.
"""

import json
import os
import random
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

from kernels_eval.compile import extensions
from kernels_eval.compile.extensions import Builder
from kernels_eval.compile.prepared import Prepared
from kernels_eval.config import EvalConfig
from kernels_eval.judge import attribution, comparison
from kernels_eval.judge.candidate_handle import CandidateProcess
from kernels_eval.judge.messages import Prepared as Outcome
from kernels_eval.judge.messages import Stop, VerdictDraft, verdict_of
from kernels_eval.judge.prepare import BoundedBuilds, Preparer
from kernels_eval.judge.trials import TRIALS, Stage, Trial
from kernels_eval.protocol import (
    Comparison,
    ModelSpec,
    OutputForm,
    PackedValues,
    RunUnseen,
    Sample,
    SharedMemory,
)
from kernels_eval.records import Candidate, KernelTask, Language, Reason
from kernels_eval.sandbox import machine
from kernels_eval.sandbox.child import Child
from kernels_eval.sandbox.server_handle import End
from kernels_eval.source.screening import screen, screen_native
from kernels_eval.source.spec import Build

SECONDS = float(os.environ.get("CONCUR_FUZZ_S", "60"))
LIMITS = EvalConfig().limits.model_copy(update={"run_s": 0.3, "load_s": 0.3})
BUILD = EvalConfig().build.model_copy(update={"capture_timeout_s": 0.3})
CONFIG = EvalConfig(limits=LIMITS, build=BUILD)
TASK = KernelTask(task_id="t", name="t", code="x = 1")
CASES = [
    pytest.param(40, id="few"),
    pytest.param(None, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(SECONDS + 600)]),
]


def randoms(count):
    """A generator of random numbers for each case."""
    seed = 7 if count else random.SystemRandom().getrandbits(32)
    print(f"fuzz seed {seed}")
    ends, number = time.monotonic() + SECONDS, 0
    while number < count if count else time.monotonic() < ends:
        yield random.Random(f"{seed}-{number}")
        number += 1
    print(f"{number} cases")


def candidate(code="load"):
    return Candidate(candidate_id="c", task_id="t", language=Language.CPP, generator="g", code=code)


# -- values ----------------------------------------------------------------------------------------

LETTERS = "abz09_ -./\\'\"\n\t\0\ud800\u202e\U0001f600é%{}()<>,;:#@$"
ODD_TEXTS = ("", "..", "\0", "\ud800", "a" * 300, "x" * 300_000, "/etc/passwd", "-o", "int", "ok")
ODD_NUMBERS = (0, -1, 1e308, float("nan"), float("inf"), -0.0, 2**31, 2**63, 10**400, -(10**300))


def text(draw):
    if draw.random() < 0.3:
        return draw.choice(ODD_TEXTS)
    return "".join(draw.choices(LETTERS, k=draw.randrange(30)))


def value(draw, depth=0):
    """Anything that JSON can hold."""
    kind = draw.randrange(8 if depth < 4 else 5)
    if kind < 5:
        return draw.choice((None, draw.random() < 0.5, draw.choice(ODD_NUMBERS), text(draw), "ok"))
    if kind == 5:
        nested = []
        for _ in range(draw.choice((1, 20, 900))):
            nested = [nested]
        return nested
    if kind == 6:
        return [value(draw, depth + 1) for _ in range(draw.choice((0, 1, 3, 200)))]
    return {text(draw): value(draw, depth + 1) for _ in range(draw.randrange(4))}


def mutated(draw, given):
    """The same with one part replaced, added or gone."""
    if isinstance(given, dict) and given and draw.random() < 0.8:
        changed, key = dict(given), draw.choice(sorted(given))
        changed[key] = mutated(draw, given[key])
        if draw.random() < 0.1:
            changed.pop(key)
        if draw.random() < 0.1:
            changed[draw.choice(("error", "build", "specs", text(draw)))] = value(draw)
        return changed
    if isinstance(given, list) and given and draw.random() < 0.6:
        at = draw.randrange(len(given))
        return [*given[:at], mutated(draw, given[at]), *given[at + 1 :]]
    return value(draw)


# -- what a child answers --------------------------------------------------------------------------

OUTPUT = {"shape": [4, 4], "dtype": "float32"}
CALLED = {
    "plain": True,
    "tensors": True,
    "kinds": ["Tensor"],
    "devices": ["cpu"],
    "structure": "tensor",
    "custom_calls": 1,
    "outstanding_share": 0.0,
    "outputs": [OUTPUT],
}
SPEC = {
    "kind": "inline",
    "name": "ext",
    "cpp_sources": ["torch::Tensor f(torch::Tensor x);"],
    "functions": ["f"],
    "extra_cflags": ["-O3"],
    "extra_cuda_cflags": ["-Xcompiler=-O3", "-DX=1"],
    "extra_ldflags": ["-lm"],
    "files": [],
    "python_module": True,
}
FILES = SPEC | {"kind": "files", "files": [["a.cpp", "int x;"], ["b.h", ""]], "functions": None}
ANSWERS = {
    "LoadCandidate": {"parameters": [[4, 4]], "statistics": [], "made_elsewhere": False},
    "Call": CALLED,
    "NameOperators": {"operators": ["aten.add"], "custom": ["f"], "off_stream": 0},
    "MeasureShare": {"share": 0.5},
    "ReadState": {"changed": {"matmul": "x"}},
    "ReplaceWritten": {"ornamental": False},
    "Sample": {"ns": 100, "custom_calls": 1},
    "RunUnseen": {"forms": [CALLED], "custom_calls": 1},
    "Capture": {"specs": [SPEC, FILES]},
    "CaptureConstructor": {"specs": [SPEC]},
}
PLACE = SharedMemory(on_device=False, size=64)
PACKED = PackedValues(on_device=False, size=64, packed=[], count=0, stride=0)
ERROR = {"error": "exception", "detail": "no", "trace": "line 1"}


def frame(data):
    return struct.pack("!I", len(data)) + data


def said(draw, asked):
    """The bytes that a child writes when it is asked."""
    answer = ANSWERS.get(asked, {})
    chance = draw.random()
    if chance < 0.3:
        answer = mutated(draw, answer)
    elif chance < 0.35:
        answer = mutated(draw, ERROR)
    elif chance < 0.45:
        answer = {"build": mutated(draw, draw.choice((SPEC, FILES)))}
    elif chance < 0.5:
        return draw.choice(
            (
                frame(b"[" * 100_000),
                frame(b'{"ns": ' + b"9" * 5000 + b"}"),
                frame(b'{"ns": 1e400}'),
                frame(b"\xff\xfe\x00"),
                frame(b""),
                struct.pack("!I", 1 << 31) + b"x" * 100,
                struct.pack("!I", 50) + b"x",
                draw.randbytes(draw.randrange(1, 40)),
                frame(b"{}") * 3,
                b"",
            )
        )
    return frame(json.dumps(answer).encode("utf-8", "surrogatepass"))


class HostileServer:
    """Stands for a fork server: its children are threads that answer what they like."""

    isolation = ()
    alive = True

    def __init__(self, folder, holder):
        self.folder, self.holder = folder, holder
        self.draw = random.Random(0)

    def scratch_for(self, role):
        scratch = Path(tempfile.mkdtemp(dir=self.folder))
        (scratch / "work").mkdir()
        return scratch

    def spawn(self, request, fds):
        theirs = socket.socket(fileno=os.dup(fds[0]))
        threading.Thread(target=self._serve, args=(theirs, self.draw), daemon=True).start()
        return self.holder

    def reap(self, pid):
        return End()

    def kill(self, pid):
        pass

    def _serve(self, theirs, draw):
        with theirs, suppress(OSError, ValueError):
            while head := theirs.recv(4, socket.MSG_WAITALL):
                message = json.loads(theirs.recv(struct.unpack("!I", head)[0], socket.MSG_WAITALL))
                data = said(draw, str(message.get("command", "build")))
                cut = draw.randrange(len(data) + 1) if draw.random() < 0.2 else 0
                theirs.sendall(data[:cut])
                if cut:
                    time.sleep(0.12 if draw.random() < 0.1 else 0)  # longer than a poll
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

    def build(self, spec):
        return Build(ok=False, key="k", reason=Reason.BUILD_FAILED, log="no")


@pytest.fixture
def reference():
    memory = machine.sealed_memory(64)
    seen = SimpleNamespace(
        config=CONFIG,
        device="cpu",
        spec=ModelSpec(entry_point="Model", init_form="args", device="cpu", construct_on="cpu"),
        construct_on="cpu",
        expected=SimpleNamespace(bit_identical=False, oracle="float64"),
        gates=SimpleNamespace(precision="fp32"),
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
            parameters=[[4, 4]],
            parameter_names=["weight"],
            statistics=[],
            structure="tensor",
            mutates=False,
            gradients=None,
        ),
        arguments=lambda seed=None: (PACKED, memory),
        memory=SimpleNamespace(
            outputs_of=lambda whose: (PLACE, memory), draw=lambda *_: (PACKED, memory)
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
    process = CandidateProcess(child, candidate(), reference, builder, draft)
    try:
        process.load({})
        comparison.compare_outputs(process)
        attribution.attribute_work(process)
        attribution.check_repeatable(process)
        comparison.compare_trials(process, Stage.VARIATIONS)
        attribution.check_state(process)
        process.ask(Sample(calls=1))
        for form in process.ask(RunUnseen(inputs=PACKED, outputs=PLACE)).forms:
            process.check_form(form, reference.trials[0])
        attribution.check_ornamental(process)
    except Stop as stop:
        verdict = verdict_of(TASK, candidate(), Outcome(candidate_id="c"), stop.finding, draft)
        verdict.model_dump_json()
        return verdict.reason
    return Reason.OK


@pytest.mark.parametrize("count", CASES)
def test_whatever_a_child_answers_is_its_own_verdict(count, server, reference):
    seen = set()
    for draw in randoms(count):
        server.draw = draw
        with Child(server, "candidate", LIMITS) as child:
            seen.add(judged(child, reference, Refusing()))
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


def source(draw, words):
    """Words in any order, or one pattern again and again: what costs a slow reader most."""
    if draw.random() < 0.4:
        unit = draw.choice(("", " ", "\n")).join(draw.choices(words, k=draw.randrange(1, 4)))
        return draw.choice(("", "x = ", "class ModelNew: pass\n")) + unit * draw.choice(
            (2, 900, 9000)
        )
    return draw.choice((" ", "", "\n")).join(draw.choices(words, k=draw.randrange(200)))


@pytest.mark.parametrize("count", CASES)
def test_every_source_is_screened(count):
    for draw in randoms(count):
        for screened in (screen(source(draw, PYTHON)), screen_native(source(draw, NATIVE))):
            assert screened.reason is None or screened.detail


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
    monkeypatch.setattr(Prepared, "only_torchs", frozenset())
    monkeypatch.setattr(Prepared, "least_cplusplus", "")
    monkeypatch.setattr(extensions.Builder, "is_certain", lambda *_: False)
    return Builder(CONFIG.build, cache=tmp_path / "cache")


FLAGS = [
    *"-O3 -DX=1 -Xcompiler=-O3 -Xcompiler -Xcompiler=-Xcompiler=-O2 -I -L/x -lm -o x".split(),
    *"-fplugin=x -Wl,-rpath,/x ' \" é --threads 4 -gencode=arch=compute_90 @file".split(),
    *('-DX="a b"', "-DX=\0", "-DX=\ud800", "\0", "\ud800", "\n", ""),
]


def asked(draw):
    spec = dict(draw.choice((SPEC, FILES)))
    for key in ("extra_cflags", "extra_cuda_cflags", "extra_ldflags"):
        if draw.random() < 0.4:
            spec[key] = [
                draw.choice(FLAGS) * draw.choice((1, 1, 1, 2000))
                for _ in range(draw.choice((1, 2, 2000)))
            ]
    if draw.random() < 0.3:
        spec["name"] = text(draw)
    if draw.random() < 0.3:
        spec["files"] = [[text(draw), source(draw, NATIVE)] for _ in range(2)]
    if draw.random() < 0.3:
        spec["cpp_sources"] = [source(draw, NATIVE), "int " + "a" * 300 + ";"]
    if draw.random() < 0.2:
        spec["functions"] = [text(draw)]
    return mutated(draw, spec) if draw.random() < 0.3 else spec


@pytest.mark.parametrize("count", CASES)
def test_every_request_for_a_build_has_an_outcome(count, builder):
    def build(draw):
        try:
            found = BoundedBuilds(builder, candidate(), []).build(asked(draw))
        except Stop as stop:
            return stop.finding.reason
        assert found.reason and found.log is not None
        return found.reason

    seen = {build(draw) for draw in randoms(count)}
    assert {Reason.BUILD_FAILED, Reason.FORBIDDEN_CALL} <= seen, seen


@pytest.mark.parametrize("count", CASES)
def test_whatever_a_module_asks_to_build_is_prepared(count, server, builder, monkeypatch):
    monkeypatch.setattr(Preparer, "server", server)
    made = Preparer(CONFIG)
    made.builder = builder
    for draw in randoms(count):
        server.draw = draw
        code = source(draw, PYTHON) if draw.random() < 0.3 else "load"
        prepared = made.prepare(candidate(code), TASK)
        prepared.model_dump_json()
