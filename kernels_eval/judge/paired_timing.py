"""The parent's half of timing a candidate: its inputs, its turns with the reference, and the
bounding clock.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from statistics import median

import numpy as np

from kernels_eval.config import (
    ACCUSED_SHARE,
    ALONE_MESSAGE_NS,
    ALONE_ROUNDS,
    ANSWER_NS,
    AROUND_FACTOR,
    AROUND_SAMPLES,
    AROUND_SHARE,
    BANDWIDTH_SHARE,
    BURNT_SHARE,
    CLOCK_BOUND_SHARE,
    COMPARED_UNSEEN,
    DOUBTED,
    DRAW_SETS_S,
    DRAW_SETS_SHARE,
    FEWEST_NEW_DRAWS,
    FEWEST_ROUNDS,
    FEWEST_SETS,
    KEPT_OF,
    KEPT_SAMPLES,
    LARGE_TASK_BYTES,
    LONG_S,
    MOST_CALLS_PER_SAMPLE,
    MOST_DRIFT,
    MOST_ROUNDS,
    MOST_SETS,
    MOST_UNSEEN,
    NEW_DRAWS,
    NEW_DRAWS_S,
    NEW_SAMPLE_NS,
    REMEASURED,
    REVEALING_CALLS,
    REVEALING_ROUND_NS,
    ROUNDS_S,
    SPOILED,
    SPOILED_S,
    TELLING_SHARE,
    TIMED_INPUT_BYTES,
    UNSEEN_BYTES,
    UNSEEN_DRAW_S,
    UNSEEN_ROUND_NS,
    UNSEEN_TRIALS,
)
from kernels_eval.devices import throttled
from kernels_eval.judge.attribution import look_at_samples, name_work
from kernels_eval.judge.candidate_handle import CandidateProcess
from kernels_eval.judge.comparison import accepted
from kernels_eval.judge.explanation import explained
from kernels_eval.judge.messages import Stop
from kernels_eval.judge.reference_handle import ReferenceProcess
from kernels_eval.judge.timing import (
    ImplausibleTime,
    Sampler,
    contended,
    measure,
    price_of_new_inputs,
    slowed,
    unsettled,
)
from kernels_eval.judge.unseen_rounds import UnseenRounds
from kernels_eval.protocol import (
    DECLARED,
    CompareUnseen,
    Comparison,
    DrawTimingInputs,
    Forget,
    RecordSample,
    Sample,
    ShowKept,
    SpoilOutputs,
    TakeTimingInputs,
    counted_ns,
)
from kernels_eval.records import Reason, Timing
from kernels_eval.sandbox.child import Child, on_one_core

UNSEEN_NAME, TIMED_NAME = "unseen", "timed"


def draw_sets(
    reference: ReferenceProcess, distribution: str = DECLARED, *, wanted: int = 0
) -> tuple[list[int], float]:
    """Draw as many sets of inputs as memory and time allow, or `wanted` ones for which there is
    memory; return seeds, and seconds per set."""
    least = 2 if reference.task_bytes > LARGE_TASK_BYTES else FEWEST_SETS
    seeds = [secrets.randbits(31) for _ in range(MOST_SETS)]
    drawn = reference.request(DrawTimingInputs(seeds=seeds[:least], distribution=distribution))
    one_set_s = max(drawn.seconds / least, 1e-6)
    room = TIMED_INPUT_BYTES // max(1, reference.task_bytes)
    most_s = min(DRAW_SETS_S, DRAW_SETS_SHARE * reference.config.timing.max_s)
    count = int(max(least, min(MOST_SETS, room, max(wanted, most_s / one_set_s))))
    if count > least:
        reference.request(DrawTimingInputs(seeds=seeds[:count], distribution=distribution))
    return seeds[:count], one_set_s


def most_calls(reference: ReferenceProcess, sets: int) -> int:
    """Most calls of a sample; sets that all fit into the GPU's cache are called once per flush."""
    cached = sets * reference.task_bytes < 2 * reference.loaded.cache_bytes
    most = sets if reference.device.startswith("cuda") and cached else MOST_CALLS_PER_SAMPLE
    return min(most, reference.loaded.longest_run)


