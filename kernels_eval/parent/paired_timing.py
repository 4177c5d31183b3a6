"""The parent's side of the timing of one candidate: which inputs, in turn with whom (the reference,
and where it is asked for the compiled reference), bounded by which clock."""

from __future__ import annotations

import secrets
import statistics
import time
from typing import Any

from kernels_eval.checks.timing import MOST_CALLS, ImplausibleTime, measure
from kernels_eval.config import EvalConfig
from kernels_eval.devices import throttled
from kernels_eval.parent.compiled_baseline import CompiledReference, Lost
from kernels_eval.parent.handles import CandidateProcess, ReferenceProcess
from kernels_eval.parent.messages import Sample, Stop, believe_form
from kernels_eval.records import Timing

SETS = (3, 64)
"""Fewest and most sets of inputs that timed calls rotate over."""
LARGE_BYTES = 2 << 30  # above this, two sets must do
DRAW_S = 0.3  # time for drawing one side's sets
# most calls of a round of the bound: what is late once in a round must weigh little on each of them
UNSEEN = 512
BOUND_NS = 1e7
BOUND_REPEATS = (2, 5)
# calls that take long are bounded by fewer rounds: a delay of the machine weighs little on them
BOUND_S = 0.06
COLD_NS, COLD_SHARE = 4_000, 0.25
"""Inputs that no call has seen are cold for the processor that launches the kernels, too. On an
H200 that is 3 us a call, which weighs on calls of 13 us. Taken off the bound, but never more than
this share of it."""
MESSAGE_NS = 300_000  # the most that is taken off for sending a command and its answer


