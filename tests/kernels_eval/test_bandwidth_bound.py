"""The bounds on a reported time: the parent's clocks, and the memory's bandwidth, where finding out
which bytes a task needs is for those that come near."""

import subprocess
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from kernels_eval.config import TimingConfig
from kernels_eval.judge import paired_timing
from kernels_eval.judge.messages import Stop
from kernels_eval.judge.paired_timing import PairedClock
from kernels_eval.protocol import Forget, PackedValues, Sample, SharedMemory, TakeTimingInputs

PEAK, CACHE = 1e12, 50_000_000
INPUT, OUTPUT = 600_000_000, 400_000_000  # bytes: 1 ms at PEAK

PLACE = SharedMemory(on_device=False, size=64)
PACKED = PackedValues(on_device=False, size=64, packed=[], count=2, stride=0)


class Reference(SimpleNamespace):
    asked, timed_distribution = 0, "declared"

    def least_bytes(self):
        self.asked += 1
        return self.used


def clock(used, cache=CACHE):
    made = object.__new__(PairedClock)
    made.config, made.sets = TimingConfig(), 4
    made.process = SimpleNamespace(may_overwrite=False)
    loaded = SimpleNamespace(peak_bytes_per_s=PEAK, cache_bytes=cache)
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


@pytest.mark.parametrize("by_processor, call_ns", [(True, 1e6), (False, 4e6)])
def test_time_in_which_others_had_the_processor_does_not_count(monkeypatch, by_processor, call_ns):
    made, now = clock(0), SimpleNamespace(wall=0, used=0)
    child = SimpleNamespace(processor_ns=lambda: now.used, family=lambda: [7])
    child.stopped = lambda known: nullcontext()

    def ask(request, fds):
        now.wall += 4_000_000
        now.used += 1_000_000
        return {}

    made.reference.memory.outputs_of = lambda whose: (PLACE, 1)
    made.by_processor = by_processor
    monkeypatch.setattr(paired_timing.time, "perf_counter_ns", lambda: now.wall)
    with ExitStack() as stopped:
        assert made._clocked(child, ask, (PACKED, 2), "unseen", stopped) == (call_ns, {})


@pytest.mark.parametrize("by_processor", [True, False])
def test_the_clock_goes_on_until_the_child_is_stopped(monkeypatch, by_processor):
    made, now, running = clock(0), SimpleNamespace(passed=0), []
    child = SimpleNamespace(processor_ns=lambda: now.passed, family=lambda: [7])

    @contextmanager
    def stopped(known):
        assert known == [7], "looking for them takes time, in which they would work"
        now.passed += 3_000_000  # it has answered, and continues
        running.append(False)
        yield
        running.append(True)

    child.stopped = stopped
    made.reference.memory.outputs_of = lambda whose: (PLACE, 1)
    made.by_processor = by_processor
    monkeypatch.setattr(paired_timing.time, "perf_counter_ns", lambda: now.passed)
    with ExitStack() as held:
        assert made._clocked(child, lambda *_: {}, (PACKED, 2), "unseen", held) == (3e6, {})
        assert running == [False]
    assert running == [False, True]


@pytest.mark.parametrize(
    "rounds, least, best",
    [
        ([(3e6, 2e6), (4e6, 3e6), (3.5e6, 9e6), (5e6, 2e6), (3e6, 2e6)], 0.1e6, 1e6),
        # as where inputs cross the bus: all but nothing of what passed is the round's own cost
        ([(8e6, 7e6), (9e6, 7.1e6), (8e6, 7e6)] * 2, 0.0, 1e6),
        ([(3e6, 9e6)] * 5, 7e6, 8e6),
    ],
)
def test_what_a_round_costs_the_reference_is_taken_off(monkeypatch, rounds, least, best):
    made, rounds = clock(0), iter(rounds)
    made.unseen, made.fewest, made.by_processor = 8, 2, False
    made.reference.request = made.reference.memory.share_outputs = lambda *_, **__: None
    made.process = SimpleNamespace(request_unread=lambda *_: None)
    made.reference.output_bytes = 1
    monkeypatch.setattr(made, "_round", lambda calls: [ns * calls for ns in next(rounds)])
    assert made._bound(1e6, 2e6) == (pytest.approx(least), pytest.approx(best))


def test_samples_after_the_bound_get_their_inputs_again(monkeypatch):
    """A candidate lets go of them for the rounds, for large ones fill the memory."""
    made, told = clock(0), []
    made.unseen, made.fewest, made.by_processor = 8, 2, False
    made.seeds, made.given, made.idle_samples = [1, 2], True, 0
    made.reference.request = made.reference.memory.share_outputs = lambda *_, **__: None
    made.reference.output_bytes, made.reference.memory.draw = 1, lambda *_: (PACKED, 0)
    made.process = SimpleNamespace(
        request_unread=lambda request, *_: told.append(request),
        request=lambda request: SimpleNamespace(
            custom_calls=request.calls, ns=told.append(request)
        ),
    )
    monkeypatch.setattr(made, "_round", lambda calls: [1e6 * calls] * 2)
    made._candidate_sample(3)
    assert told == [Sample(calls=3)], "they are there"
    made._bound(1e6, 1e6)
    for _ in range(2):
        made._candidate_sample(3)
    given = TakeTimingInputs(inputs=PACKED)
    assert told[1:] == [Forget(), given, Sample(calls=3), Sample(calls=3)]


COUNTS_UNDER_A_LIMIT = """
import resource, time
from kernels_eval.model.model_runner import processor_ns
resource.setrlimit(resource.RLIMIT_CPU, (1000, 1100))
for _ in range(50):
    thread, started, until = time.thread_time_ns(), processor_ns(), time.perf_counter_ns() + 200_000
    while time.perf_counter_ns() < until:
        pass
    used = processor_ns() - started
    assert 5 * used > time.thread_time_ns() - thread > 0, used
"""


def test_processor_time_is_exact_under_a_limit_of_it():
    """The kernel counts a process's in ticks then, and a sample of less would take no time."""
    subprocess.run([sys.executable, "-c", COUNTS_UNDER_A_LIMIT], check=True)
