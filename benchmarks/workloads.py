"""How much do tasks compute and move, how long does it take to find out, and is it right?

    python -m benchmarks.workloads --tasks kernelbench.parquet --out workloads.md

Counts every task's reference without running it on data (tasks.workload), and checks what can be
checked: operators against the recorder of verification on a CPU, FLOPs of matrix products and
convolutions against the closed formulas on shapes read from the modules, bytes against the sizes of
inputs, parameters and outputs. The checks run the tasks' code in this process: use them on tasks
you trust (`--no-checks`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from kernels_eval.records import KernelTask
from tasks.sources.config import TasksConfig
from tasks.sources.stage import load_tasks
from tasks.workload.config import WorkloadConfig
from tasks.workload.families import family_of
from tasks.workload.measure import Measured, measured

CLOSED = {"matmul", "convolution"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", required=True, help="a Parquet file of tasks")
    parser.add_argument(
        "--source", default="kernelbench", choices=["kernelbench", "kernelbook", "files"]
    )
    parser.add_argument("--jobs", type=int, default=None)
    parser.add_argument("--timeout-s", type=float, default=60, help="deadline of one task")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument(
        "--cheap-flops",
        type=float,
        default=4e9,
        help="tasks up to this are run on the CPU, to compare their operators",
    )
    parser.add_argument("--cheap-bytes", type=float, default=1e8, help="the same for their bytes")
    parser.add_argument("--json", help="write every task's workload here")
    parser.add_argument("--out", required=True, help="write the tables here, Markdown")
    arguments = parser.parse_args()
    tasks = load_tasks(TasksConfig(source=arguments.source, location=arguments.tasks))
    started = time.monotonic()
    found: dict[str, Measured] = {}
    for task, result in measured(
        tasks, WorkloadConfig(jobs=arguments.jobs, timeout_s=arguments.timeout_s)
    ):
        found[task.task_id] = result
    wall_s = time.monotonic() - started
    lines = report(tasks, found, wall_s)
    if arguments.json:  # before the checks, which take longer
        rows = [
            m.workload.row() | {"seconds": round(m.seconds, 3)}
            for m in (found[t.task_id] for t in tasks)
        ]
        Path(arguments.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    Path(arguments.out).write_text("\n".join(lines) + "\n", encoding="utf-8")
    lines += (
        []
        if arguments.no_checks
        else checks(tasks, found, arguments.cheap_flops, arguments.cheap_bytes)
    )
    Path(arguments.out).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    return 0


def report(tasks: list[KernelTask], found: dict[str, Measured], wall_s: float) -> list[str]:
    counted = [task for task in tasks if found[task.task_id].workload.problem is None]
    seconds = [found[task.task_id].seconds for task in tasks]
    how = Counter(found[task.task_id].workload.executed for task in counted)
    peak = max((found[task.task_id].peak_rss_bytes or 0) for task in tasks)
    lines = [
        f"{len(counted)} of {len(tasks)} tasks counted in {wall_s:.0f} s of wall time: "
        + ", ".join(f"{count} on {name}" for name, count in how.most_common())
        + f". Seconds a task: median {statistics.median(seconds):.2f}, 95 % below"
        f" {sorted(seconds)[int(0.95 * (len(seconds) - 1))]:.2f}, "
        + f"largest {max(seconds):.1f}. Largest resident memory of a process: {peak / 1e6:.0f} MB"
        " (torch's own included).",
        "",
        (
            "| level | tasks | counted | single operator | median FLOPs | median bytes | median"
            " FLOPs a byte | median s |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    by_level: dict[Any, list[KernelTask]] = defaultdict(list)
    for task in tasks:
        by_level[task.level].append(task)
    for level, some in sorted(by_level.items(), key=lambda item: str(item[0])):
        lines.append(_row(str(level), [found[task.task_id] for task in some], True))
    lines += [
        "",
        "| family | tasks | median FLOPs | median bytes | median FLOPs a byte |",
        "| --- | --- | --- | --- | --- |",
    ]
    by_family: dict[str, list[Measured]] = defaultdict(list)
    for task in counted:
        for family in found[task.task_id].workload.families:
            by_family[family].append(found[task.task_id])
    for family, some in sorted(by_family.items(), key=lambda item: -len(item[1])):
        lines.append(_row(family, some, False))
    lines += ["", "Level 1 that is not a single operator:", ""]
    for task in counted:
        operators = found[task.task_id].workload.operators
        if task.level == 1 and found[task.task_id].workload.operator_kind == "fusion":
            lines.append(
                f"- {task.task_id}: {', '.join(name.rsplit('.', 1)[-1] for name in operators)}"
            )
    other = Counter(
        name
        for task in counted
        for name in found[task.task_id].workload.operators
        if family_of(name) == "other"
    )
    uncounted = Counter(name for task in counted for name in found[task.task_id].workload.uncounted)
    lines += [
        "",
        (
            f"Operators of no family: {_counter(other)}. Operators that no rule counts:"
            f" {_counter(uncounted)}."
        ),
    ]
    lines += ["", "Not counted:", ""]
    problems = [
        (task.task_id, found[task.task_id].workload.problem)
        for task in tasks
        if found[task.task_id].workload.problem
    ]
    return lines + ([f"- {name}: {problem[:160]}" for name, problem in problems] or ["- none"])


def _row(name: str, some: list[Measured], level: bool) -> str:
    work = [item.workload for item in some if item.workload.problem is None]
    cells = [name, str(len(some))]
    if level:
        cells += [
            str(len(work)),
            str(sum(item.operator_kind == "single_operator" for item in work)),
        ]
    numbers: list[list[Any]] = [[item.flops for item in work], [item.bytes_min for item in work]]
    numbers.append(
        [item.arithmetic_intensity for item in work if item.arithmetic_intensity is not None]
    )
    cells += [f"{statistics.median(values):.3g}" if values else "" for values in numbers]
    if level:
        cells.append(f"{statistics.median(item.seconds for item in some):.2f}")
    return "| " + " | ".join(cells) + " |"


def _counter(counts: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.most_common()) or "none"


def checks(
    tasks: list[KernelTask], found: dict[str, Measured], cheap_flops: float, cheap_bytes: float
) -> list[str]:
    """What an independent way gives. Runs the tasks' code here: operators of cheap tasks on a CPU;
    shapes of all, without storage."""
    import torch

    from kernels_eval.checks.operators import reference_operators

    same, differ, closed, off, sized, unsized = 0, [], 0, [], 0, []
    for task in tasks:
        work = found[task.task_id].workload
        if work.problem is not None:
            continue
        if work.flops < cheap_flops and work.bytes_min < cheap_bytes:
            space = _space(task)
            torch.manual_seed(0)
            inputs = space["get_inputs"]()
            model = space[task.entry_point](*space["get_init_inputs"]())
            with torch.no_grad():
                seen = reference_operators(lambda model=model, inputs=inputs: model(*inputs))[:256]
            same += seen == list(work.operators)
            differ += [task.task_id] if seen != list(work.operators) else []
        if task.level == 1 and work.executed == "meta":
            expected, size = _closed_form(task)
            if (
                work.operator_kind == "single_operator"
                and set(work.families) & CLOSED
                and expected is not None
            ):
                closed += expected == work.flops
                off += (
                    [f"{task.task_id} ({work.flops} counted, {expected} by formula)"]
                    if expected != work.flops
                    else []
                )
            sized += size == work.bytes_min
            unsized += (
                [f"{task.task_id} ({work.bytes_min / size:.4g})"] if size != work.bytes_min else []
            )
    return [
        "",
        "Checks:",
        "",
        (
            "- Operators as verification's recorder names them on a CPU (tasks below"
            f" {cheap_flops:.0e} FLOPs and {cheap_bytes / 1e6:.0f} MB): {same} of"
            f" {same + len(differ)} the same; differ: {', '.join(differ) or 'none'}."
        ),
        (
            "- FLOPs of level 1's single matrix products and convolutions equal the closed"
            f" formula: {closed} of {closed + len(off)}; differ: {', '.join(off) or 'none'}."
        ),
        (
            f"- Bytes of level 1 equal the sizes of all inputs, parameters and outputs: {sized} of"
            f" {sized + len(unsized)}; differ (counted / sizes): {', '.join(unsized) or 'none'}."
        ),
    ]


def _space(task: KernelTask) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "task"}
    exec(compile(task.code, task.task_id, "exec"), space)
    return space


def _closed_form(task: KernelTask) -> tuple[int | None, int]:
    """FLOPs of one product or convolution from its shapes alone, and bytes of inputs, parameters
    and outputs."""
    import torch
    from torch import nn

    space = _space(task)
    with torch.device("meta"), torch.no_grad():
        inputs = space["get_inputs"]()
        model = space[task.entry_point](*space["get_init_inputs"]()).to("meta")
        output = model(*inputs)
    given = [value for value in inputs if isinstance(value, torch.Tensor)]
    kept = [tensor for tensor in (*model.parameters(), *model.buffers())]
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*given, *kept, output))
    layers = [layer for layer in model.modules() if isinstance(layer, nn.modules.conv._ConvNd)]
    if len(layers) == 1:
        layer = layers[0]
        window = 1
        for extent in layer.kernel_size:
            window *= extent
        if layer.transposed:
            products = given[0].numel() * window * (layer.out_channels // layer.groups)
        else:
            products = output.numel() * window * (layer.in_channels // layer.groups)
        return 2 * products + (output.numel() if layer.bias is not None else 0), size
    if len(given) != 2 or layers:
        return None, size
    a, b = (tuple(tensor.shape) for tensor in given)
    if (
        len(a) == len(b) == 2
        # elements of A times those of B, over those of C, are the square of the dimension that is
        # summed
    ):
        inner = round((given[0].numel() * given[1].numel() / output.numel()) ** 0.5)
        return 2 * output.numel() * inner, size
    return 2 * output.numel() * a[-1], size


if __name__ == "__main__":
    sys.exit(main())
