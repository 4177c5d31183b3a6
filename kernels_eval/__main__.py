"""`python -m kernels_eval TASK.py CANDIDATE.py`: one verdict, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kernels_eval.config import EvalConfig
from kernels_eval.devices import require_device
from kernels_eval.errors import DeviceError, EvalError, UsageError
from kernels_eval.flags import meaning_of
from kernels_eval.languages import languages_of
from kernels_eval.records import (
    Candidate,
    CompiledBaseline,
    KernelTask,
    Language,
    Reason,
    SamplingParams,
    Status,
    Verdict,
    candidate_id,
)

if TYPE_CHECKING:
    from kernels_eval.sandbox.server_process import ServerProcess

QUICK = EvalConfig().screened()
"""What `--quick` verifies with."""
STAGES = {
    "reference_s": "run the reference",
    "load_s": "load the candidate",
    "correctness_s": "compare outputs",
    "attribution_s": "find which kernels do the work",
    "timing_s": "time reference and candidate",
}
Say = Callable[[str], None]

NATIVE = (".cu", ".cuh", ".cpp", ".cc", ".cxx", ".c", ".h")


def chosen_language(source: str, path: str, asked: str | None, say: Say) -> Language:
    """What a candidate is judged as: the given language, else its source's, else C++, which `say`
    reports. Raises UsageError for a contradiction or several languages."""
    found = languages_of(source)
    names = " and ".join(language.value for language in found)
    if asked is None:
        if len(found) > 1:
            raise UsageError(f"{path} holds {names} kernels", "choose one with --language")
        if not found:
            say(f"{path} shows no language (no load_inline, no @triton.jit): it is verified as cpp")
        return found[0] if found else Language("cpp")
    if found and asked not in found:
        raise UsageError(
            f"{path} is written in {names}, but --language says {asked}", "leave out --language"
        )
    return Language(asked)


def read_pair(
    task_path: str, candidate_path: str, language: str | None = None, say: Say = print
) -> tuple[KernelTask, Candidate]:
    """Task and candidate of two source files; see `read_candidate`. Raises UsageError."""
    require_module(candidate_path)
    task = read_task(task_path)
    return task, read_candidate(task, candidate_path, language, say)


def require_module(path: str) -> None:
    """Raise UsageError for a candidate file with a C++ or CUDA suffix."""
    if Path(path).suffix in NATIVE:
        raise UsageError(
            f"{path} is not a Python module",
            "give a module with ModelNew that builds it, such as with load_inline",
        )


def read_task(path: str) -> KernelTask:
    """The task of a file. Raises UsageError where it is none."""
    code = _read(path)
    _require_task(code, path)
    name = Path(path).stem
    return KernelTask(task_id=f"file/{name}", name=name, code=code, source=str(path))


def read_candidate(
    task: KernelTask, path: str, language: str | None = None, say: Say = print
) -> Candidate:
    """A file's candidate, in `chosen_language`; no code without ModelNew. Raises UsageError."""
    source = _read(path)
    missing = _missing_model(source)
    return Candidate(
        candidate_id=candidate_id(task, "file", SamplingParams(), 0, source),
        task_id=task.task_id,
        language=chosen_language(source, path, language, _silent if missing else say),
        generator="file",
        response=source,
        code=None if missing else source,
        parse_reason=missing,
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}", "give the path of a Python file"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}",
            "give the path of a Python file",
        ) from error


def _silent(_: str) -> None:
    """Say nothing of a language where there is no code."""


def _missing_model(source: str) -> Reason | None:
    import ast

    from kernels_eval.source.syntax import UNPARSABLE, parse_source

    if not source.strip():
        return Reason.NO_CODE_BLOCK
    try:
        named = "ModelNew" in ast.unparse(parse_source(source))
    except UNPARSABLE:
        return None  # the verdict says what is wrong with its syntax
    return None if named else Reason.MISSING_MODEL_NEW


def _require_task(code: str, path: str) -> None:
    import ast

    from kernels_eval.source.syntax import UNPARSABLE, parse_source

    try:
        names = {
            node.name
            for node in parse_source(code).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
        }
    except UNPARSABLE as error:
        raise UsageError(f"{path} is not valid Python: {error}", "fix the task file") from error
    missing = [name for name in ("Model", "get_inputs", "get_init_inputs") if name not in names]
    if missing:
        raise UsageError(
            f"{path} does not define {', '.join(missing)}",
            "a task file defines class Model(nn.Module), get_inputs() and get_init_inputs(), as"
            " KernelBench does",
        )


def render(verdict: Verdict) -> str:
    lines = [
        f"{verdict.status.value} ({verdict.reason})"
        + (f": {verdict.detail}" if verdict.detail else "")
    ]
    if verdict.level == "screen" and verdict.status is Status.CORRECT:
        lines.append("  screened only: without --quick the whole protocol confirms it")
    if timing := verdict.timing:
        lines.append(
            f"  speedup {timing.speedup:.2f} (95 % interval {timing.speedup_lower:.2f} to"
            f" {timing.speedup_upper:.2f}): reference {timing.reference_ms:.4f} ms, candidate"
            f" {timing.candidate_ms:.4f} ms, {timing.pairs} pairs"
        )
        if compiled := timing.compiled:
            lines.append(f"  against torch.compile ({compiled.mode}): {_against(compiled)}")
    if found := verdict.correctness:
        lines.append(
            f"  relative RMS error {found.rms_error:.2e} (reference's own"
            f" {found.reference_rms_error:.2e}) over {found.trials}"
            f" {'trial' if found.trials == 1 else 'trials'}"
        )
    share = verdict.custom_kernel_time_share
    taken = "" if share is None else f" ({share:.1%} of its time)"
    for title, names in (
        (f"custom kernels{taken}", verdict.custom_kernels),
        ("library calls", verdict.library_calls),
    ):
        if names:
            lines.append(f"  {title}: {', '.join(names)}")
    lines += [f"  flag {flag}: {meaning_of(flag)}" for flag in verdict.flags]
    lines.append(
        f"  device {verdict.device or 'none'}; build {_built(verdict)}, run {verdict.run_s:.1f} s"
    )
    if verdict.log_tail and verdict.status is not Status.CORRECT:
        lines.append(
            "  log: "
            + "\n       ".join(
                "".join(c if c.isprintable() else " " for c in line)
                for line in verdict.log_tail.splitlines()[-12:]
            )
        )
    return "\n".join(lines)


