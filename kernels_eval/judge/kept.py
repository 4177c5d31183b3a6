"""Attributes of a model, and of objects that it holds, in which a task's calls keep numbers: what a
call changes is an output.

Does not compare what a call has computed on its way and leaves to be looked at (attention maps):
fused kernels do not have it (`attribute_not_compared`).
"""

from __future__ import annotations

import math
import secrets

from kernels_eval.config import GATES, KEPT_CALLS, KEPT_ERROR
from kernels_eval.judge.candidate_handle import CandidateProcess
from kernels_eval.judge.messages import Stop
from kernels_eval.protocol import KeepNumbers, KeepOwnNumbers
from kernels_eval.records import Reason


def compare_attributes(process: CandidateProcess) -> None:
    """Require of attributes what the reference's hold after calls in a row. Raises Stop for one
    that is lacking, left as it was, or wrong."""
    reference = process.reference
    names = reference.loaded.kept
    if not names:
        return
    seeds = [secrets.randbits(31) for _ in range(KEPT_CALLS)]
    request = KeepNumbers(seeds=seeds, names=names)
    right, again = reference.request(request), reference.request(request)
    inputs, descriptor = reference.memory.draw(seeds)
    own = process.request(KeepOwnNumbers(inputs=inputs, names=names), (descriptor,))
    for name in names:
        wanted, found = right.after[name], own.after.get(name)
        if not _alike(wanted, again.after[name], right.before.get(name)):
            process.draft.flags.append(f"attribute_not_compared:{name}")
        elif found is None or not _alike(wanted, found, right.before.get(name)):
            what = "lacks it" if found is None else "holds something else"
            left = found is not None and found == own.before.get(name)
            raise Stop(
                Reason.WRONG_OUTPUT,
                f"the task keeps numbers of its calls in the attribute {name}, and the candidate"
                f" {'leaves it as it was' if left else what}: what a call changes is an output"
                " (keep it under the reference's name, and change it in every call)",
            )


def _alike(wanted: list[float], found: list[float], before: list[float] | None) -> bool:
    """Whether numbers are alike, in units of what calls have changed."""
    if len(wanted) != len(found) or wanted[0] != found[0]:
        return False
    as_many = before is not None and len(before) == len(wanted)
    was = before if before is not None and as_many else [0.0] * len(wanted)
    off, size, changed = (
        math.dist(x, y) for x, y in ((wanted, found), (wanted, [0.0] * len(wanted)), (wanted, was))
    )
    return off <= KEPT_ERROR * changed + GATES.of("fp32") * size
