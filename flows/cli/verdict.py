"""What `concur verify` prints of a verdict, and how it exits."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

from kernels_eval.config import EvalConfig
from kernels_eval.errors import DeviceError, EvalError, UsageError
from kernels_eval.flags import meaning_of
from kernels_eval.records import CompiledBaseline, Reason, Status, Verdict
from kernels_eval.sandbox.server_process import ServerProcess
from kernels_eval.verify_file import read_pair, verify

OWN_COPY = re.compile(r"(?:/[^\s\"]*/concur-[^\s\"]*/|(?<![\w/.-]))candidate\.py(?=[:\"])")
"""The judge's name for the file that it was given, in a message that names a line."""


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
    found = verdict.model_dump(mode="json")
    print(json.dumps(found) if as_json else render(verdict, Path(candidate_path).name))
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


def render(verdict: Verdict, file_name: str = "candidate.py") -> str:
    """The verdict for a person; where the judge's copy of the file is named, `file_name` is."""
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
    found = verdict.correctness
    if found and "relative RMS error" not in verdict.detail:
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
    place = f"device {verdict.device}; " if verdict.device else ""
    lines.append(f"  {place}build {_built(verdict)}, run {verdict.run_s:.1f} s")
    if verdict.log_tail and verdict.status is not Status.CORRECT:
        lines.append(
            "  log: "
            + "\n       ".join(
                "".join(c if c.isprintable() else " " for c in line)
                for line in verdict.log_tail.splitlines()[-12:]
            )
        )
    return OWN_COPY.sub(lambda _: file_name, "\n".join(lines))


def _built(verdict: Verdict) -> str:
    if verdict.build_cached:
        return f"cached ({verdict.build_tier})"
    twice = verdict.build_tier == "full" and verdict.reason is Reason.BUILD_FAILED
    more = ": built once more, with all of PyTorch's headers" if twice else ""
    return f"{verdict.build_s:.1f} s ({verdict.build_tier or 'nothing built'}{more})"


def _against(compiled: CompiledBaseline) -> str:
    if compiled.unavailable_reason:
        return f"no baseline, {compiled.unavailable_reason}"
    bounds = f"{compiled.speedup_lower:.2f} to {compiled.speedup_upper:.2f}"
    return (
        f"speedup {compiled.speedup:.2f} (95 % interval {bounds}): reference"
        f" {compiled.reference_ms:.4f} ms"
    )
