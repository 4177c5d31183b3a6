"""The bounds on a reported time: the parent's clocks, and the memory's bandwidth, where finding out
which bytes a task needs is for those that come near."""

import subprocess
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from kernels_eval.config import TimingConfig
from kernels_eval.judge import paired_timing
from kernels_eval.judge.messages import Stop
from kernels_eval.judge.paired_timing import PairedClock
from kernels_eval.judge.timing import price_of_new_inputs
from kernels_eval.protocol import Forget, PackedValues, Sample, TakeTimingInputs

PEAK, CACHE = 1e12, 50_000_000
INPUT, OUTPUT = 600_000_000, 400_000_000  # bytes: 1 ms at PEAK

PACKED = PackedValues(on_device=False, size=64, packed=[], count=2, stride=0)


class Reference(SimpleNamespace):
    asked, timed_distribution = 0, "declared"

    def least_bytes(self):
        self.asked += 1
        return self.used

    def trying_draws(self, distributions):
        return nullcontext()


def clock(used, cache=CACHE):
    made = object.__new__(PairedClock)
    made.config, made.sets, made.needs_copy = TimingConfig(), 4, False
    made.spoils_outputs, made.around_ns = False, []
    made.reported_ns = made.counted_ns = 0
    made.process = SimpleNamespace(may_overwrite=False)
    loaded = SimpleNamespace(peak_bytes_per_s=PEAK, cache_bytes=cache, layout=0, longest_run=10_000)
    loaded.effects = None
    memory = SimpleNamespace()
    made.reference = Reference(loaded=loaded, memory=memory, task_bytes=INPUT + OUTPUT, used=used)
    return made


@pytest.mark.parametrize(
    "candidate_ms, used, implausible, asked",
    [
        (
            0.51,
            INPUT + OUTPUT,
            False,
            0,
        ),  # half of the peak's time for all bytes: plausible whatever is used
        (0.49, INPUT + OUTPUT, True, 1),
        (0.49, OUTPUT, False, 1),  # a task that uses little of its inputs
        (0.19, OUTPUT, True, 1),
    ],
)
def test_faster_than_half_of_the_peak(candidate_ms, used, implausible, asked):
    made = clock(used)
    timing = SimpleNamespace(candidate_ms=candidate_ms)
    if implausible:
        with pytest.raises(Stop) as stop:
            made._raise_for_bandwidth(timing)
        assert stop.value.finding.reason == "implausible_time"
    else:
        made._raise_for_bandwidth(timing)
    assert made.reference.asked == asked


def test_what_fits_into_the_cache_is_not_bounded_by_memory():
    made = clock(INPUT + OUTPUT, cache=2 * (INPUT + OUTPUT))
    made._raise_for_bandwidth(SimpleNamespace(candidate_ms=0.001))
    assert made.reference.asked == 0


class Rounds(SimpleNamespace):
    """What both processes are asked in a round, each with the time that it takes."""

    def take(self, ms, child):
        def asked(*_, **__):
            assert self.child.stands_still is (child == "reference")
            self.now.wall += 4 * ms
            self.now.used[child] += ms
            return {}

        return asked


@pytest.mark.parametrize(
    "by_processor, threads, others, shares, cost, passed",
    [
        (True, 1, 0, False, 1, 5),
        (True, 1, 20, False, 1, 25),
        (True, 2, 20, False, 1, 14),
        (False, 1, 20, False, 4, 14),
        (True, 1, 0, True, 0, 5),
    ],
)
def test_a_round_without_work_and_one_of_the_candidate(
    monkeypatch, by_processor, threads, others, shares, cost, passed
):
    """Time in which others had the processor does not count where the processor's is known; that of
    other threads of the candidate does, unless it was granted them. The
    candidate stands still until it is asked, and its clock goes on until it is stopped again. What
    is copied of an output without memory of its own is work, from the round on that shows it."""
    made, now = clock(0), SimpleNamespace(wall=0, used={"reference": 0, "candidate": 0})

    class Stopped(SimpleNamespace):
        stands_still = False

        @contextmanager
        def stopped(self, family):
            assert family == [7], "looking for them takes time, in which they would work"
            if rounds.asked:  # it has answered, and continues
                now.wall, now.used["candidate"] = now.wall + 2, now.used["candidate"] + 2
            self.stands_still = True
            yield
            self.stands_still = False

    children = {
        name: Stopped(family=lambda: [7], processor_ns=lambda name=name: now.used[name])
        for name in now.used
    }
    rounds = Rounds(now=now, child=children["candidate"], asked=False)
    rounds.draw, rounds.expect = rounds.take(50, "reference"), rounds.take(20, "reference")
    rounds.idle, run = rounds.take(1, "reference"), rounds.take(3, "candidate")
    rounds.forms = lambda copies: []

    def run_threads():
        now.used["candidate"] += others
        run()
        rounds.asked = True

    rounds.run = run_threads
    rounds.report = lambda _: SimpleNamespace(
        custom_calls=2, forms=[SimpleNamespace(layout=2 * shares)]
    )
    made.rounds, made.varied, made.idle_samples = rounds, [], 0
    made.by_processor, made.process.child = by_processor, children["candidate"]
    made.process.config, made.process.renew = SimpleNamespace(threads=threads), lambda: None
    made.reference.child = children["reference"]
    made.reference.request = lambda _: SimpleNamespace(positions=[], found=[])
    monkeypatch.setattr(paired_timing.time, "perf_counter_ns", lambda: now.wall)
    assert made._round(2) == (cost, passed)
    assert made.needs_copy is shares


