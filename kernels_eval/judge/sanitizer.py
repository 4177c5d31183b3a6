"""NVIDIA's compute-sanitizer over correct CUDA candidates, in confined children, on declared inputs
and an odd shape, with a deadline. An unfinished or missing tool is `not_run`. Candidates may
notice it."""

from __future__ import annotations

import re
import sys

from kernels_eval.compile.cubins import plain_name, tool_path
from kernels_eval.config import (
    LOG_BYTES,
    PRINTED_ERRORS,
    PRINTED_READS,
    SANITIZED_KERNELS,
    SANITIZED_TRIALS,
    EvalConfig,
)
from kernels_eval.judge.messages import Stop, VerdictDraft
from kernels_eval.judge.reference_handle import ReferenceProcess
from kernels_eval.judge.runner import Runner
from kernels_eval.protocol import DECLARED, ConfinedReplay, Replay, RunProgram
from kernels_eval.records import Candidate, Reason
from kernels_eval.sandbox.child import Child, ChildFailure
from kernels_eval.toolchain import places_of

PROGRAM = "compute-sanitizer"
DONE = "every call returned"
"""The program's last line: a tool counts no errors of a program it never started."""
SUMMARY = re.compile(
    r"^=+ (?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: .*\((\d+) error)", re.MULTILINE
)
FIRST_ERROR = re.compile(r"^=+ ((?:Error: |Invalid |Uninitialized |Barrier error).*)", re.MULTILINE)
UNINITIALISED = re.compile(r"^=+ Uninitialized .*\n=+ +at (.*)$", re.MULTILINE)
"""What initcheck prints of a read, and where it was."""
ENVIRONMENT = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # else what lies beyond a tensor is torch's own block
    "NV_COMPUTE_SANITIZER_LOCAL_CONNECTION_OVERRIDE": "uds",  # a child has no other sockets
}


def installed() -> str | None:
    return tool_path(PROGRAM)


def wanted(config: EvalConfig, candidate: Candidate) -> bool:
    asked = config.level == "confirm" and bool(config.compute_sanitizer)
    return asked and candidate.language.sanitized


def sanitize(
    runner: Runner,
    reference: ReferenceProcess,
    candidate: Candidate,
    libraries: dict[str, str],
    draft: VerdictDraft,
) -> None:
    """Run the tools and flag findings. Raises Stop (memory_error) for one of memcheck."""
    config, program = reference.config, installed()
    if program is None:
        draft.flags += [f"sanitizer:{tool}:not_run" for tool in config.compute_sanitizer]
        return
    readable = [str(path) for path in places_of(runner.builder.tools.cache)]
    shapes = _shapes(reference, draft)
    for tool in config.compute_sanitizer:
        runner.turns.give_way()
        with Child(runner.server, "sanitizer", config.limits, processes=True) as child:
            replay = Replay(
                task=str(child.write_file("task.py", reference.task.code)),
                candidate=str(child.write_file("candidate.py", candidate.code or "")),
                spec=reference.spec,
                libraries=libraries,
                plan=reference.loaded.plan,
                shapes=shapes,
            )
            asked = ConfinedReplay(replay=replay, readable=readable, done=DONE)
            path = str(child.write_file("request.json", asked.model_dump_json()))
            under = [sys.executable, "-P", "-m", "kernels_eval.candidate.sanitized", path]
            run = RunProgram(
                program=[program, *_options(tool, draft.custom_kernels), *under],
                environment=ENVIRONMENT,
            )
            try:
                said = str(child.request(run, config.compute_sanitizer_s).get("said"))
                errors = errors_in(said, tool, draft.custom_kernels)
            except ChildFailure as failure:
                said, errors = f"{failure.detail}\n{child.log_tail(LOG_BYTES)}", None
        if errors != 0:
            draft.log = said
            draft.flags.append(f"sanitizer:{tool}:{'not_run' if errors is None else errors}")
        if errors and tool == "memcheck":
            first = FIRST_ERROR.search(said)
            what = first[1] if first else "see the log"
            raise Stop(Reason.MEMORY_ERROR, f"{tool} counts {errors} errors: {what}", said)


def _shapes(reference: ReferenceProcess, draft: VerdictDraft) -> list[str]:
    """Of the candidate's own inputs and, where it was right there, of an odd shape."""
    flags = set(draft.flags)
    shapes = [
        trial.shape
        for trial in reference.trials
        if trial.row.name in SANITIZED_TRIALS
        and not flags & {trial.row.flag, trial.row.refusal_flag}
    ]
    return shapes or [DECLARED]


def errors_in(said: str, tool: str, kernels: tuple[str, ...]) -> int | None:
    """Errors that a tool counted; initcheck's in the candidate's kernels. None where unfinished, or
    where the printed reads are incomplete and name none of them.
    """
    counts = [int(errors or races) for errors, races in SUMMARY.findall(said)]
    if not counts or not (any(counts) or DONE in said):
        return None
    if tool != "initcheck" or not max(counts):
        return max(counts)
    reads = UNINITIALISED.findall(said)
    names = [re.compile(rf"\b{re.escape(name)}\b") for name in _plain_names(kernels)]
    own = sum(any(name.search(place) for name in names) for place in reads)
    return own if own or len(reads) == max(counts) else None


def _options(tool: str, kernels: tuple[str, ...]) -> list[str]:
    """Only the candidate's kernels; initcheck must see every writer, or written memory looks
    unset.
    """
    options = ["--tool", tool, "--target-processes", "application-only"]
    if tool == "initcheck":
        return [*options, "--print-limit", str(PRINTED_READS), "--show-backtrace", "no"]
    options += ["--print-limit", str(PRINTED_ERRORS)]
    options += ["--report-api-errors", "no"] if tool == "memcheck" else []
    for name in _plain_names(kernels[:SANITIZED_KERNELS]):
        options += ["--kernel-name", f"kernel_substring={name}"]
    return options


def _plain_names(kernels: tuple[str, ...]) -> list[str]:
    return list(filter(None, map(plain_name, kernels)))