class PairedClock:
    """Times a candidate against its reference. `idle_samples`: samples and rounds with a call
    without custom kernel. `contended`: others had the processors that several threads wanted, which
    spin while they wait for each other: no clock leaves that out, and it slows one side alone.
    `holds_outputs`: samples keep some of their outputs, to be compared.
    """

    holds_outputs = False

    def __init__(self, process: CandidateProcess) -> None:
        self.process, self.reference = process, process.reference
        self.config = process.config.timing
        self.on_gpu = process.reference.device.startswith("cuda")
        self.by_processor = process.by_processor
        self.idle_samples = 0
        self.wanted_sets = 0
        self.contended = False
        self.needs_copy = process.needs_copy
        """what a round copies of its outputs is then a part of the work"""
        self.spoils_outputs = not process.may_overwrite and not self.reference.loaded.effects
        self.burnt_ns = self.waited_ns = 0
        self.around_ns: list[int] = []
        """Processor time of the reference's samples that is no work of its calls"""
        task = process.reference.expected.task
        self.varied = [
            trial.distribution
            for trial in task.trials
            if trial.name in UNSEEN_TRIALS and trial.regular and not task.shapes_vary
        ]
        """Rounds have memory for outputs of the declared shapes."""
        secrets.SystemRandom().shuffle(self.varied)

    def measure(self) -> Timing:
        """The timing. Raises Stop for understated time, work in the reference's turn, or wrong
        answers once timed.
        """
        self.process.request_unread(Forget())
        try:
            timing = self._measure_believed()
            # in case the machine is quieter now; where a wide interval will do, flags are enough
            for _ in range(REMEASURED if self.config.interval_width < MOST_DRIFT else 0):
                if self.contended or unsettled(timing, self.config):
                    timing = self._measure_believed()
        except ImplausibleTime as error:
            raise Stop(Reason.IMPLAUSIBLE_TIME, str(error)) from error
        if self.burnt_ns > BURNT_SHARE * self.process.config.threads * self.waited_ns:
            raise Stop(Reason.BACKGROUND_WORK, "the process computes while the reference is timed")
        self._raise_for_bandwidth(timing)
        self.process.request_unread(Forget())  # a device's memory is held by who has it mapped
        return timing

    def check_idle_samples(self) -> None:
        """Raise Stop where a timed sample ran without the candidate's kernels."""
        if self.idle_samples:
            raise Stop(
                Reason.NO_CUSTOM_KERNEL,
                f"no custom kernel ran in {self.idle_samples} timed samples",
            )

    def _measure_believed(self) -> Timing:
        """Raises ImplausibleTime for a time that is so in each of several measurements: a busy
        machine makes an honest one so now and then. The later ones rotate over as many inputs as a
        round has: fewer may stay in a cache."""
        for _ in range(DOUBTED):
            with suppress(ImplausibleTime):
                return self._measure_once()
            self.wanted_sets = self.unseen
        return self._measure_once()

    def _measure_once(self) -> Timing:
        self._draw()
        self.works: list[float] = []
        """Nanoseconds of a call in each round on unseen inputs"""
        self.reported_ns = self.counted_ns = 0
        self.price = 1.0
        confirms = self.process.config.level == "confirm"
        self.holds_outputs = confirms and self.spoils_outputs
        shared = self.on_gpu or self.process.config.threads == 1
        children = [self.reference.child, self.process.child]
        before = [] if shared else [x.demand_ns() for x in children]
        with on_one_core(children if shared else []):
            timing = measure(
                self._reference_sample,
                self._candidate_sample,
                self.config,
                bound=self._bound_on_new_inputs if confirms else None,
                watch=self._watch if confirms else lambda calls: None,
                begin=self.process.renew,
                throttled=throttled if self.on_gpu else lambda: None,
                most_calls=most_calls(self.reference, self.sets),
            )
        if self.reported_ns < ACCUSED_SHARE * self.counted_ns:
            raise ImplausibleTime(
                f"reports {self.reported_ns / 1e6:.3f} ms for samples in which its process computed"
                f" for {self.counted_ns / 1e6:.3f} ms"
            )
        timing = slowed(timing, self.price) if self.price > 1 else timing
        after = [x.demand_ns() for x in children] if before else []
        self.contended = any(map(contended, before, after))
        return timing

    def _draw(self) -> None:
        self.seeds, one_set_s = draw_sets(
            self.reference, self.reference.timed_distribution, wanted=self.wanted_sets
        )
        self.sets = len(self.seeds)
        self._give_inputs(self.seeds)
        large = self.reference.task_bytes > LARGE_TASK_BYTES
        self.fewest = 1 if large else 2
        room = TIMED_INPUT_BYTES // max(1, self.reference.task_bytes)
        if self.on_gpu:
            room = max(room, UNSEEN_BYTES // max(1, self.reference.task_bytes))
        self.unseen = int(max(self.fewest, min(MOST_UNSEEN, room, UNSEEN_DRAW_S / one_set_s)))
        if not large:
            self.unseen = max(REVEALING_CALLS, self.unseen)
        self.unseen = min(self.unseen, self.reference.loaded.longest_run)
        self.fewest = min(self.fewest, self.unseen)

    def _give_inputs(self, seeds: list[int]) -> None:
        reference = self.reference
        inputs, descriptor = reference.memory.draw(seeds, reference.timed_distribution)
        self.process.request_unread(TakeTimingInputs(inputs=inputs), (descriptor,))
        self.given = True

    def _restore_inputs(self) -> None:
        """Draw the inputs of samples again, for which rounds needed the room."""
        if not self.given:
            self._draw_own(self.seeds)
            self._give_inputs(self.seeds)

    def _draw_own(self, seeds: list[int]) -> None:
        distribution = self.reference.timed_distribution
        self.reference.request(DrawTimingInputs(seeds=seeds, distribution=distribution))

    def _candidate_sample(self, calls: int) -> int:
        self._restore_inputs()
        kept = self.holds_outputs and not secrets.randbelow(KEPT_OF)
        told = {"copied": self.needs_copy, "kept": kept}
        asked = self._sample(calls).model_copy(update=told)
        used = self._processor_ns(self.process.child)
        sample = self.process.request(asked)
        used = self._processor_ns(self.process.child) - used
        self.idle_samples += sample.custom_calls < calls
        threads = self.process.config.threads
        if not self.by_processor or threads > 1 or self.reference.loaded.effects:
            # of threads, time that passed may count; a model may have been made anew
            return sample.ns
        counted = max(sample.ns, round(used - self._most_around(used)))
        self.reported_ns, self.counted_ns = self.reported_ns + sample.ns, self.counted_ns + counted
        return counted

    def _watch(self, calls: int) -> None:
        """Name what a sample runs that the candidate cannot tell from those that count."""
        name_work(self.process, self.process.request(RecordSample(calls=calls)))
        if self.by_processor:
            look_at_samples(self.process, calls)

    def _reference_sample(self, calls: int) -> int:
        self._restore_inputs()
        children = self.process.child, self.reference.child
        began = [self._processor_ns(child) for child in children]
        with self.reference.trying_draws([self.reference.timed_distribution]):
            sample = self.reference.request(self._sample(calls)).ns
        used, own = (
            self._processor_ns(child) - then for child, then in zip(children, began, strict=True)
        )
        self.burnt_ns += max(0, used - ANSWER_NS)
        self.around_ns.append(own - sample)
        self.waited_ns += sample
        return sample

    def _most_around(self, used: int) -> float:
        """Processor time of a candidate's sample that may be no work of its calls, by what the
        reference's have of it: what is beyond counts, whatever the candidate reports."""
        usual = median(self.around_ns[-AROUND_SAMPLES:]) if self.around_ns else used
        return AROUND_FACTOR * usual + AROUND_SHARE * used + ANSWER_NS

    def _sample(self, calls: int) -> Sample:
        """By the clock of the rounds: else a busy machine would forgive what it adds to samples."""
        return Sample(calls=calls, by_processor=self.by_processor)

    def _processor_ns(self, child: Child) -> int:
        return child.processor_ns() if self.by_processor else 0

    # -- on new inputs -----------------------------------------------------------------------------

    def _bound_on_new_inputs(self, call_ns: float, reference_ns: float) -> tuple[float, float]:
        """The bound, once it is known what new inputs cost, while samples have theirs."""
        held = self._compare_held() if self.holds_outputs else []
        if not self.works and not self.reference.loaded.remembers:
            calls = int(np.clip(NEW_SAMPLE_NS / max(call_ns, 1), 1, self.sets))
            self.price = self._price(self._candidate_sample, self._give_inputs, calls)
            if self.price > 1:
                own = self._price(self._reference_sample, self._draw_own, calls)
                self.price = max(1.0, self.price / own)
        bound = self._bound(call_ns, reference_ns)
        for found in held:  # last: rounds tell whether an output is overwritten, or an input
            self._judge_unseen(found, self.reference.timed_distribution, TIMED_NAME)
        return bound

    def _compare_held(self) -> list[Comparison]:
        """Compare the outputs that samples have held."""
        reference, process = self.reference, self.process
        self.holds_outputs = False
        rounds = UnseenRounds(process, KEPT_SAMPLES)
        shown = process.request(ShowKept(into="unseen"))
        places = shown.places[:KEPT_SAMPLES]
        if not places:
            return []
        for form in [] if self.needs_copy else shown.forms:  # a copy is a list
            process.check_form(form, reference.trials[0])
        seeds = [self.seeds[place % self.sets] for place in places]
        names = [reference.timed_distribution] * len(seeds)
        with process.child.stopped(process.child.family()):
            rounds.draw(seeds, names)
            rounds.expect()
            request = CompareUnseen(
                positions=[*range(len(seeds))], farthest=0, seeds=seeds, distributions=names
            )
            return reference.request(request).found

    def _price(self, sample: Sampler, give: Callable[[list[int]], object], calls: int) -> float:
        """How many times as long samples take on new inputs as on those that come again. Both are
        drawn and given in the same way, to the same places: a candidate that keeps answers knows
        them apart by their values alone."""
        seen, new = list[int](), list[int]()
        began = self._worked_ns()
        for number in range(NEW_DRAWS):
            if number >= FEWEST_NEW_DRAWS and self._worked_ns() - began > NEW_DRAWS_S * 1e9:
                break
            others = [secrets.randbits(31) for _ in range(calls)]
            kinds = [(self.seeds[:calls], seen), (others, new)]
            for seeds, found in secrets.SystemRandom().sample(kinds, 2):
                give(seeds)
                found.append(sample(calls))
        return price_of_new_inputs(seen, new)

    def _worked_ns(self) -> int:
        """By a clock that others on a busy machine do not move, where there is one."""
        if not self.by_processor:
            return time.perf_counter_ns()
        return sum(each.child.processor_ns() for each in (self.reference, self.process))

    # -- by the parent's clock ---------------------------------------------------------------------

    def _bound(self, call_ns: float, reference_ns: float) -> tuple[float, float]:
        """Nanoseconds of a call on unseen inputs: the least that was seen, and the best estimate.

        What a round costs by itself, one without work tells, at the same time and place.
        """
        if self.spoils_outputs and not self.works:  # once is enough for all attempts
            self.process.request_unread(SpoilOutputs(calls=SPOILED, seconds=SPOILED_S))
        # Samples are taken, and large inputs need the room.
        self.reference.request(DrawTimingInputs(seeds=[]))
        self.process.request_unread(Forget())
        self.given = False
        reported = max(call_ns, 1.0)
        fewest = max(
            self.fewest, int(min(REVEALING_CALLS, self.unseen, REVEALING_ROUND_NS / reported))
        )
        wanted = min(self.unseen, max(fewest, UNSEEN_ROUND_NS / reported))
        most_calls = max(fewest, round(1.3 * wanted))  # and no more room: outputs can be gigabytes
        self.rounds = UnseenRounds(self.process, most_calls)
        works, rounds, spent = self.works, 0, 0.0
        while (
            rounds < MOST_ROUNDS and spent < (LONG_S if rounds < FEWEST_ROUNDS else ROUNDS_S) * 1e9
        ):
            calls = max(fewest, round(wanted * (0.7 + 0.6 * secrets.randbelow(1001) / 1000)))
            calls = min(calls, self.reference.loaded.longest_run)
            cost, passed = self._round(calls, thorough=not works)
            rounds, spent = rounds + 1, spent + passed
            works.append((passed - cost) / calls)
            best = sorted(works)[min(len(works) - 1, max(1, len(works) // 4))]
            if rounds >= FEWEST_ROUNDS and call_ns >= CLOCK_BOUND_SHARE * best:
                break
        # a copy takes longer in a round than in a sample, and is no lie
        tells = not self.needs_copy and best * calls >= TELLING_SHARE * passed
        least = min(works) - (ALONE_MESSAGE_NS if calls == 1 else 0)
        return least if tells else 0.0, max(best, self._alone(reference_ns))

    def _alone(self, reference_ns: float) -> float:
        """The best estimate of a call alone, as a round's calls could share work. It replaces a
        time, and rejects none."""
        if reference_ns < ALONE_MESSAGE_NS:
            return 0.0
        rounds = [self._round(1) for _ in range(ALONE_ROUNDS)]
        return min(passed - cost for cost, passed in rounds) - ALONE_MESSAGE_NS

    def _round(self, calls: int, *, thorough: bool = False) -> tuple[float, float]:
        """Nanoseconds of a round without work, and of the candidate's on the same inputs;
        `thorough`: look for the outputs that are farthest off. Raises Stop for outputs drawn after
        writing.
        """
        reference, child = self.reference, self.process.child
        seeds = [secrets.randbits(31) for _ in range(calls)]
        names = [reference.timed_distribution] * calls
        positions = secrets.SystemRandom().sample(range(calls), min(calls, COMPARED_UNSEEN))
        if calls > 1 and self.varied:  # each in turn, and always compared
            self.varied.append(self.varied.pop(0))
            names[positions[0]] = self.varied[0]
        self.process.renew()
        family, forms = child.family(), self.rounds.forms(copies=not self.needs_copy)
        with child.stopped(family):
            self.rounds.draw(seeds, names, keeps=thorough)
            began = self._now(reference.child)
            self.rounds.idle(forms)
            cost = self._since(reference.child, began)
            self.rounds.expect()
            began = self._now(child)
        with ExitStack() as stopped:
            answer = self.rounds.run()
            stopped.enter_context(child.stopped(family))  # later writes fail
            passed = self._since(child, began)
            report = self.rounds.report(answer)
            layout = max(form.layout for form in report.forms)
            if layout > reference.loaded.layout and not self.needs_copy:
                self.needs_copy, cost = True, 0.0  # only once it is timed
            request = CompareUnseen(
                positions=positions,
                farthest=COMPARED_UNSEEN if thorough else 0,
                seeds=seeds,
                distributions=names,
            )
            compared = reference.request(request)
        self.idle_samples += report.custom_calls < calls
        for position, found in zip(compared.positions, compared.found, strict=True):
            self._judge_unseen(found, names[position])
        return cost, passed

    def _now(self, child: Child) -> tuple[int, int]:
        return time.perf_counter_ns(), self._processor_ns(child)

    def _since(self, child: Child, began: tuple[int, int]) -> float:
        passed, used = (now - then for now, then in zip(self._now(child), began, strict=True))
        threads = self.process.config.threads
        return float(counted_ns(passed, used, threads) if self.by_processor else passed)

    def _judge_unseen(self, found: Comparison, distribution: str, name: str = UNSEEN_NAME) -> None:
        reference = self.reference
        trial = replace(reference.trials[0], name=name, distribution=distribution)
        outcome = accepted(trial, found, self.process)
        if outcome is not Reason.OK:
            self.process.draft.outputs_match = False
            raise explained(trial, outcome, found, self.process)
        if found.mutates_inputs:
            raise Stop(Reason.INPUT_MUTATED, "changes its inputs in place once it is timed")

    def _raise_for_bandwidth(self, timing: Timing) -> None:
        """Raise Stop where outputs and used inputs outran the memory bus, and do not fit the
        cache.
        """
        task_bytes, share = self.reference.task_bytes, BANDWIDTH_SHARE
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