def bounded(monkeypatch, rounds, call_ns, *, shares=False):
    made, rounds = clock(0), iter(rounds)
    made.needs_copy = shares
    made.unseen, made.fewest, made.by_processor, made.works = 8, 2, False, []
    made.reference.request = lambda *_: None
    made.process = SimpleNamespace(request_unread=lambda *_: None)
    monkeypatch.setattr(paired_timing, "UnseenRounds", lambda *_: None)
    found = [
        lambda calls, cost=cost, passed=passed, **_: (cost * calls, passed * calls)
        for cost, passed in rounds
    ]
    taken = iter(found)
    monkeypatch.setattr(made, "_round", lambda calls, **how: next(taken)(calls, **how))
    bound = made._bound(call_ns, 2e5)
    return bound, len(list(taken))


@pytest.mark.parametrize(
    "rounds, call_ns, least, best, left",
    [
        # the first one touches memory: two more that agree are enough
        ([(2e6, 9e6), (2e6, 3e6), (2e6, 3.1e6), (9e6, 9e6)], 1e6, 1e6, 1.1e6, 1),
        # one whose own cost was overestimated counts for none
        ([(2e5, 9e5), (9e5, 3e5), (2e5, 4e5), (2e5, 4.5e5), (2e5, 4.4e5)], 5e4, -6e5, 2e5, 0),
        # calls that take long
        ([(2e8, 9e8), (2e8, 9e8)], 1e8, 7e8, 7e8, 1),
        # all of them are taken before anything else is said, and the fastest alone counts for none
        ([(2e5, 9e5), (2e5, 4e5), (2e5, 3e5), (2e5, 4.5e5), (2e5, 4.4e5)], 5e4, 1e5, 2e5, 0),
        # all but nothing of what passed is the round's own cost
        ([(8e5, 9e5)] * 5, 1e4, 0.0, 1e5, 0),
    ],
)
def test_what_a_round_costs_is_taken_off(monkeypatch, rounds, call_ns, least, best, left):
    found = bounded(monkeypatch, rounds, call_ns)
    assert found == ((pytest.approx(least), pytest.approx(best)), left)


def test_who_returns_what_must_be_copied_is_slower_and_accused_of_nothing(monkeypatch):
    bound, _ = bounded(monkeypatch, [(2e5, 9e5)] * 5, 5e4, shares=True)
    assert bound == (0.0, pytest.approx(7e5))


def test_samples_after_the_bound_get_their_inputs_again(monkeypatch):
    """Both sides let go of them for the rounds, for large ones fill the memory."""
    made, told, drawn = clock(0), [], []

    def answer(request):
        told.append(request)
        return SimpleNamespace(custom_calls=request.calls, ns=1)

    made.unseen, made.fewest, made.by_processor = 8, 2, False
    made.seeds, made.given, made.idle_samples, made.works = [1, 2], True, 0, []
    made.reference.request = lambda request: drawn.append(request.seeds)
    made.reference.memory.draw = lambda *_: (PACKED, 0)
    monkeypatch.setattr(paired_timing, "UnseenRounds", lambda *_: None)
    made.process = SimpleNamespace(
        child=None,
        config=SimpleNamespace(threads=1),
        request_unread=lambda request, *_: told.append(request),
        request=answer,
    )
    monkeypatch.setattr(made, "_round", lambda calls, **_: (0, 1e6 * calls))
    made._candidate_sample(3)
    assert told == [Sample(calls=3)], "they are there"
    made._bound(1e6, 1e6)
    for _ in range(2):
        made._candidate_sample(3)
    given = TakeTimingInputs(inputs=PACKED)
    assert told[1:] == [Forget(), given, Sample(calls=3), Sample(calls=3)]
    assert drawn == [[], [1, 2]]


def ignore(*_, **__):
    pass


