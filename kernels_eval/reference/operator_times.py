"""The role that finds out where a task's reference spends its time, operator by operator, with
torch's profiler.

Guarantees: time is self time (an operator's own, and that of what it calls below torch's surface),
given to the outermost aten operator, such as `linear` or `layer_norm`; on a GPU it is the time of
the kernels that an operator launches. Does not guarantee that a share holds for other shapes, nor
that a task which means to lie about itself tells the truth: it runs in the process that measures.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from typing import Any

import torch

from kernels_eval.checks.inputs import construct, load_module, make_inputs, moved
from kernels_eval.checks.trials import DECLARED
from kernels_eval.isolation.channel import Channel, Message

SEED = 0
MOST_CALLS = 20
MOST_OPERATORS = 64
CALL = "forward call "


class OperatorTimes:
    """Serves one task: `do_profile`."""

    def __init__(self, channel: Channel) -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    def do_profile(
        self,
        path: str,
        entry_point: str,
        init_form: str,
        device: str,
        threads: int,
        budget_s: float,
    ) -> Message:
        """Microseconds a call of every outermost operator, the slowest first, and by which clock.
        Raises what the task raises."""
        torch.set_num_threads(threads)
        module = load_module(path, "task")
        model = moved(construct(module, entry_point, module, init_form, SEED, device), device)
        inputs = make_inputs(module, SEED, DECLARED, None, device)
        on_gpu = device.startswith("cuda")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.no_grad():
            # what is loaded or chosen with the first call is no part of any operator
            model(*inputs)
            started = time.perf_counter()
            model(*inputs)
            _synchronise(on_gpu)
            fitting = budget_s / max(time.perf_counter() - started, 1e-6)
            calls = int(min(MOST_CALLS, max(1, fitting)))
            with torch.profiler.profile(activities=activities) as seen:
                for number in range(calls):
                    with torch.profiler.record_function(f"{CALL}{number}"):
                        model(*inputs)
                _synchronise(on_gpu)
        events = [event for event in seen.events() if event.device_type.name == "CPU"]
        clock, times = "device", _by_outermost(events, "self_device_time_total", calls)
        # without a GPU, or without CUPTI, no kernel has a time: then the processor's counts
        if not on_gpu or not any(us > 0 for us, _ in times.values()):
            clock, times = "cpu", _by_outermost(events, "self_cpu_time_total", calls)
        ordered = sorted(times.items(), key=lambda item: -item[1][0])[:MOST_OPERATORS]
        return {
            "operators": [
                {"name": name, "us": us, "calls": count} for name, (us, count) in ordered
            ],
            "total_us": sum(us for us, _ in times.values()),
            "clock": clock,
        }


def _by_outermost(events: list[Any], clock: str, calls: int) -> dict[str, tuple[float, int]]:
    """Microseconds of each outermost aten operator in one forward call, the median over the calls,
    and how often one call calls it."""
    spent: dict[str, list[float]] = {}
    counts: Counter[str] = Counter()
    for event in events:
        outermost, above = None, event
        while above.cpu_parent is not None:
            outermost = above if above.name.startswith("aten::") else outermost
            above = above.cpu_parent
        if outermost is None or not above.name.startswith(CALL):
            continue
        name = outermost.name.removeprefix("aten::")
        spent.setdefault(name, [0.0] * calls)[int(above.name.removeprefix(CALL))] += float(
            getattr(event, clock, 0.0)
        )
        counts[name] += outermost is event
    return {name: (statistics.median(each), counts[name] // calls) for name, each in spent.items()}


def _synchronise(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()
