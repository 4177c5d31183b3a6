"""A correct C++ candidate once more, built with GCC's AddressSanitizer and
UndefinedBehaviorSanitizer, on the task's own inputs and on one other shape.

Its process is a candidate's, of a fork server that has the sanitizers' runtime. Undefined behaviour
that reaches no other memory (a sum that overflows) is only flagged. A candidate may notice it.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

from kernels_eval.config import SANITIZED_TRIALS, SANITIZER_LOG_BYTES, EvalConfig
from kernels_eval.judge.candidate_handle import CandidateProcess
from kernels_eval.judge.messages import Prepared, Stop, VerdictDraft, one_line
from kernels_eval.judge.reference_handle import ReferenceProcess
from kernels_eval.judge.runner import Runner
from kernels_eval.protocol import NewCandidate
from kernels_eval.records import Candidate, Reason
from kernels_eval.sandbox.child import Child
from kernels_eval.source.spec import ExtensionSpec

SANITIZERS = ("-fsanitize=address", "-fsanitize=undefined")
COMPILED = (*SANITIZERS, "-fno-omit-frame-pointer", "-g1", "-U__SANITIZE_ADDRESS__")
RUNTIME = ("libasan.so", "libstdc++.so.6")
"""What must be loaded before Python; the second for exceptions."""
ENVIRONMENT = {
    # what only part of a process is built with cannot tell: leaks, and pairs of new and free
    "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:new_delete_type_mismatch=0"
    ":detect_container_overflow=0:detect_odr_violation=0:allocator_may_return_null=1"
    ":print_legend=0:malloc_context_size=2:quarantine_size_mb=64",
    "UBSAN_OPTIONS": "print_stacktrace=0",
}
ADDRESS = re.compile(
    r"ERROR: AddressSanitizer: "
    r"(?!requested allocation|out of memory|allocator|stack-overflow)([\w-]+)"
)
ACCESS = re.compile(r"^((?:READ|WRITE) of size \d+)", re.MULTILINE)
FRAME = re.compile(r"^ +#\d+ 0x\w+ in (.+?) \S*?([\w.]+:\d+)$", re.MULTILINE)
UNDEFINED = re.compile(r"([\w.]+:\d+):\d+: runtime error: (.*)")


@cache
def runtime(compiler: str) -> str:
    """The libraries to load first; "" where this compiler has none."""
    found = []
    for name in RUNTIME:
        command = [compiler, f"-print-file-name={name}"]
        printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        found.append(printed.strip())
    return " ".join(found) if all(map(Path.is_absolute, map(Path, found))) else ""


def instrumented(spec: ExtensionSpec) -> ExtensionSpec:
    return spec.model_copy(
        update={
            "extra_cflags": (*spec.extra_cflags, *COMPILED),
            "extra_ldflags": (*spec.extra_ldflags, *SANITIZERS),
        }
    )


def wanted(config: EvalConfig, candidate: Candidate, tier: str | None = "lite") -> bool:
    """Whether to build this candidate, built with headers of this tier, once more."""
    asked = config.address_sanitizer
    chosen = asked == "correct" or (asked == "lite" and tier == "lite")
    return chosen and config.level == "confirm" and candidate.language.instrumented


def begin(runner: Runner) -> None:
    """Start what the second build runs in, which imports torch for two seconds."""
    runner.begin_sanitizing(runtime(runner.builder.tools.cxx), ENVIRONMENT)


def find(
    runner: Runner,
    reference: ReferenceProcess,
    candidate: Candidate,
    prepared: Prepared,
    draft: VerdictDraft,
) -> None:
    """Raise Stop (memory_error) for what reaches memory outside of its own; flag other undefined
    behaviour, and a sanitizer that could not run."""
    libraries = {}
    for spec in prepared.specs:
        build = runner.builder.build(instrumented(spec))
        if build.ok:
            libraries[spec.key] = build.path
    begin(runner)
    server = runner.sanitizing()
    if server is None or not libraries:
        draft.flags.append("sanitizer:address:not_run")
        return
    given = prepared.model_copy(update={"libraries": {**prepared.libraries, **libraries}})
    with Child(server, "candidate", reference.config.limits) as child:
        process = CandidateProcess(
            child, candidate, given, reference, runner.builder, VerdictDraft(), fenced=False
        )
        ran = _run(process)
        said = child.log_tail(SANITIZER_LOG_BYTES)
    if ADDRESS.search(said):
        raise Stop(Reason.MEMORY_ERROR, described(said), said)
    if not ran:
        draft.flags.append("sanitizer:address:not_run")
    if places := set(UNDEFINED.findall(said)):
        draft.log = said
        draft.flags.append(f"sanitizer:undefined:{len(places)}")


def _run(process: CandidateProcess) -> bool:
    process.reference.request(NewCandidate())
    ran = False
    try:
        process.load()
        for trial in process.reference.trials:
            if trial.row.name in SANITIZED_TRIALS:
                process.call(trial)
                ran = True
    except Stop:
        return ran
    return ran


def described(said: str) -> str:
    kind, access, frame = ADDRESS.search(said), ACCESS.search(said), FRAME.search(said)
    parts = [kind[1] if kind else "", access[1] if access else ""]
    parts.append(f"in {frame[1]}, {frame[2]}" if frame else "")
    return one_line("AddressSanitizer: " + ", ".join(filter(None, parts)))