class PairedClock:
    """Times a candidate against its reference. `idle_samples` counts timed samples in which no
    custom kernel was called."""

    def __init__(
        self,
        reference: ReferenceProcess,
        process: CandidateProcess,
        config: EvalConfig,
        device: str,
        compiled: CompiledReference | None = None,
    ) -> None:
        self.reference, self.process, self.config, self.compiled = (
            reference,
            process,
            config,
            compiled,
        )
        self.on_gpu = device.startswith("cuda")
        self.cpu_clock = None if self.on_gpu else process.child.cpu_clock()
        self.idle_samples = 0

    def measure(self) -> tuple[Timing, dict[str, Any]]:
        """The timing, and how the last answer to unseen inputs compares. Raises Stop with
        implausible_time."""
        seeds = self._draw()
        self.sets = len(seeds)
        try:
            timing = self._measured(seeds)
        except ImplausibleTime as error:
            raise Stop("implausible_time", str(error)) from error
        after = self.process.compare(
            self.process.ask("last_output"), self.reference.after, self.reference
        )
        self._raise_for_bandwidth(timing)
        return timing, after

    def _measured(self, seeds: list[int]) -> Timing:
        """All sides in turn. A compiled reference that is lost on the way leaves the other two,
        from the start."""
        side = self.compiled.side(seeds) if self.compiled else None
        while True:
            try:
                timing = measure(
                    lambda calls: self.reference.ask("sample", calls=calls)["ns"],
                    self._candidate_sample,
                    self.config.timing,
                    bound=self._bound,
                    throttled=self._throttled,
                    most_calls=self._most_calls(),
                    compiled=side,
                )
                break
            except Lost:
                side = None
        return (
            timing
            if self.compiled is None or side
            else timing.model_copy(update={"compiled": self.compiled.absent()})
        )

    def _draw(self) -> list[int]:
        """Give both sides the same sets of inputs: as many as memory and time allow. Returns their
        seeds."""
        least, most = SETS
        if self.reference.input_bytes + self.reference.output_bytes > LARGE_BYTES:
            least = 2
        seeds = [secrets.randbits(31) for _ in range(most)]
        one_set_s = self.reference.ask("timing_inputs", seeds=seeds[:least])["seconds"] / least
        room = self.config.timing.input_bytes // max(
            1, self.reference.input_bytes + self.reference.output_bytes
        )
        count = int(max(least, min(most, room, DRAW_S / max(one_set_s, 1e-6))))
        if count > least:
            self.reference.ask("timing_inputs", seeds=seeds[:count])
        self.process.ask("timing_inputs", seeds=seeds[:count])
        self.unseen = int(
            max(2, min(UNSEEN, room, DRAW_S / BOUND_REPEATS[1] / max(one_set_s, 1e-6)))
        )
        return seeds[:count]

    def _most_calls(self) -> int:
        """The most calls in a sample. Where all sets of inputs fit into the GPU's cache, each is
        called once after it was flushed."""
        task_bytes = self.reference.input_bytes + self.reference.output_bytes
        return (
            self.sets
            if self.on_gpu and self.sets * task_bytes < 2 * self.reference.cache_bytes
            else MOST_CALLS
        )

    def _candidate_sample(self, calls: int) -> int:
        sample: Sample = believe_form(Sample, self.process.ask("sample", calls=calls))
        if sample.custom_calls < calls:
            self.idle_samples += 1
        return sample.ns

    def _bound(self, call_ns: float) -> float:
        """Nanoseconds a call on inputs that the candidate has never seen, by clocks it cannot
        reach: the best of a few rounds.

        How many calls a round makes is drawn, so which one is the last, whose answer is compared,
        cannot be known before.
        """
        self.reference.ask(
            "timing_inputs", seeds=[]
        )  # its samples are taken: large inputs need the room
        if self.compiled:
            self.compiled.rest()
        wanted = min(max(self.sets, self.unseen), max(2, BOUND_NS / max(call_ns, 1.0)))
        overhead = self._message_ns()
        bounds: list[float] = []
        spent = 0.0
        least, most = BOUND_REPEATS
        while len(bounds) < least or (len(bounds) < most and spent < BOUND_S * 1e9):
            calls = max(2, round(wanted * (0.7 + 0.6 * secrets.randbelow(1001) / 1000)))
            seeds = [*(secrets.randbits(31) for _ in range(calls - 1)), self.reference.after.seed]
            self.process.ask("unseen", seeds=seeds)
            wall, cpu = time.perf_counter_ns(), self.cpu_clock() if self.cpu_clock else 0
            self.process.ask("run_unseen")
            seen = [time.perf_counter_ns() - wall] + (
                [self.cpu_clock() - cpu] if self.cpu_clock else []
            )
            passed = max(1.0, min(seen) - overhead) / calls
            bounds.append(passed - min(COLD_NS, COLD_SHARE * passed) if self.on_gpu else passed)
            spent += seen[0]
        return min(bounds)

    def _message_ns(self) -> float:
        """Nanoseconds of a question that asks for nothing."""
        taken = []
        for _ in range(5):
            started = time.perf_counter_ns()
            self.process.ask("sample", calls=0)
            taken.append(time.perf_counter_ns() - started)
        return min(MESSAGE_NS, statistics.median(taken))

    def _raise_for_bandwidth(self, timing: Timing) -> None:
        """Outputs and used inputs must cross the memory bus, unless everything fits into the cache.
        Raises Stop with implausible_time."""
        peak, task_bytes = (
            self.reference.peak_bytes_per_s,
            self.reference.input_bytes + self.reference.output_bytes,
        )
        if (
            not peak
            or self.sets * task_bytes < 4 * self.reference.cache_bytes
            or task_bytes < self.reference.cache_bytes
        ):
            return
        share_ms = 1e3 * self.config.timing.bandwidth_share / peak
        if timing.candidate_ms >= share_ms * task_bytes:
            # slow enough for all of its bytes; which of them it must move takes most of a second to
            # find out
            return
        least_ms = 1e3 * self.reference.least_bytes() / peak
        if timing.candidate_ms < self.config.timing.bandwidth_share * least_ms:
            raise Stop(
                "implausible_time",
                f"{timing.candidate_ms:.4f} ms a call, but its bytes need {least_ms:.4f} ms at the"
                f" {peak / 1e9:.0f} GB/s of this memory",
            )

    def _throttled(self) -> bool | None:
        if not self.on_gpu:
            return None
        return throttled()
