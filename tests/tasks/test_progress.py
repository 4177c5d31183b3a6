"""How long a run still takes, by how fast its stages go and what follows them."""

from tasks.progress import Ahead, Pace, expect, observed_by, part_of_run


def told(pace, stage, steps, total):
    """What is said at each (done, second)."""
    said = []
    for done, now in steps:
        pace.note(stage, done, now)
        said.append(pace.words(stage, done, total, now))
    return said


def test_time_left_is_said_once_units_tell_it_and_no_wait_before_them_counts():
    steps = [(0, 0.0), (0, 100.0), (1, 190.0), (2, 200.0), (4, 220.0), (4, 225.0), (5, 230.0)]
    assert told(Pace(), "a stage", steps, 10) == [
        *["a stage: 0 of 10"] * 2,
        "a stage: 1 of 10",
        "a stage: 2 of 10",
        "a stage: 4 of 10, 60 s left",
        "a stage: 4 of 10, 55 s left",
        "a stage: 5 of 10, 50 s left",
    ]
    assert told(Pace(), "no units", [(0, 0.0)], 0) == ["no units"]


def test_a_stage_that_begins_again_is_as_slow_as_it_is_now():
    pace = Pace()
    told(pace, "again", [(0, 0.0), (1, 1.0), (9, 9.0)], 10)
    steps = [(2, 20.0), (3, 30.0), (6, 60.0)]
    assert told(pace, "again", steps, 10)[-1] == "again: 6 of 10, 40 s left"


def test_a_long_stage_is_as_fast_as_lately():
    steps = [(0, 0.0), (1, 1.0), (101, 101.0), (105, 2000.0), (106, 2100.0), (107, 2200.0)]
    steps += [(108, 2300.0), (109, 2400.0), (110, 2500.0)]
    assert told(Pace(), "long", steps, 120)[-1] == "long: 110 of 120, 17 min left"


def test_what_follows_is_part_of_the_time_left_and_begins_with_an_estimate():
    pace = Pace()
    expect("screen", Ahead("then confirms about 4", 20))
    steps = [(0, 0.0), (10, 30.0), (20, 50.0), (40, 90.0)]
    assert told(pace, "screen", steps, 40) == [
        "screen: 0 of 40, then confirms about 4",
        "screen: 10 of 40, then confirms about 4",
        "screen: 20 of 40, then confirms about 4, 80 s or more left",
        "screen: 40 of 40, then confirms about 4, 40 s or more left",
    ]
    expect("confirm", Ahead("one that fails is replaced", like="screen", times=5.0))
    assert told(pace, "confirm", [(0, 100.0), (1, 125.0)], 4) == [
        "confirm: 0 of 4, one that fails is replaced, 40 s or more left",
        "confirm: 1 of 4, one that fails is replaced, 30 s or more left",
    ]
    expect("confirm", Ahead("then 1 in place of those that failed", 1, like="screen", times=5.0))
    assert told(pace, "confirm", [(4, 185.0)], 4) == [
        "confirm: 4 of 4, then 1 in place of those that failed, 15 s or more left"
    ]


def test_parts_of_a_run_side_by_side_are_told_apart():
    token = part_of_run.set("branch 2")
    try:
        expect("screen again", Ahead("then more", 1))
    finally:
        part_of_run.reset(token)
    assert told(Pace(), "screen again", [(0, 0.0)], 1) == ["screen again: 0 of 1"]
    assert told(Pace(), "branch 2 screen again", [(0, 0.0)], 1)[0].endswith("then more")


def test_what_an_earlier_run_told_is_forgotten_when_another_is_watched():
    with observed_by(lambda *_: None):
        expect("watched", Ahead("then more", 1))
        with observed_by(lambda *_: None):
            assert told(Pace(), "watched", [(0, 0.0)], 1) == ["watched: 0 of 1, then more"]
    with observed_by(lambda *_: None):
        assert told(Pace(), "watched", [(0, 0.0)], 1) == ["watched: 0 of 1"]
