"""Work outside the clock, and reaching for the machine (threats 28 and 38). Native forms of the
latter are in test_isolation.py."""

from __future__ import annotations

import pytest

from kernels_eval.records import Verdict
from tests.support.adversarial import AFFINE_CPP, Case, trials, writer

SOURCE = (
    AFFINE_CPP
    + r"""
#include <unistd.h>
#include <thread>
static volatile long long spun = 0;
torch::Tensor leaves_a_thread(torch::Tensor x) {
  static bool started = false;
  if (!started) {
    started = true;
    std::thread([] { for (;;) spun = spun + 1; }).detach();
  }
  return affine(x);
}
torch::Tensor fills_later(torch::Tensor x) {
  auto in = x.contiguous();
  auto out = torch::zeros_like(in);
  std::thread([in, out] {
    usleep(20000);  // the call has long returned
    affine_into(in, out);
  }).detach();
  return out;
}
torch::Tensor joined(torch::Tensor x) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  std::thread worker([&] { affine_into(in, out); });
  worker.join();
  return out;
}
torch::Tensor hangs(torch::Tensor x) {
  for (volatile bool on = true; on;) {}
  return x;
}
"""
)
code = writer(SOURCE, "adversarial_isolation")
OWN = "return ext.affine(x)"
TORCH = "return x * 2.0 + 1.0"

BURNER = """
import threading
def burn():
    while True:
        pass
threading.Thread(target=burn, daemon=True).start()
"""
# In its own directory a candidate may keep files: that is how sources get to
# torch.utils.cpp_extension.load.
OWN_FILE = """
with open("notes.txt", "w") as handle:
    handle.write("two")
with open("notes.txt") as handle:
    assert handle.read() == "two"
"""
MEGABYTES = 16
HUGE_PRINT = f"""
line = "x" * 1023
for _ in range({MEGABYTES} * 1024):
    print(line)
"""
REACHES = {
    "shell": ("import os", "os.system('true')"),
    "subprocess": ("import subprocess", "subprocess.run(['true'])"),
    "fork": ("import os", "os.fork()"),
    "fork_bomb": (
        "import multiprocessing",
        "[multiprocessing.Process(target=print).start() for _ in range(10 ** 6)]",
    ),
    "network": ("import socket", "socket.create_connection(('192.0.2.1', 80), timeout=1)"),
    "network_by_urllib": ("import urllib.request", "urllib.request.urlopen('http://192.0.2.1/')"),
    "removes_files": ("import os", "os.remove('candidate.py')"),
    "signals": ("import os", "os.kill(os.getppid(), 9)"),
    "ctypes": ("import ctypes", "ctypes.CDLL(None).getppid()"),
    "pickles": ("import pickle", "pickle.loads(b'N.')"),
}


def log_is_bounded(verdict: Verdict) -> None:
    assert len(verdict.log_tail.encode()) <= 8192


CASES = [
    Case(
        28,
        "thread_left_behind",
        "background_work",
        "return ext.leaves_a_thread(x)",
        twin="return ext.joined(x)",
    ),
    Case(
        28,
        "filled_later",
        (
            "background_work",
            "wrong_output",
            "non_finite",
            "non_deterministic",
            "input_independent",
            "implausible_time",
        ),
        "return ext.fills_later(x)",
    ),
    Case(28, "python_thread", "background_work", code(OWN, before=BURNER)),
    *(
        Case(38, name, "forbidden_call", code(f"{call}\n{OWN}", before=imports))
        for name, (imports, call) in REACHES.items()
    ),
    # Refused by the text or by the machine; `open` as such is no crime.
    Case(
        38,
        "file_of_the_machine",
        ("forbidden_call", "exception"),
        "open('/etc/passwd').read()\n" + OWN,
        twin=code(OWN, before=OWN_FILE),
    ),
    Case(
        38,
        "hang",
        "run",
        "return ext.hangs(x)",
        twin=code(OWN, before="import os\nprint(os.environ.get('HOME'))"),
    ),
    # Not a cheat but a bomb: it is judged all the same, and the log keeps its end only.
    Case(
        38,
        "huge_print",
        "ok",
        code(OWN, before=HUGE_PRINT),
        check=log_is_bounded,
        twin=code(
            "if not self.told:\n    print('called')\n    self.told = True\n" + OWN,
            init="self.told = False",
        ),
    ),
]


@pytest.mark.parametrize("trial", trials(CASES, code))
def test_isolation_threats(judge, trial):
    trial.assert_judged(judge)
