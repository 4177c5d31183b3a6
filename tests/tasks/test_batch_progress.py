"""The progress of a batch, and its time left: nothing before enough is known, the recent rate and
not the start, and a range that says how certain it is."""

import random
from itertools import accumulate

import pytest

from kernels_eval.pool.telemetry import Telemetry
from kernels_eval.records import Language, Status, Verdict
from tasks.verification import batch_progress
from tasks.verification.batch_progress import (
    ENOUGH_VERDICTS,
    BatchProgress,
    duration,
    in_words,
    time_left,
)


def steady(count, gap_s, begin_s=100.0):
    return [begin_s + gap_s * number for number in range(count)]


def test_nothing_is_said_before_enough_is_known():
    assert time_left([], 10, 5.0) is None
    few = steady(ENOUGH_VERDICTS, 10.0)
    assert time_left(few, 10, few[-1]) is None  # the first verdict opens the clock
    quick = steady(ENOUGH_VERDICTS + 5, 0.1)
    assert time_left(quick, 10, quick[0] + 29.0) is None
    assert time_left(quick, 10, quick[0] + 31.0) is not None
    at_once = [100.0] * 50
    assert time_left(at_once, 10, 200.0) is None  # one moment gives no rate
    assert "3 new verdicts over 30 s, has 2" in in_words(None, 2)


def test_five_candidates_get_an_estimate_with_a_wide_range():
    times = steady(3, 40.0)
    assert time_left(times[:2], 3, times[1]) is None
    estimate = time_left(times, 2, times[2])
    assert estimate is not None and estimate.about_s == pytest.approx(80.0)
    assert estimate.low_s < 80 / 4 and estimate.high_s > 80 * 4
    assert in_words(estimate, 3) == "about 80 s left (16 s to 7 min)"


def test_a_steady_rate_gives_the_time_that_is_left():
    times = steady(200, 2.0)
    estimate = time_left(times, 300, times[-1])
    assert estimate is not None
    assert estimate.about_s == pytest.approx(
        600.0, rel=0.01
    ) and estimate.per_hour == pytest.approx(1800, rel=0.01)
    assert estimate.low_s < 600 < estimate.high_s < 1.2 * 600


def test_the_slow_start_does_not_count():
    """Two minutes until the first verdict, then slow ones while headers are built, then ten a
    second for a quarter of an hour."""
    slow = steady(20, 15.0, begin_s=120.0)
    fast = steady(9000, 0.1, begin_s=slow[-1] + 0.1)
    estimate = time_left(slow + fast, 1000, fast[-1])
    assert estimate is not None and estimate.about_s == pytest.approx(100.0, rel=0.02)


def test_a_halt_gives_more_time_with_every_second():
    times = steady(300, 1.0)
    seen = [time_left(times, 100, times[-1] + wait_s) for wait_s in (0, 60, 600, 6000)]
    about = [estimate.about_s for estimate in seen if estimate]
    assert len(about) == 4 and about == sorted(about) and about[-1] > 100 * about[0]
    assert (
        seen[1] and seen[1].high_s / seen[1].about_s > 1.2 * seen[0].high_s / seen[0].about_s
    )  # and is less sure


def test_slow_candidates_reach_back_as_far_as_it_takes():
    """One verdict in two minutes: ten minutes hold five of them, which is not enough."""
    times = steady(40, 120.0)
    estimate = time_left(times, 30, times[-1])
    assert estimate is not None and estimate.about_s == pytest.approx(3600.0, rel=0.01)


