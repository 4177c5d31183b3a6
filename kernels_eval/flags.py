"""What each flag of a verdict means for its reader, in one clause.

A flag rejects no candidate. Its family stands before the first colon, what was found behind it.
"""

from __future__ import annotations

from collections.abc import Mapping

FLAGS: Mapping[str, str] = {
    # what the kernel can be used for
    "declared_shape_only": "raises for other sizes or settings that the task accepts: for the"
    " declared only",
    "shape_specialised": "wrong for other sizes that the task accepts: for the declared only",
    "approximation": "another formula than the task's, right to 1e-4 only",
    "non_finite_inputs_differ": "NaN or infinities in an input give another answer than the task's",
    "full_masks_differ": "rows that are masked whole give another answer than the task's",
    "general_values_differ": "right for the two declared numbers, or probabilities that sum to 1,"
    " alone",
    "unstructured_inputs_differ": "for symmetric or triangular matrices only, as the task promises",
    "offset_inputs_differ": "inaccurate for inputs far from zero",
    "wrong_gradient": "the outputs are right and a gradient is not: do not train through it",
    "wrong_in_eval_mode": "wrong after eval(): for training mode only",
    "eval_mode_fails": "raises after eval(): for training mode only",
    "weights_not_mappable": "its parameters differ in form from the task's: no checkpoint fits it",
    "shared_output": "an output has no memory of its own, or not in order: its copy is timed, too",
    "output_aliased": "each call overwrites the last one's output: copy it before calling again",
    "not_bit_identical": "repeated calls differ in the last bits, as its atomics or operators may",
    # what to look at before trusting it
    "left_to_confirm": "its calls take so long that screening compared the first ones only",
    "native": "the source calls this, which kernels rarely need: read that line",
    "links": "a library can find functions by name or hide calls: library_calls may lack some",
    "symbols_unreadable": "a library's symbols cannot be read: library_calls may lack some",
    "side_stream": "kernels ran on another stream, joined before the call returned",
    "changes": "the call left this setting of the process changed",
    "sanitizer": "errors that this sanitizer counted; not_run: not here, or unfinished",
    # what to think of the task
    "task_ignores_input": "the task's output does not depend on this argument",
    "constant_passes_own_weights": "with the task's own weights a constant answer would pass",
    "zeros_pass_declared": "on the task's own inputs an answer of zeros would pass",
    "own_answers_never_vary": "the inputs that are timed have one answer, which could be memorised",
    "answers_never_vary": "no draw of the inputs changes the answer, which could be memorised",
    "argument_never_varies": "no other values of this argument suit the task, or were tried",
    "decision_not_reached": "no inputs were found that change what this line of the task decides",
    "attribute_not_compared": "the task sets this attribute in its calls, which nothing compares",
    "few_trials": "compared on its own inputs alone: no others suit the task, or fit into memory",
    # what to think of the time
    "reference_drift": "the reference takes this many times as long as it first did here",
    "clock_drift": "the machine's speed changed while it was timed",
    "throttled": "the GPU lowered its clocks while it was timed",
    "unstable": "the machine disturbed the timing: measure again",
}
"""Family -> clause."""


def family_of(flag: str) -> str:
    return flag.partition(":")[0]


def meaning_of(flag: str) -> str:
    return FLAGS.get(family_of(flag), "")