def test_each_round_compares_what_it_drew_otherwise_one_kind_after_the_other():
    """What is right on the task's own inputs alone is not left to chance."""
    made, asked = clock(0), []
    child = SimpleNamespace(
        family=lambda: [7], stopped=lambda _: nullcontext(), processor_ns=lambda: 0
    )
    report = SimpleNamespace(custom_calls=40, forms=[SimpleNamespace(layout=0)])
    made.rounds = SimpleNamespace(
        forms=lambda copies: [],
        draw=ignore,
        idle=ignore,
        expect=ignore,
        run=ignore,
        report=lambda _: report,
    )
    made.varied, made.idle_samples, made.by_processor = ["mixed", "impulse"], 0, False
    made.process.child = made.reference.child = child
    made.process.config, made.process.renew = SimpleNamespace(threads=1), lambda: None

    def compare(request):
        asked.append(request)
        return SimpleNamespace(positions=[], found=[])

    made.reference.request = compare
    made.reference.timed_distribution = "declared"
    for _ in range(4):
        made._round(40)
    kinds = [{each.distributions[x] for x in each.positions} - {"declared"} for each in asked]
    assert kinds == [{"impulse"}, {"mixed"}, {"impulse"}, {"mixed"}]


@pytest.mark.parametrize(
    "seen_ns, new_ns, own_new_ns, price",
    [
        (6e6, 7e6, 9e6, 7 / 6),  # one answer in seven is kept
        (6e6, 7e6, 10.5e6, 1.0),  # new inputs are slower for the reference, too
        (7e6, 7e6, 9e6, 1.0),
        (7e6, 6e6, 9e6, 1.0),
    ],
)
def test_what_is_faster_on_inputs_that_come_again_counts_on_new_ones(
    monkeypatch, seen_ns, new_ns, own_new_ns, price
):
    made, given = clock(0), {}
    made.seeds, made.sets, made.works, made.by_processor = [1, 2], 2, [], False
    made.reference.loaded.remembers = False

    def give(who):
        return lambda seeds: given.update({who: seeds == made.seeds})

    def sample(who, seen, new):
        return lambda calls: round(calls * (seen if given[who] else new))

    monkeypatch.setattr(made, "_give_inputs", give("candidate"))
    monkeypatch.setattr(made, "_draw_own", give("reference"))
    monkeypatch.setattr(made, "_candidate_sample", sample("candidate", seen_ns, new_ns))
    monkeypatch.setattr(made, "_reference_sample", sample("reference", 9e6, own_new_ns))
    monkeypatch.setattr(made, "_bound", lambda *_: "bound")
    assert made._bound_on_new_inputs(seen_ns, 9e6) == "bound"
    assert made.price == pytest.approx(price)


def test_noise_is_no_price_of_new_inputs():
    assert price_of_new_inputs([10, 11, 12, 13, 14], [11, 12, 13, 14, 15]) == 1
    assert price_of_new_inputs([10, 11, 12, 13, 99], [9, 26, 27, 28, 29]) == 2


COUNTS_UNDER_A_LIMIT = """
import resource, time
from kernels_eval.model.model_runner import processor_ns
resource.setrlimit(resource.RLIMIT_CPU, (1000, 1100))
for _ in range(50):
    thread, started = time.thread_time_ns(), processor_ns()
    while time.thread_time_ns() - thread < 200_000:
        pass
    used = processor_ns() - started
    assert 5 * used > time.thread_time_ns() - thread > 0, used
"""


@pytest.mark.slow
def test_processor_time_is_exact_under_a_limit_of_it():
    """The kernel counts a process's in ticks then, and a sample of less would take no time."""
    subprocess.run([sys.executable, "-c", COUNTS_UNDER_A_LIMIT], check=True)


@pytest.mark.parametrize("used_us, burns", [(90, False), (400, True)])
def test_the_end_of_an_answer_is_no_background_work(monkeypatch, used_us, burns):
    """Where a sample is one short call, it is shorter than what sending an answer takes."""
    made = clock(0)
    made.given, made.by_processor, made.burnt_ns, made.waited_ns = True, True, 0, 0
    read = iter([0, used_us * 1000])
    made.process = SimpleNamespace(
        child=SimpleNamespace(processor_ns=lambda: next(read)),
        config=SimpleNamespace(threads=1),
        request_unread=lambda _: None,
    )
    made.reference.child = SimpleNamespace(processor_ns=lambda: 0)
    made.reference.request = lambda _: SimpleNamespace(ns=60_000)
    made._raise_for_bandwidth = lambda _: None
    made.config = TimingConfig(interval_width=0.5)
    made._measure_once = lambda: made._reference_sample(1)
    if burns:
        with pytest.raises(Stop, match="background_work"):
            made.measure()
    else:
        made.measure()
