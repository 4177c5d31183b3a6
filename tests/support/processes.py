"""Programs that tests run, with what they print, and processes that tests look for."""

import os
import subprocess
import sys
import textwrap
from contextlib import contextmanager, suppress

import psutil

import kernels_eval

ROOT = os.path.dirname(os.path.dirname(kernels_eval.__file__))


def python(script, *words, timeout_s=300, **environment):
    """A script in an interpreter of its own, which finds this repository."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, words)],
        env={**os.environ, "PYTHONPATH": ROOT, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@contextmanager
def started(script, *words, **environment):
    """The same while it runs, with pipes for what it reads and prints; killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, words)],
        env={**os.environ, "PYTHONPATH": ROOT, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def processes_with(name, value):
    """The living processes with this variable in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def output_of(*words):
    """What a program prints, which must succeed."""
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, check=True).stdout
