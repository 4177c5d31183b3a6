"""Programs that tests run, with what they print."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import kernels_eval

ROOT = os.path.dirname(os.path.dirname(kernels_eval.__file__))


def python(
    script: str, *words: object, timeout_s: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A script in an interpreter of its own, which finds this repository."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, words)],
        env={**os.environ, "PYTHONPATH": ROOT, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def output_of(*words: object) -> str:
    """What a program prints, which must succeed."""
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, check=True).stdout
