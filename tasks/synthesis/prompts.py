"""Prompts that ask a generator for a kernel, from one template and `kernels_eval.languages`: the
same for one `PROMPT_VERSION`, with the task's code unchanged."""

from __future__ import annotations

from kernels_eval.records import KernelTask, Language, stable_hash
from tasks.reporting.text import fence

PROMPT_VERSION = 1
"""Raised with every change of wording or examples."""

EXAMPLE_TASK = """\
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(features))

    def forward(self, x, residual):
        return torch.relu(x + self.bias) + residual


def get_inputs():
    return [torch.randn(512, 2048), torch.randn(512, 2048)]


def get_init_inputs():
    return [2048]
"""

TEMPLATE = """\
You write fast kernels for PyTorch programs. You are given a module named `{entry_point}`. Replace \
the operators in its `forward` by \
{means}, so that it computes the same result in less time. You may replace some operators and keep \
others, fuse several into one kernel, \
or use a better algorithm.

Here is an example. The given program:

{example_task}

A complete answer to it:

{example_answer}

Now the program to make faster:

{task}
{hardware}
Rules:
- Name the new module `ModelNew`. Its constructor and its `forward` take the same arguments as \
those of `{entry_point}`.
- Create the same parameters and buffers, in the same order and with the same shapes and initial \
values, and read them in `forward`.
- The work must be done by your kernel. Do not fall back to PyTorch operators where it fails.
- Keep the precision of the original, and do not change the inputs. The result must be right for \
any input values.
- Answer with one complete Python module in a single code block: imports, kernels and `ModelNew`. \
No tests, no example calls.
"""


def render(task: KernelTask, language: Language, hardware: str | None = None) -> str:
    """The prompt for a kernel in `language` for `task`. `hardware` is one line on the machine it
    will run on."""
    return TEMPLATE.format(
        entry_point=task.entry_point,
        means=language.means,
        example_task=block(EXAMPLE_TASK),
        example_answer=block(language.example),
        task=block(task.code),
        hardware=(
            f"\nIt will run on: {' '.join(hardware.split())}\n"
            if hardware and hardware.strip()
            else ""
        ),
    )


def prompt_hash(prompt: str, *versions: int) -> str:
    return stable_hash([PROMPT_VERSION, *versions, prompt])


def block(code: str, language: str = "python") -> str:
    """`code` in a fence longer than any run of backticks inside, which nothing in it can close."""
    return f"{fence(code)}{language}\n{code.rstrip()}\n{fence(code)}"
