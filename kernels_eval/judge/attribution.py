"""How a candidate works: whether its kernels do the work, whether calls repeat, and what it leaves
running or changed.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from kernels_eval.compile.linked import library_work, reaches_elements
from kernels_eval.config import (
    CALLING_SHARE,
    FEWEST_LOOKS,
    IDLE_SHARE,
    IDLE_WINDOW_S,
    IDLE_WORK_NS,
    LIBRARY_SHARE,
    LONGEST_IDLE_WINDOW_S,
    LOOKS,
    LOOKS_S,
    MOST_CUSTOM_KERNELS,
    MOST_LOOKED_AT,
    MOST_OPERATORS,
    OUTSTANDING_SHARE,
    WALL_SHARE,
)
from kernels_eval.judge.candidate_handle import CandidateProcess
from kernels_eval.judge.messages import FIX_OF_CHANGE, REASON_OF_CHANGE, Stop, one_line
from kernels_eval.protocol import (
    MeasureShare,
    NameOperators,
    OperatorReport,
    ReadState,
    ReplaceWritten,
    Sample,
)
from kernels_eval.records import Reason
from kernels_eval.sandbox.child import Child
from kernels_eval.sandbox.process_tree import LookingClock
from kernels_eval.sandbox.program_counters import files_at
from kernels_eval.source.module_text import visible_text

MAY_DIFFER = re.compile(r"atomic|reduction\s*\(|mutex|\bomp\s+critical\b", re.IGNORECASE)
"""Sources whose last bits may differ between runs: the order of their additions is not fixed."""
MODE = re.compile(r"\.training\b")
"""Of sources that ask in which mode they are."""
OPERATORS_MAY_DIFFER = re.compile(
    r"aten\.(_?conv|cudnn_conv|miopen_conv|mkldnn_conv|slow_conv"
    r"|index_(add|copy|put|reduce)|scatter|put_|cumsum|histc|bincount|kthvalue"
    r"|median|_?embedding_bag|upsample|grid_sampl)"
)
"""Operators of torch with varying bits on a GPU (listed for torch.use_deterministic_algorithms)."""


OF_ANY_CALL = re.compile(
    r"lib(python|torch_python|c10|concur|c|m|mvec|gomp|stdc\+\+|gcc_s|pthread)[\W\d_]|python|ld-|\["
)
"""Files whose code no call does without, or that compute for who calls them (libm): no library's
work."""


def check_repeatable(process: CandidateProcess) -> None:
    """Require equal bits for equal inputs, unless atomics or a varying operator took part."""
    if not any(call.rerun_differs for call in process.calls):
        return
    source = visible_text(process.candidate.code or "", literals=False)
    varies = any(map(OPERATORS_MAY_DIFFER.match, process.draft.library_calls))
    if process.reference.expected.bit_identical and not varies and not MAY_DIFFER.search(source):
        raise Stop(
            Reason.NON_DETERMINISTIC,
            "repeating the call on the same inputs gives other bits, and nothing in it uses"
            " atomics, reductions or locks",
        )
    process.draft.flags.append("not_bit_identical")


def attribute_work(process: CandidateProcess) -> None:
    """Find the kernels and library operators that run, and the kernels' time share."""
    inputs, descriptor = process.unseen_inputs()
    name_work(process, process.request(NameOperators(inputs=inputs), (descriptor,)))
    idle = sum(not call.custom_calls for call in process.calls)
    if idle:
        calls = "backward passes" if process.reference.loaded.gradients else "calls"
        source = visible_text(process.candidate.code or "", literals=False)
        mode = ", in the mode in which the task leaves its model" if MODE.search(source) else ""
        raise _no_custom_kernel(
            f"no custom kernel ran in {idle} of {len(process.calls)} {calls}{mode}; the work was"
            " done by",
            process,
            "no operator at all",
        )
    built = process.candidate.language.jit or process.libraries  # which its process cannot forge
    if not (built and process.draft.custom_kernels):
        raise _no_custom_kernel("no kernel of its own is known; the work was done by", process, "?")
    measure_share(process)


def name_work(process: CandidateProcess, seen: OperatorReport) -> None:
    """Note the kernels and library operators that a process has seen, and those it links."""
    draft = process.draft
    draft.custom_kernels = tuple(one_line(name)[:200] for name in seen.custom[:MOST_CUSTOM_KERNELS])
    linked, flags = library_work(process.libraries.values())
    named = {one_line(name)[:200] for name in (*seen.operators[:MOST_OPERATORS], *linked)}
    draft.library_calls = tuple(sorted(named.union(draft.library_calls))[:MOST_OPERATORS])
    if seen.off_stream:
        flags.add("side_stream")  # joined before the return, or `check_idle` says so
    draft.flags += sorted(flags.difference(draft.flags))


def measure_share(process: CandidateProcess) -> None:
    """The least share of a call's time that its kernels were seen to take."""
    inputs, descriptor = process.unseen_inputs()
    share = process.request(MeasureShare(inputs=inputs), (descriptor,)).share
    limit_share(process, share)


