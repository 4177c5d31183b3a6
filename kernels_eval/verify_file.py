"""A candidate's file against a task's: both as records, and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kernels_eval.config import EvalConfig
from kernels_eval.devices import require_device
from kernels_eval.errors import UsageError
from kernels_eval.languages import languages_of
from kernels_eval.records import (
    Candidate,
    KernelTask,
    Language,
    Reason,
    SamplingParams,
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
FIX = "write class ModelNew(nn.Module) with the arguments and outputs of the task's Model"
"""What to do about a file without code."""
Say = Callable[[str], None]

NATIVE = (".cu", ".cuh", ".cpp", ".cc", ".cxx", ".c", ".h")


def silent(_: str) -> None:
    """Say nothing."""


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
    task_path: str, candidate_path: str, language: str | None, say: Say = silent
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
    task: KernelTask, path: str, language: str | None, say: Say = silent
) -> Candidate:
    """A file's candidate, in `chosen_language`; no code without ModelNew. Raises UsageError."""
    source = _read(path)
    missing = _missing_model(source)
    return Candidate(
        candidate_id=candidate_id(task, "file", SamplingParams(), 0, source),
        task_id=task.task_id,
        language=chosen_language(source, path, language, silent if missing else say),
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


def verify(
    task: KernelTask,
    candidate: Candidate,
    path: str,
    config: EvalConfig | None = None,
    say: Say = silent,
    started: ServerProcess | None = None,
    say_headers: Say = silent,
) -> Verdict:
    """The verdict of a file's candidate. `say` gets each stage, `say_headers` the progress of
    compiling PyTorch's headers; `started`: a fork server's process. Raises EvalError and
    DeviceError.
    """
    require_device(candidate.language, of=f"{path}: ")
    if candidate.code is None:
        return _no_code(task, candidate, path)
    from kernels_eval.sandbox.server_handle import ForkServer

    threads = (config or EvalConfig()).threads
    server = ForkServer(threads=threads, started=started)  # imports torch meanwhile
    from kernels_eval.evaluator import Evaluator

    times = Counter[str]()

    def on_phase(name: str) -> None:
        times[name] += 1
        count = {2: "2nd", 3: "3rd"}.get(times[name], f"{times[name]}th")
        again = f", for the {count} time" if times[name] > 1 else ""
        say(f"{STAGES.get(name, name)}{again}")

    with Evaluator(candidate.language, config, server=server, on_phase=on_phase) as evaluator:
        evaluator.preparer.builder.say = say_headers
        say(f"screen and build the {candidate.language.value} candidate")
        return evaluator(task, candidate)


def _no_code(task: KernelTask, candidate: Candidate, path: str) -> Verdict:
    from kernels_eval.judge.messages import no_code_verdict

    empty = candidate.parse_reason is Reason.NO_CODE_BLOCK
    cause = "is empty" if empty else "does not define ModelNew"
    detail = f"{path} {cause} ({FIX})"
    return no_code_verdict(task, candidate).model_copy(update={"detail": detail})
