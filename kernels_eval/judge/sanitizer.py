"""NVIDIA's compute-sanitizer over correct CUDA candidates, in confined children, on declared inputs
and an odd shape, with a deadline. An unfinished or missing tool is `not_run`. Candidates may
notice it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from fcntl import LOCK_EX, flock

from kernels_eval.compile.cubins import plain_name, tool_path
from kernels_eval.config import (
    LOG_BYTES,
    PRINTED_ERRORS,
    PRINTED_READS,
    SANITIZED_KERNELS,
    SANITIZED_TRIALS,
    EvalConfig,
)
from kernels_eval.errors import EvalError
from kernels_eval.judge.messages import Stop, VerdictDraft
from kernels_eval.judge.reference_handle import ReferenceProcess
from kernels_eval.judge.runner import Runner
from kernels_eval.protocol import DECLARED, ConfinedReplay, Replay, RunProgram
from kernels_eval.records import Candidate, Reason
from kernels_eval.sandbox.child import Child, ChildFailure
from kernels_eval.source.module_text import visible_text
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
LAUNCH_BOUNDS = re.compile(r"__launch_bounds__\s*\([^()]*\)")
KERNEL = re.compile(r"__global__[\w\s*&:<>,]*?\b(\w+)\s*\(")
ENVIRONMENT = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # else what lies beyond a tensor is torch's own block
    "NV_COMPUTE_SANITIZER_LOCAL_CONNECTION_OVERRIDE": "uds",  # a child has no other sockets
}


def installed() -> str | None:
    return tool_path(PROGRAM)


def wanted(config: EvalConfig, candidate: Candidate) -> bool:
    asked = config.level == "confirm" and bool(config.compute_sanitizer)
    return asked and candidate.language.sanitized


class Tool:
    """A tool's process over the kernels of these names, which gets ready beside other work: torch
    takes seconds to start. It waits for its request. Use as a context manager."""

    def __init__(self, runner: Runner, config: EvalConfig, name: str, kernels: list[str]) -> None:
        """Raises SandboxError where the fork server fails."""
        self.runner, self.name, self.kernels = runner, name, kernels[:SANITIZED_KERNELS]
        self.timeout_s = config.compute_sanitizer_s
        self.child = Child(runner.server, "sanitizer", config.limits, processes=True)
        path = self.child.scratch / "request.json"
        self._request = path.open("w", encoding="utf-8")
        flock(self._request, LOCK_EX)
        under = [sys.executable, "-P", "-m", "kernels_eval.candidate.sanitized", str(path)]
        run = RunProgram(
            program=[str(installed()), *_options(name, self.kernels), *under],
            environment=ENVIRONMENT,
        )
        runner.warm_pool.beside.append(self.child)
        with suppress(ChildFailure, EvalError):  # which `run` raises
            self.child.begin(run.message())

    def looks_at(self, kernels: list[str]) -> bool:
        return set(kernels[:SANITIZED_KERNELS]) <= set(self.kernels)

    def run(self, replay: Callable[[Child], Replay]) -> str:
        """What it prints. Raises ChildFailure where it does not end, and as `Child.request`."""
        readable = [str(path) for path in places_of(self.runner.builder.tools.cache)]
        request = ConfinedReplay(replay=replay(self.child), readable=readable, done=DONE)
        with self._request as file:
            file.write(request.model_dump_json())
        return str(self.child.finish(self.timeout_s).get("said"))

    def __enter__(self) -> Tool:
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.warm_pool.beside.remove(self.child)
        self._request.close()
        self.child.close()


@contextmanager
def begun(runner: Runner, config: EvalConfig, candidate: Candidate) -> Iterator[Tool | None]:
    """The first tool of a candidate that is to be looked at, by the kernels of its source."""
    kernels = kernels_of(candidate) if wanted(config, candidate) and installed() else []
    if not kernels:
        yield None
        return
    with Tool(runner, config, config.compute_sanitizer[0], kernels) as tool:
        yield tool


def kernels_of(candidate: Candidate) -> list[str]:
    """The names of kernels that a source defines, as far as its text tells."""
    text = LAUNCH_BOUNDS.sub("", visible_text(candidate.code or ""))
    return list(dict.fromkeys(KERNEL.findall(text)))


def sanitize(
    runner: Runner,
    reference: ReferenceProcess,
    candidate: Candidate,
    libraries: dict[str, str],
    draft: VerdictDraft,
    begun: Tool | None = None,
) -> None:
    """Run the tools and flag findings. Raises Stop (memory_error) for one of memcheck."""
    config = reference.config
    if installed() is None:
        draft.flags += [f"sanitizer:{name}:not_run" for name in config.compute_sanitizer]
        return
    shapes, kernels = _shapes(reference, draft), _plain_names(draft.custom_kernels)

    def replay(child: Child) -> Replay:
        return Replay(
            task=str(child.write_file("task.py", reference.task.code)),
            candidate=str(child.write_file("candidate.py", candidate.code or "")),
            spec=reference.spec,
            libraries=libraries,
            plan=reference.loaded.plan,
            shapes=shapes,
        )

    for name in config.compute_sanitizer:
        runner.turns.give_way()
        ready = begun if begun and begun.name == name and begun.looks_at(kernels) else None
        with nullcontext(ready) if ready else Tool(runner, config, name, kernels) as tool:
            try:
                said = tool.run(replay)
                errors = errors_in(said, name, draft.custom_kernels)
            except ChildFailure as failure:
                said, errors = f"{failure.detail}\n{tool.child.log_tail(LOG_BYTES)}", None
        if errors != 0:
            draft.log = said
            draft.flags.append(f"sanitizer:{name}:{'not_run' if errors is None else errors}")
        if errors and name == "memcheck":
            first = FIRST_ERROR.search(said)
            what = first[1] if first else "see the log"
            raise Stop(Reason.MEMORY_ERROR, f"{name} counts {errors} errors: {what}", said)


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


def _options(tool: str, kernels: list[str]) -> list[str]:
    """Only the candidate's kernels; initcheck must see every writer, or written memory looks
    unset.
    """
    options = ["--tool", tool, "--target-processes", "application-only"]
    if tool == "initcheck":
        return [*options, "--print-limit", str(PRINTED_READS), "--show-backtrace", "no"]
    options += ["--print-limit", str(PRINTED_ERRORS)]
    options += ["--report-api-errors", "no"] if tool == "memcheck" else []
    for name in kernels:
        options += ["--kernel-name", f"kernel_substring={name}"]
    return options


def _plain_names(kernels: tuple[str, ...]) -> list[str]:
    return list(filter(None, map(plain_name, kernels)))
