"""`python -m kernels_eval TASK.py CANDIDATE.py`: one verdict, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kernels_eval.errors import DeviceError, EvalError, UsageError
from kernels_eval.records import (
    Candidate,
    CompiledBaseline,
    KernelTask,
    Language,
    SamplingParams,
    Verdict,
    candidate_id,
)


def read_pair(task_path: str, candidate_path: str, language: str) -> tuple[KernelTask, Candidate]:
    """Task and candidate records of two source files. Raises UsageError naming the file, the cause
    and the fix."""
    texts = []
    for path in (task_path, candidate_path):
        try:
            texts.append(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(
                f"cannot read {path}: {error.strerror}", "give the path of a Python file"
            ) from error
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{path} is not UTF-8 text: {error.reason} at byte {error.start}",
                "give the path of a Python file",
            ) from error
    _require_task(texts[0], task_path)
    task = KernelTask(
        task_id=f"file/{Path(task_path).stem}",
        name=Path(task_path).stem,
        code=texts[0],
        source=str(task_path),
    )
    identity = candidate_id(task, "file", SamplingParams(), 0, texts[1])
    return task, Candidate(
        candidate_id=identity,
        task_id=task.task_id,
        language=Language(language),
        generator="file",
        response=texts[1],
        code=texts[1],
    )


def _require_task(code: str, path: str) -> None:
    import ast

    from kernels_eval.checks.syntax import UNPARSABLE, parse_source

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
    """A verdict as text, one fact per line."""
    lines = [
        f"{verdict.status.value} ({verdict.reason})"
        + (f": {verdict.detail}" if verdict.detail else "")
    ]
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
            f" {found.reference_rms_error:.2e}) over {found.trials} trials"
        )
    for title, names in (
        ("custom kernels", verdict.custom_kernels),
        ("library calls", verdict.library_calls),
        ("flags", verdict.flags),
    ):
        if names:
            lines.append(f"  {title}: {', '.join(names)}")
    tier = verdict.build_tier or "nothing built"
    lines.append(
        f"  device {verdict.device or 'none'}; build {verdict.build_s:.1f} s ({tier}), run"
        f" {verdict.run_s:.1f} s"
    )
    if verdict.log_tail and verdict.status.value != "correct":
        lines.append(
            "  log: "
            + "\n       ".join(
                "".join(c if c.isprintable() else " " for c in line)
                for line in verdict.log_tail.splitlines()[-12:]
            )
        )
    return "\n".join(lines)


def _against(compiled: CompiledBaseline) -> str:
    if compiled.unavailable_reason:
        return f"no baseline, {compiled.unavailable_reason}"
    bounds = f"{compiled.speedup_lower:.2f} to {compiled.speedup_upper:.2f}"
    return (
        f"speedup {compiled.speedup:.2f} (95 % interval {bounds}): reference"
        f" {compiled.reference_ms:.4f} ms"
    )


def run(task_path: str, candidate_path: str, language: str, as_json: bool) -> int:
    """Verify and print. Exit status 0 whenever a verdict was reached, 2 for unusable input, 1 where
    the machine fails."""
    from kernels_eval.evaluator import evaluate

    try:
        task, candidate = read_pair(task_path, candidate_path, language)
        verdict = evaluate(task, candidate)
    except (UsageError, DeviceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except EvalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(verdict.model_dump(mode="json")) if as_json else render(verdict))
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels_eval",
        description="Verify one kernel against its PyTorch reference.",
    )
    parser.add_argument("task", help="Python file with Model, get_inputs() and get_init_inputs()")
    parser.add_argument("candidate", help="Python file with ModelNew")
    parser.add_argument("--language", choices=[x.value for x in Language], default="cpp")
    parser.add_argument(
        "--json", action="store_true", help="print exactly one JSON object, the Verdict"
    )
    arguments = parser.parse_args(argv)
    return run(arguments.task, arguments.candidate, arguments.language, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
