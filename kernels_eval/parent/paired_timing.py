"""The parent's half of timing a candidate: which inputs, in turn with whom (the reference, and the
compiled reference where it is asked for), bounded by which clock."""

from __future__ import annotations

import secrets
import statistics
import time
from contextlib import suppress

from kernels_eval.checks.timing import MOST_CALLS, CompiledSampler, ImplausibleTime, measure
from kernels_eval.checks.trials import Comparison
from kernels_eval.devices import throttled
from kernels_eval.parent.candidate_handle import CandidateProcess
from kernels_eval.parent.compiled_baseline import CompiledReference, Lost
from kernels_eval.parent.messages import SampleReport, Stop
from kernels_eval.records import Reason, Timing

SETS = (3, 64)
"""Fewest and most sets of inputs that timed calls rotate over."""
LARGE_BYTES = 2 << 30  # above this, two sets must do
DRAW_S = 0.3  # time for drawing the sets of one process
# most calls of a round of the bound: a delay once in a round must weigh little on each of them
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
        self, process: CandidateProcess, compiled: CompiledReference | None = None
    ) -> None:
        self.process, self.reference, self.compiled = process, process.reference, compiled
        self.config = process.config.timing
        self.on_gpu = process.reference.device.startswith("cuda")
        self.by_processor = not self.on_gpu and process.child.processor_ns() > 0
        self.idle_samples = 0

    def measure(self) -> tuple[Timing, Comparison]:
        """The timing, and how the last answer to unseen inputs compares. Raises Stop
        (IMPLAUSIBLE_TIME)."""
        seeds = self._draw()
        self.sets = len(seeds)
        try:
            timing = self._measured(seeds)
        except ImplausibleTime as error:
            raise Stop(Reason.IMPLAUSIBLE_TIME, str(error)) from error
        last = self.process.tell("last_output")
        after = self.process.compare(last, self.reference.after)
        self._raise_for_bandwidth(timing)
        return timing, after

    def _measured(self, seeds: list[int]) -> Timing:
        """All processes in turn. Where the compiled reference is lost on the way, the other two are
        timed once more from the start."""
        if self.compiled and (sampler := self.compiled.sampler(seeds)):
            with suppress(Lost):
                return self._paired(sampler)
        timing = self._paired(None)
        if self.compiled is None:
            return timing
        return timing.model_copy(update={"compiled": self.compiled.absent()})

    def _paired(self, compiled: CompiledSampler | None) -> Timing:
        # Where all sets of inputs fit into the GPU's cache, each is called once after it was
        # flushed.
        cached = self.sets * self.reference.task_bytes < 2 * self.reference.loaded.cache_bytes
        return measure(
            lambda calls: int(self.reference.ask("sample", calls=calls)["ns"]),
            self._candidate_sample,
            self.config,
            bound=self._bound,
            throttled=throttled if self.on_gpu else lambda: None,
            most_calls=self.sets if self.on_gpu and cached else MOST_CALLS,
            compiled=compiled,
        )

    def _draw(self) -> list[int]:
        """Give both processes the same sets of inputs: as many as memory and time allow. Returns
        their seeds."""
        least, most = SETS
        if self.reference.task_bytes > LARGE_BYTES:
            least = 2
        seeds = [secrets.randbits(31) for _ in range(most)]
        drawn = self.reference.ask("timing_inputs", seeds=seeds[:least])
        one_set_s = max(drawn["seconds"] / least, 1e-6)
        room = self.config.input_bytes // max(1, self.reference.task_bytes)
        count = int(max(least, min(most, room, DRAW_S / one_set_s)))
        if count > least:
            self.reference.ask("timing_inputs", seeds=seeds[:count])
        self.process.tell("timing_inputs", seeds=seeds[:count])
        self.unseen = int(max(2, min(UNSEEN, room, DRAW_S / BOUND_REPEATS[1] / one_set_s)))
        return seeds[:count]

    def _candidate_sample(self, calls: int) -> int:
        sample = self.process.ask("sample", SampleReport, calls=calls)
        self.idle_samples += sample.custom_calls < calls
        return sample.ns

    def _bound(self, call_ns: float) -> float:
        """Nanoseconds a call on inputs that the candidate has never seen, by clocks it cannot
        reach: the best of a few rounds.

        How many calls a round makes is drawn, so which one is the last, whose answer is compared,
        cannot be known before.
        """
        # The reference's samples are taken, and large inputs need the room.
        self.reference.ask("timing_inputs", seeds=[])
        if self.compiled:
            self.compiled.release_inputs()
        wanted = min(max(self.sets, self.unseen), max(2, BOUND_NS / max(call_ns, 1.0)))
        overhead = self._message_ns()
        bounds: list[float] = []
        spent = 0.0
        least, most = BOUND_REPEATS
        while len(bounds) < least or (len(bounds) < most and spent < BOUND_S * 1e9):
            calls = max(2, round(wanted * (0.7 + 0.6 * secrets.randbelow(1001) / 1000)))
            seeds = [*(secrets.randbits(31) for _ in range(calls - 1)), self.reference.after.seed]
            self.process.tell("unseen", seeds=seeds)
            wall, cpu = time.perf_counter_ns(), self._processor_ns()
            self.process.tell("run_unseen")
            passed = time.perf_counter_ns() - wall
            used = self._processor_ns() - cpu if self.by_processor else passed
            call = max(1.0, min(passed, used) - overhead) / calls
            bounds.append(call - min(COLD_NS, COLD_SHARE * call) if self.on_gpu else call)
            spent += passed
        return min(bounds)

    def _processor_ns(self) -> int:
        return self.process.child.processor_ns() if self.by_processor else 0

    def _message_ns(self) -> float:
        """Nanoseconds of a question that asks for nothing."""
        taken = []
        for _ in range(5):
            started = time.perf_counter_ns()
            self.process.tell("sample", calls=0)
            taken.append(time.perf_counter_ns() - started)
        return min(MESSAGE_NS, statistics.median(taken))

    def _raise_for_bandwidth(self, timing: Timing) -> None:
        """Outputs and used inputs must cross the memory bus, unless everything fits into the cache.
        Raises Stop (IMPLAUSIBLE_TIME)."""
        task_bytes, share = self.reference.task_bytes, self.config.bandwidth_share
        peak, cache = self.reference.loaded.peak_bytes_per_s, self.reference.loaded.cache_bytes
        if not peak or task_bytes < cache or self.sets * task_bytes < 4 * cache:
            return
        # Slow enough for all of its bytes? Which of them it must move takes most of a second to
        # find out.
        if timing.candidate_ms >= 1e3 * share * task_bytes / peak:
            return
        least_ms = 1e3 * self.reference.least_bytes() / peak
        if timing.candidate_ms < share * least_ms:
            raise Stop(
                Reason.IMPLAUSIBLE_TIME,
                f"{timing.candidate_ms:.4f} ms a call, but its bytes need {least_ms:.4f} ms at the"
                f" {peak / 1e9:.0f} GB/s of this memory",
            )
