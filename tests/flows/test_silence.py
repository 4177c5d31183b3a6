"""What a command says while it is silent."""

import io
import sys
import threading
import time

import psutil
import pytest

from flows.cli import silence
from flows.cli.common import tell


class Screen(io.StringIO):
    """What is on it, and an event for its next whole line."""

    def __init__(self):
        super().__init__()
        self.grew = threading.Event()

    def flush(self):
        self.grew.set()

    def next_line(self):
        self.grew.clear()
        assert self.grew.wait(60)
        return self.getvalue().splitlines()[-1]


@pytest.fixture
def screen(monkeypatch):
    """Puts a screen in place of stderr, in the test itself: pytest has its own in each phase."""

    def put():
        monkeypatch.setattr(sys, "stderr", found := Screen())
        return found

    return put


def test_what_is_silent_says_what_it_is_at_and_what_speaks_says_no_more(screen, monkeypatch):
    screen = screen()
    monkeypatch.setattr(silence, "QUIET_S", 0.01)
    monkeypatch.setattr(silence, "age_s", lambda: 4.2)
    with silence.never_silent("doctor"):
        assert screen.next_line() == "   4.2 s  still at work: doctor"
        tell("  4.1 s  build")
        while "still" not in (line := screen.next_line()):
            assert line == "  4.1 s  build"
        assert line.endswith("work: build")
        sys.stderr.write("\r\x1b[2K\x1b[?25l")
        assert screen.next_line().endswith("work: build"), "nothing to be seen is nothing said"
        silence.now_at("screen")
        while (line := screen.next_line()).endswith("work: build"):
            pass
        assert line.endswith("work: screen")
    assert sys.stderr is screen
    before = screen.getvalue()
    tell("more")
    assert screen.getvalue() == f"{before}more\n"


def test_the_age_of_a_process_begins_before_its_first_line():
    own = psutil.Process().create_time()
    before = time.time() - own
    assert before - 1 < silence.age_s() < time.time() - own + 1


def test_what_speaks_in_time_is_all_that_is_there(screen, monkeypatch):
    screen = screen()
    monkeypatch.setattr(silence, "QUIET_S", 3600.0)
    with silence.never_silent("doctor"):
        tell("looks")
        print("and sees", file=sys.stderr)
    assert screen.getvalue() == "looks\nand sees\n"


def test_a_stream_is_what_it_was_but_for_its_writes(screen):
    screen()
    with silence.never_silent("doctor"):
        assert sys.stderr.isatty() is False and sys.stderr.getvalue() == ""