def _built(verdict: Verdict) -> str:
    if verdict.build_cached:
        return f"cached ({verdict.build_tier})"
    return f"{verdict.build_s:.1f} s ({verdict.build_tier or 'nothing built'})"


def _against(compiled: CompiledBaseline) -> str:
    if compiled.unavailable_reason:
        return f"no baseline, {compiled.unavailable_reason}"
    bounds = f"{compiled.speedup_lower:.2f} to {compiled.speedup_upper:.2f}"
    return (
        f"speedup {compiled.speedup:.2f} (95 % interval {bounds}): reference"
        f" {compiled.reference_ms:.4f} ms"
    )


def run(
    task_path: str,
    candidate_path: str,
    language: str | None,
    as_json: bool,
    *,
    config: EvalConfig | None = None,
    progress: bool = False,
    check: bool = False,
    min_speedup: float | None = None,
    started: ServerProcess | None = None,
) -> int:
    """Verify and print, with stages on stderr. Exit status 0 with a verdict, 2 for unusable input,
    1 where the machine fails, or the verdict does not pass what was asked: `check` that it is
    correct, `min_speedup` also that it is so fast. `started`: a fork server's process that was
    started already; it is closed.
    """
    began_s = time.monotonic()

    def note(text: str) -> None:
        print(f"note: {text}", file=sys.stderr)

    def say(text: str) -> None:
        if progress or sys.stderr.isatty():
            print(f"{time.monotonic() - began_s:6.1f} s  {text}", file=sys.stderr, flush=True)

    try:
        task, candidate = read_pair(task_path, candidate_path, language, note)
        verdict = verify(task, candidate, candidate_path, config, say, started)
    except (UsageError, DeviceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except EvalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        if started:
            started.close()
    print(json.dumps(verdict.model_dump(mode="json")) if as_json else render(verdict))
    if (check or min_speedup is not None) and (missed := _missed(verdict, min_speedup or 0.0)):
        print(f"not passed: {missed}", file=sys.stderr)
        return 1
    return 0


def _missed(verdict: Verdict, min_speedup: float) -> str:
    if verdict.status is not Status.CORRECT:
        return f"the candidate is {verdict.status.value}"
    if not min_speedup:
        return ""
    if verdict.timing is None:
        return "the candidate was not timed"
    if not verdict.timing.speedup >= min_speedup:  # nor where that is no number
        return f"the speedup is {verdict.timing.speedup:.3g}, below {min_speedup:g}"
    return ""


def verify(
    task: KernelTask,
    candidate: Candidate,
    path: str,
    config: EvalConfig | None = None,
    say: Say = lambda _: None,
    started: ServerProcess | None = None,
) -> Verdict:
    """The verdict of a file's candidate; `say` gets each stage, `started` is as in `run`. Raises
    EvalError and DeviceError.
    """
    require_device(candidate.language, of=f"{path}: ")
    if candidate.code is None:
        return _no_code(task, candidate, path)
    from kernels_eval.sandbox.server_handle import ForkServer

    threads = (config or EvalConfig()).threads
    server = ForkServer(threads=threads, started=started)  # imports torch meanwhile
    from kernels_eval.evaluator import Evaluator

    def on_phase(name: str) -> None:
        say(STAGES.get(name, name))

    with Evaluator(candidate.language, config, server=server, on_phase=on_phase) as evaluator:
        say(f"screen and build the {candidate.language.value} candidate")
        return evaluator(task, candidate)


def _no_code(task: KernelTask, candidate: Candidate, path: str) -> Verdict:
    from kernels_eval.judge.messages import no_code_verdict

    empty = candidate.parse_reason is Reason.NO_CODE_BLOCK
    detail = f"{path} is empty" if empty else f"{path} does not define ModelNew"
    return no_code_verdict(task, candidate).model_copy(update={"detail": detail})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels_eval",
        description="Verify one kernel against its PyTorch reference.",
    )
    parser.add_argument("task", help="Python file with Model, get_inputs() and get_init_inputs()")
    parser.add_argument("candidate", help="Python file with ModelNew")
    parser.add_argument(
        "--language", choices=[x.value for x in Language], help="default: read from the source"
    )
    parser.add_argument("--quick", action="store_true", help="screen: fewer trials and samples")
    parser.add_argument("--progress", action="store_true", help="print each stage to stderr")
    parser.add_argument("--check", action="store_true", help="exit status 1 unless correct")
    parser.add_argument("--min-speedup", type=float, help="exit status 1 unless so fast, too")
    parser.add_argument(
        "--json", action="store_true", help="print exactly one JSON object, the Verdict"
    )
    asked = parser.parse_args(argv)
    return run(
        asked.task,
        asked.candidate,
        asked.language,
        asked.json,
        config=QUICK if asked.quick else None,
        progress=asked.progress,
        check=asked.check,
        min_speedup=asked.min_speedup,
    )


if __name__ == "__main__":
    sys.exit(main())
