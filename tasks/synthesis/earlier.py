"""A prompt with a task's earlier kernels and their speedups (form: Li et al., "CUDA-L1",
arXiv:2507.14111, section 2.4). Kernels stand in fences that nothing inside can close."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tasks.synthesis.prompts import block
from tasks.synthesis.refine import MOST_CODE, bounded

EARLIER = """\
{prompt}
Here are earlier modules for this program, all of them right, with their speedup over the original:

{kernels}

First compare them: say which is faster, and why. Then write a module that is faster than each of \
them. Everything above still holds; answer with the complete module in a single code block.
"""


class Kernel(NamedTuple):
    """An earlier kernel; `speedup` is above 0."""

    speedup: float
    code: str


def with_earlier_kernels(prompt: str, kernels: Sequence[Kernel]) -> str:
    quoted = []
    for kernel in kernels:
        code = block(bounded(kernel.code, MOST_CODE, paths=True))
        quoted.append(f"Speedup {kernel.speedup:.3g}:\n\n{code}")
    return EARLIER.format(prompt=prompt, kernels="\n\n".join(quoted))
