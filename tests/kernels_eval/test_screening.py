"""Screening rejects what is certain from the syntax tree, names the line, and takes neither words
nor honest habits for evidence."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_eval.checks.screening import screen

HONEST = '''
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.cpp_extension import load_inline

torch.backends.cudnn.allow_tf32 = False
source = """
#include <sys/socket.h>
// subprocess, ctypes, torch.allclose = lambda: true
"""

class ModelNew(nn.Module):
    """Passes the inputs on; `import subprocess` and pass are words here."""

    def __init__(self, time):
        super().__init__()
        self.time = time
        self.torch = None

    def forward(self, x):
        # torch.allclose = lambda *a: True
        self.time = self.time + 1
        return x
'''


def test_honest_code_passes_without_a_flag():
    screened = screen(HONEST)
    assert screened.reason is None, screened.detail
    assert screened.flags == ()


REJECTED = {
    "import subprocess": "forbidden_call",
    "import torch, socket": "forbidden_call",
    "import ctypes.util": "forbidden_call",
    "import ctypes as c": "forbidden_call",
    "from multiprocessing import Process": "forbidden_call",
    "from urllib.request import urlopen": "forbidden_call",
    "from os import system": "forbidden_call",
    "def f():\n    import gc": "forbidden_call",
    "try:\n    import pickle\nexcept ImportError:\n    pass": "forbidden_call",
    "import os\nos.system('true')": "forbidden_call",
    "import os\nos._exit(0)": "forbidden_call",
    "import sys\nsys._getframe(1).f_locals": "forbidden_call",
    "import inspect\nx = [inspect.stack() for _ in range(2)]": "forbidden_call",
    "import kernels_eval": "harness_tampering",
    "from kernels_eval.child.main import serve": "harness_tampering",
    "import torch\ntorch.allclose = lambda *a: True": "harness_tampering",
    "import torch\ntorch.cuda.Event.elapsed_time = None": "harness_tampering",
    "import torch\na = torch.nn.functional.relu = None": "harness_tampering",
    "import torch\n(torch.allclose, x) = 1, 2": "harness_tampering",
    "import time\ntime.perf_counter = lambda: 0": "harness_tampering",
    "import time\ntime.perf_counter_ns += 1": "harness_tampering",
    "import torch\nsetattr(torch.Tensor, '__eq__', None)": "harness_tampering",
    "import builtins\nbuiltins.print = None": "harness_tampering",
}


@pytest.mark.parametrize("code", REJECTED)
def test_what_no_honest_kernel_needs_is_rejected(code):
    screened = screen(code)
    assert screened.reason == REJECTED[code]
    assert screened.detail.startswith("line ")


def test_a_rejection_names_its_line():
    assert screen("import torch\n\n\nimport subprocess\n").detail == "line 4: imports subprocess"


def test_the_first_finding_is_the_one_reported():
    screened = screen("import torch\ntorch.allclose = None\nimport subprocess\n")
    assert (screened.reason, screened.detail) == (
        "harness_tampering",
        "line 2: assigns to torch.allclose",
    )


FLAGGED = {
    "import threading": "imports:threading",
    "from concurrent.futures import ThreadPoolExecutor": "imports:concurrent",
    "import os": "imports:os",
    "exec('x = 1')": "calls:exec",
    "m = __import__('time')": "calls:__import__",
    "handle = open('file')": "calls:open",
    "class A: pass\na = A()\na.__class__ = A": "assigns:__class__",
    "try:\n    x = 1\nfinally:\n    x = 2": "try",
}


@pytest.mark.parametrize("code", FLAGGED)
def test_what_is_only_suspicious_is_flagged_and_passes(code):
    screened = screen(code + "\nclass ModelNew: pass\n")
    assert screened.reason is None
    assert screened.flags == (FLAGGED[code],)


def test_a_module_without_model_new_is_flagged_not_rejected():
    """`ModelNew = make()` is honest, so the run decides."""
    assert screen("Model = object\nModelNew = Model\n").flags == ("no_static_model_new",)


@pytest.mark.parametrize(
    "code", ["def f(:\n    pass", "class A\n", "x = 1\n  y = 2", "return\x00", "(" * 10_000]
)
def test_what_python_cannot_read_is_a_syntax_error(code):
    assert screen(code).reason == "syntax_error"


def test_a_syntax_error_names_its_line():
    assert screen(textwrap.dedent("x = 1\ny = (\nz = 3\n")).detail.startswith("line 2")


@given(st.text(max_size=200))
def test_any_text_gets_an_answer(text):
    assert screen(text).reason in (None, "syntax_error", "forbidden_call", "harness_tampering")


@given(st.text(alphabet=st.characters(exclude_characters='"\\\x00\r', codec="utf-8"), max_size=100))
def test_a_string_is_never_evidence(words):
    code = (
        f'X = """{words} import subprocess; torch.allclose = 1; os.system("x"); """\nclass'
        " ModelNew: pass\n"
    )
    assert screen(code).reason is None
