"""The table of `benchmarks.training_speed`: speeds and losses of variants."""

from __future__ import annotations

import statistics
from typing import Any

from tasks.training.telemetry import mfu

PEAK_FLOPS, REACHED_FLOPS = 989e12, 790e12
LEFT_OUT_STEPS = 3


def table(results: list[dict[str, Any]]) -> str:
    """Markdown, one line a result; speed beside TRL's of the same length (or the first result's
    where TRL was not run), losses beside those of `trl_float32` where that ran, else beside
    TRL's."""
    lines = [
        (
            "| length | variant | tokens/s | against TRL | MFU (989 / 790) | peak GB allocated /"
            " reserved (estimate) | loss first, last | loss difference max, mean | steps | set-up s"
            " | first step s | notes |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        alike = [other for other in results if other["length"] == result["length"]]
        baseline = next((other for other in alike if other["variant"] == "trl"), alike[0])
        exact = next((other for other in alike if other["variant"] == "trl_float32"), baseline)
        lines.append("| " + " | ".join(line(result, baseline, exact["losses"])) + " |")
    return "\n".join(lines)


def line(result: dict[str, Any], baseline: dict[str, Any], exact: list[float]) -> list[str]:
    speed, against = tokens_per_s(result), tokens_per_s(baseline)
    flops = speed * result.get("flops_per_token", 0) if speed else 0
    gpus = result.get("gpus", 1)
    peak = result.get("peak_allocated_gb")
    losses = result["losses"]
    differences = [abs(ours - theirs) for ours, theirs in zip(losses, exact, strict=False)]
    notes = [result.get("plan"), result.get("attention"), result.get("error")]
    return [
        str(result["length"]),
        result["variant"],
        f"{speed:,.0f}" if speed else "",
        f"{speed / against:.2f}" if speed and against else "",
        (
            f"{mfu(flops, PEAK_FLOPS, gpus):.1%} / {mfu(flops, REACHED_FLOPS, gpus):.1%}"
            if flops
            else ""
        ),
        (
            f"{peak:.1f} / {result['peak_reserved_gb']:.1f}"
            f" ({result.get('estimated_peak_gb', 0):.1f})"
            if peak
            else ""
        ),
        f"{losses[0]:.4f}, {losses[-1]:.4f}" if losses else "",
        f"{max(differences):.2e}, {statistics.fmean(differences):.2e}" if differences else "",
        str(len(result["step_s"])),
        f"{result.get('setup_s', 0):.0f}",
        f"{result['step_s'][0]:.1f}" if result["step_s"] else "",
        "; ".join(note for note in notes if note).replace("|", "/").replace("\n", " ")[:300],
    ]


def tokens_per_s(result: dict[str, Any]) -> float | None:
    """Median over the steps after the first LEFT_OUT_STEPS, of all GPUs together; None where there
    are none."""
    timed = result["step_s"][LEFT_OUT_STEPS:]
    rows = result.get("gpus", 1) * result.get("passes", 1)
    return rows * result["length"] / statistics.median(timed) if timed else None