def look_at_samples(process: CandidateProcess, calls: int) -> None:
    """Where is the processor in samples? What is seen in a library's code, however that was called,
    is no time of own kernels."""
    looks: list[list[int]] = []
    clock, many = LookingClock(), calls
    began = clock()
    while len(looks) < LOOKS:
        few = len(looks) < FEWEST_LOOKS  # as on a busy machine
        if clock() - began > (WALL_SHARE * LOOKS_S if few else LOOKS_S):
            break
        # what is seen in a system call, as once a sample is done, says nothing
        found = [look for look in process.look_at(Sample(calls=many)) if look]
        looks += found
        if len(found) < 2 and not process.reference.loaded.remembers:
            many = min(2 * many, MOST_LOOKED_AT * calls)
    seen = [address for look in looks for address in look]
    if len(seen) < FEWEST_LOOKS:
        return
    files = Counter(Path(path).name for path in files_at(process.child.family()[-1], seen))
    own = {Path(path).name for path in process.libraries.values()}
    foreign = {
        name: count / len(seen)
        for name, count in files.items()
        if name and name not in own and not OF_ANY_CALL.match(name)
    }
    limit_share(process, 1 - sum(foreign.values()))
    named = {one_line(name) for name, share in foreign.items() if share >= LIBRARY_SHARE}
    process.draft.library_calls = tuple(sorted(named.union(process.draft.library_calls)))
    passes_on = sum(files[name] for name in own) <= CALLING_SHARE * len(seen)
    if named and passes_on and not any(map(reaches_elements, process.libraries.values())):
        what = "its libraries reach no element of a tensor; the work was done by"
        raise _no_custom_kernel(what, process, "?")


def limit_share(process: CandidateProcess, share: float) -> None:
    draft = process.draft
    least = 1.0 if draft.custom_kernel_time_share is None else draft.custom_kernel_time_share
    draft.custom_kernel_time_share = min(least, max(0.0, share))


def check_idle(process: CandidateProcess) -> None:
    """Require that nothing goes on or stays changed once a call has returned."""
    ran_ns = process.child.processor_ns()
    while _busy_share(process.child) > IDLE_SHARE:
        if not ran_ns or process.child.processor_ns() - ran_ns > IDLE_WORK_NS:
            what = "the process continues to compute after its call has returned"
            raise Stop(Reason.BACKGROUND_WORK, what)
    outstanding = sorted(call.outstanding_share for call in process.calls)
    if outstanding and outstanding[len(outstanding) // 2] > OUTSTANDING_SHARE:
        what = "work continues on another stream after the current stream has finished"
        raise Stop(Reason.STREAM_ESCAPE, what)
    check_state(process)


def check_state(process: CandidateProcess, *, settings: bool = False) -> None:
    """Require that no setting of torch or CUDA changed that honest code leaves alone, and unless
    only `settings` matter, that a candidate to confirm replaced no operator.
    """
    confirms = process.config.level == "confirm"
    request = ReadState(operators=confirms and not settings)
    changed = process.request(request).changed
    for name, reason in REASON_OF_CHANGE.items():
        if name in changed:
            was = one_line(changed[name])[:200]
            raise Stop(reason, f"changes {name}: {was}; {FIX_OF_CHANGE[name]}")
    process.draft.flags += [f"changes:{one_line(name)[:40]}" for name in changed]


def check_ornamental(process: CandidateProcess) -> None:
    """Do the kernels matter? A crash on corrupted values shows that they were used, and ends the
    process.
    """
    try:
        ornamental = _are_ornamental(process)
        process.rebuild()  # a GPU tells of a crash at the next request
    except Stop:
        process.child.kill()
        return
    if ornamental:
        raise _no_custom_kernel(
            "the output does not depend on what the custom kernels write; the work is done by",
            process,
            "other code",
        )


def _are_ornamental(process: CandidateProcess) -> bool:
    drawn = [
        trial.distribution
        for trial in process.reference.trials
        if trial.own_mode and not trial.weights
    ]
    for distribution in dict.fromkeys([process.reference.timed_distribution, *drawn]):
        inputs, descriptor = process.unseen_inputs(2, distribution)
        found = process.request(ReplaceWritten(inputs=inputs), (descriptor,)).ornamental
        if found is not None:
            return found
    return False


def _no_custom_kernel(what: str, process: CandidateProcess, otherwise: str) -> Stop:
    calls = ", ".join(process.draft.library_calls[:6]) or otherwise
    return Stop(Reason.NO_CUSTOM_KERNEL, f"{what} {calls}")


def _busy_share(child: Child) -> float:
    # on a busy machine a process that wants to run does not always get a processor
    started, used = time.monotonic(), sum(child.demand_ns())
    if not used:
        return 0.0
    while True:
        time.sleep(IDLE_WINDOW_S)  # the window that is measured, not a wait for something
        passed = time.monotonic() - started
        share = (sum(child.demand_ns()) - used) / 1e9 / passed
        # The kernel counts a wait for the processor when it ends: on a busy machine more is to
        # come.
        if share > IDLE_SHARE or passed > LONGEST_IDLE_WINDOW_S or not _wants_to_run(child):
            return share


def _wants_to_run(child: Child) -> bool:
    for stat in child.thread_files("stat"):
        with suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[:1] == ["R"]:
                return True
    return False
