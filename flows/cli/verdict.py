"""What `concur verify` prints of a verdict, and what it misses."""

from __future__ import annotations

import re

from kernels_eval.flags import meaning_of
from kernels_eval.records import CompiledBaseline, Status, Verdict
from tasks.reporting.text import printable

OWN_COPY = re.compile(r"(?:/[^\s\"]*/concur-[^\s\"]*/|(?<![\w/.-]))candidate\.py(?=[:\"])")
"""The judge's name for the file that it was given, in a message that names a line."""


def missed(verdict: Verdict, min_speedup: float) -> str:
    """Why a verdict does not pass: it is not correct, or not so fast; "" where it does."""
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
            + "\n       ".join(printable(line) for line in verdict.log_tail.splitlines()[-12:])
        )
    return OWN_COPY.sub(lambda _: file_name, "\n".join(lines))


def _built(verdict: Verdict) -> str:
    tiers = {"lite": "", "full": " (with all of PyTorch's headers)", None: " (nothing built)"}
    more = tiers.get(verdict.build_tier, "")
    return "cached" if verdict.build_cached else f"{verdict.build_s:.1f} s{more}"


def _against(compiled: CompiledBaseline) -> str:
    if compiled.unavailable_reason:
        return f"no baseline, {compiled.unavailable_reason}"
    bounds = f"{compiled.speedup_lower:.2f} to {compiled.speedup_upper:.2f}"
    return (
        f"speedup {compiled.speedup:.2f} (95 % interval {bounds}): reference"
        f" {compiled.reference_ms:.4f} ms"
    )