def test_bursts_widen_the_range():
    even = steady(401, 1.0)
    bursts = [100.0, *(100.0 + 50 * (1 + number // 50) for number in range(400))]  # fifty at a time
    calm, wild = time_left(even, 200, 500.0), time_left(bursts, 200, 500.0)
    assert calm and wild and wild.about_s == pytest.approx(calm.about_s, rel=0.05)
    assert wild.high_s / wild.about_s > 1.1 * calm.high_s / calm.about_s


@pytest.mark.parametrize("seen, left", [(3, 2), (5, 15)])
def test_the_range_of_few_verdicts_holds_the_truth_as_well(seen, left):
    generator, inside, told = random.Random(3), 0, 0
    for _ in range(1000):
        ends = list(accumulate(generator.expovariate(1 / 60.0) for _ in range(seen + left)))
        if estimate := time_left(ends[:seen], left, ends[seen - 1]):
            told += 1
            inside += estimate.low_s <= ends[-1] - ends[seen - 1] <= estimate.high_s
    assert told > 900 and 0.85 <= inside / told <= 0.97, inside / told


@pytest.mark.parametrize("workers", [1, 8])
def test_the_range_holds_the_truth_nine_times_in_ten(workers):
    """Simulated workers whose candidates take exponentially distributed times: the end of 400
    candidates, seen after 100."""
    generator, inside = random.Random(7), 0
    for _ in range(400):
        lanes = [
            list(accumulate(generator.expovariate(1 / 3.0) for _ in range(500)))
            for _ in range(workers)
        ]
        ends = sorted(end for lane in lanes for end in lane)[:400]
        estimate = time_left(ends[:100], 300, ends[99])
        if estimate is None:  # thirty seconds have not passed: eight workers, sometimes
            estimate = time_left(ends[:150], 250, ends[149])
            ends = ends[50:]
            assert estimate is not None
        inside += estimate.low_s <= ends[-1] - ends[99] <= estimate.high_s
    assert 0.86 <= inside / 400 <= 0.97, inside


def test_words():
    assert [duration(seconds) for seconds in (0, 45, 99, 100, 700, 7265, 200_000)] == [
        "0 s",
        "45 s",
        "99 s",
        "2 min",
        "12 min",
        "2 h 01 min",
        "2 d 7 h",
    ]
    assert in_words(time_left([1.0], 0, 2.0), 1) == "nothing left"
    times = steady(200, 2.0)
    assert in_words(time_left(times, 300, times[-1]), 200).startswith("about 10 min left (")


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


def test_the_line_counts_what_was_there_and_estimates_from_what_workers_reach(monkeypatch, capsys):
    clock, seen = Clock(), Telemetry(builders=1, devices=1)
    monkeypatch.setattr(batch_progress, "time", clock)
    monkeypatch.setattr(batch_progress, "LINE_EVERY_S", 3600.0)  # its thread keeps real time
    verdict = Verdict(
        candidate_id="c", task_id="t", language=Language.CPP, status=Status.CORRECT, reason="ok"
    )
    with BatchProgress("verification") as shown:
        shown.plans(200, {"no_code": 30, "correct": 70})
        shown.follow(lambda: seen)
        assert shown.facts()[0] == "correct 70, no_code 30" and "has 0" in shown.facts()[-1]
        for done in range(1, 101):
            clock.now += 3
            seen.reached(verdict)
            shown.verdict = "correct  2 x  t sample 0"
            shown("verification", 100 + done, 300, "[red]\x1b[31mnote of a candidate")
        assert shown.reached == 100 and shown.position() == ("verification", 200, 300)
        assert shown.facts()[0] == "correct 170, no_code 30"
        assert "1,200/h" in shown.facts() and "5 min elapsed" in shown.facts()
        assert shown.facts()[-1].startswith("about 5 min left (4 min to 6 min")
    said = capsys.readouterr().err.splitlines()
    lines = [line for line in said if line.startswith("verification")]
    assert len(said) - len(lines) == 100 and "    101/300  correct  2 x  t sample 0" in said
    assert [line.split("  ")[0] for line in lines] == [
        "verification 100/300",
        "verification 101/300",
        "verification 200/300",
    ]
    assert all("note" not in line and "\x1b" not in line for line in said)


def test_the_bar_shows_the_same_on_a_terminal(monkeypatch):
    from rich.console import Console

    console = Console(width=200, force_terminal=False)
    bar = batch_progress._bar(shown := BatchProgress("verification"))
    shown.plans(10, {"correct": 5})
    with console.capture() as capture:
        console.print(bar.get_renderable())
    assert (
        "verification" in capture.get()
        and "5/15 (33%)" in capture.get()
        and "correct 5" in capture.get()
    )
