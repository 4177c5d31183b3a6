"""Stand-ins of vLLM's servers (fake_vllm.py) as tests of servers use them."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

from tests.support.processes import processes_with
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
FAKE = f"{sys.executable} {ROOT / 'tests' / 'support' / 'fake_vllm.py'} serve"
WAIT_S = 120.0
"""For what takes seconds, on a machine under any load."""


class Fake:
    """The directory through which a test talks to the stand-ins."""

    def __init__(self, home):
        self.home = home
        self.command = f"env FAKE_VLLM_DIR={home} {FAKE}"
        self.samplers = []
        home.mkdir(exist_ok=True)

    def set(self, name):
        (self.home / name).touch()

    def unset(self, name):
        (self.home / name).unlink()

    def _lines(self, name):
        path = self.home / name
        if not path.exists():
            return []
        whole = path.read_text().rpartition("\n")[0]  # the last line may be half written
        return [json.loads(line) for line in whole.splitlines()]

    @property
    def starts(self):
        return self._lines("starts.jsonl")

    @property
    def asked(self):
        return self._lines("asked.jsonl")

    @property
    def answers(self):
        return self._lines("answers.jsonl")

    def alive(self):
        """Every process of ours: servers, engines and supervisors, known by the directory in their
        environment."""
        return processes_with("FAKE_VLLM_DIR", str(self.home))


@contextmanager
def stand_ins(home):
    """A `Fake` of this directory. Fails where a process is left at its end, and ends it."""
    fake = Fake(home)
    yield fake
    try:
        until(lambda: not fake.alive(), "the end of every process of the test")
    finally:
        for sampler in fake.samplers:  # of a test that failed before it closed them
            sampler.close(at_once=True)
        for process in fake.alive():
            process.kill()
