"""The steps of the protocol that ask how a candidate works: whether its kernels do the work, and
what it leaves running or changed."""

from __future__ import annotations

import time
from contextlib import suppress

from kernels_eval.checks.linked import library_work
from kernels_eval.isolation.sandbox import Child
from kernels_eval.parent.candidate_handle import CandidateProcess
from kernels_eval.parent.messages import (
    REASON_OF_CHANGE,
    OperatorReport,
    OrnamentReport,
    ShareReport,
    StateReport,
    Stop,
    one_line,
)
from kernels_eval.records import Reason

IDLE_S = 0.02
LONGEST_IDLE_S = 1.0
IDLE_SHARE = 0.5


def attribute_work(process: CandidateProcess) -> None:
    """Which kernels and which library operators ran, and the kernels' share of the time."""
    draft = process.draft
    seen = process.ask_about("operators", OperatorReport)
    draft.custom_kernels = tuple(one_line(name)[:200] for name in seen.custom[:32])
    linked, flags = library_work(process.libraries.values())
    named = {one_line(name)[:200] for name in seen.operators[:64]} | linked
    draft.library_calls = tuple(sorted(named)[:64])
    draft.flags += sorted(flags)
    if seen.off_stream:
        draft.flags.append("side_stream")  # joined before the return, or `check_idle` says so
    idle = sum(not call.custom_calls for call in process.calls)
    calls = "backward passes" if process.reference.loaded.gradients else "calls"
    if idle:
        raise _no_custom_kernel(
            f"no custom kernel ran in {idle} of {len(process.calls)} {calls}; the work was done by",
            process,
            "no operator at all",
        )
    share = process.ask_about("share", ShareReport).share
    draft.custom_kernel_time_share = min(1.0, max(0.0, share))


def check_idle(process: CandidateProcess) -> None:
    """Nothing left running, and nothing left changed."""
    if all(_busy_share(process.child) > IDLE_SHARE for _ in range(2)):
        what = "the process continues to compute after its call has returned"
        raise Stop(Reason.BACKGROUND_WORK, what)
    outstanding = sorted(call.outstanding_share for call in process.calls)
    if outstanding and outstanding[len(outstanding) // 2] > 0.3:
        what = "work continues on another stream after the current stream has finished"
        raise Stop(Reason.STREAM_ESCAPE, what)
    check_state(process)


def check_state(process: CandidateProcess) -> None:
    """No setting of torch or CUDA changed that honest code leaves alone."""
    changed = process.ask("state", StateReport).changed
    for name, reason in REASON_OF_CHANGE.items():
        if name in changed:
            raise Stop(reason, f"changes {name}: {one_line(changed[name])[:200]}")
    process.draft.flags += [f"changes:{one_line(name)[:40]}" for name in changed]


def check_ornamental(process: CandidateProcess) -> None:
    """Do the kernels matter? Asked last, since corrupted values may lead a kernel astray: a crash
    shows that they were used."""
    drawn = [
        trial.distribution
        for trial in process.reference.trials
        if trial.own_mode and trial.weights_seed is None
    ]
    for distribution in dict.fromkeys(drawn):
        try:
            found = process.ask_about("ornamental", OrnamentReport, 2, distribution).ornamental
        except Stop:
            return
        if found:
            raise _no_custom_kernel(
                "the output does not depend on what the custom kernels write; the work is done by",
                process,
                "other code",
            )
        if found is not None:
            return


def _no_custom_kernel(what: str, process: CandidateProcess, otherwise: str) -> Stop:
    calls = ", ".join(process.draft.library_calls[:6]) or otherwise
    return Stop(Reason.NO_CUSTOM_KERNEL, f"{what} {calls}")


def _busy_share(child: Child) -> float:
    """Share of a short window in which a child that was asked nothing used a processor. 0 where the
    kernel does not tell."""
    # on a busy machine a process that wants to run does not always get a processor
    started, used = time.monotonic(), child.demand_ns()
    if not used:
        return 0.0
    while True:
        time.sleep(IDLE_S)  # the window that is measured, not a wait for something
        passed = time.monotonic() - started
        share = (child.demand_ns() - used) / 1e9 / passed
        # The kernel counts a wait for the processor when it ends: on a busy machine more is to
        # come.
        if share > IDLE_SHARE or passed > LONGEST_IDLE_S or not _wants_to_run(child):
            return share


def _wants_to_run(child: Child) -> bool:
    """Does any thread of this process and its descendants run, or wait for a processor?"""
    for stat in child.thread_files("stat"):
        with suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[:1] == ["R"]:
                return True
    return False
