"""The tables of `benchmarks.training_speed`: speeds and losses of variants, busy shares by the
order of rows, and time by kernel."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

from tasks.training.batching import balanced_epochs, balanced_lines, busy_share, plan_epochs
from tasks.training.telemetry import TrainingFlops, mfu

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


def busy_table(
    tokens: list[int], flops: TrainingFlops, longest: list[int], workers: int, epochs: int = 3
) -> str:
    """Markdown: busy shares over some epochs (least and most) by the longest row that is kept."""
    lines = [
        "| longest row | rows | random | packed lines of that length | balanced | packed and"
        " balanced |",
        "| ---: | ---: | --- | --- | --- | --- |",
    ]
    for limit in longest:
        lengths = [count for count in tokens if count <= limit]
        shuffled = [list(range(len(lengths))) for _ in range(epochs)]
        for epoch, order in enumerate(shuffled):
            random.Random(epoch).shuffle(order)

        def cost(line: Sequence[int], lengths: list[int] = lengths) -> float:
            return sum(flops.row(lengths[row]) for row in line)

        packed = plan_epochs(lengths, token_budget=limit, epochs=epochs, seed=0)
        plans = (
            [[[row] for row in order] for order in shuffled],
            packed,
            balanced_epochs(lengths, rows_per_step=workers, epochs=epochs, seed=0),
            balanced_lines(packed, cost, lines_per_step=workers, seed=0),
        )
        cells = []
        for several in plans:
            shares = [busy_share(list(map(cost, plan)), workers) for plan in several]
            cells.append(f"{min(shares):.3f} to {max(shares):.3f}")
        lines.append(f"| {limit:,} | {len(lengths):,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_kernel(profiler: Any, shown: int = 45) -> list[str]:
    """Lines "ms, calls, kernel", the longest first."""
    entries = [
        (
            getattr(event, "self_device_time_total", 0) or event.self_cpu_time_total,
            event.count,
            event.key,
        )
        for event in profiler.key_averages()
    ]
    total = sum(entry[0] for entry in entries) or 1
    lines = [
        f"{time_us / 1e3:9.1f} ms {time_us / total:6.1%} {count:7d}  {key[:150]}"
        for time_us, count, key in sorted(entries, reverse=True)
    ]
    return [f"{total / 1e3:9.1f} ms in all", *lines[:shown]]
