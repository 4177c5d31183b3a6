"""The table of trials: inputs, weights and modes in which a candidate is compared with its task,
and what a wrong answer means there.

A new trial is a row.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kernels_eval.config import (
    LEAST_IN_A_ROW,
    LONG_ROW,
    SCREEN_TAIL,
    TAILS,
    CorrectnessConfig,
)
from kernels_eval.judge.conditions import (
    could_save_work,
    flags_non_finite,
    forgets,
    has_needless_order,
    has_promises,
    has_rare_values,
    has_sentinels,
    has_settings,
    has_weights,
    iterates,
    requires_non_finite,
    sums_products,
    takes_alike_calls,
    takes_calls,
    takes_long_row,
    takes_others,
    takes_settings,
    takes_whole_range,
)
from kernels_eval.judge.trial import (
    Condition,
    Stage,
    TrialRow,
)
from kernels_eval.protocol import (
    BEYOND,
    BLOCKS,
    DECLARED,
    FEW,
    FEW_SLICES,
    GENERAL,
    LARGE,
    LASTING,
    LASTING_INPUTS,
    LEADING,
    LESS,
    LONE,
    MOVED,
    MUTATED,
    NON_FINITE,
    OTHER_SETTINGS,
    OUTLIERS,
    PATH,
    POSITIVE_VECTORS,
    RARE,
    RELATED,
    RENEWED_BUFFERS,
    SIGNED,
    UNSORTED,
    UNSTRUCTURED,
    UPPER_BITS,
    VARIED,
    WHOLE_RANGE,
)
from kernels_eval.records import Level, Reason

OTHER_INTEGER = "other_integer"
NEARLY = f"{MUTATED}_{MOVED}0"
TIMES_TEN = tuple(f"normal_x{10**power}" for power in (4, 3, 2, 1))
AS_IMPULSE = "as impulse"
"""The form of `impulse` that the task accepts; as declared where it accepts none."""


def distribution(name: str, draws: tuple[str, ...] = (), **columns: Any) -> TrialRow:
    """A row of inputs from another distribution, in a domain that the task accepts."""
    return TrialRow(
        name,
        draws=draws or (name,),
        domains=True,
        when=lambda task: task.inputs_vary,
        configured=True,
        **{"other_forms": not columns.get("hard")} | columns,
    )


def other_shape(name: str, when: Condition = lambda task: True, **columns: Any) -> TrialRow:
    """A row of a smaller shape, or of other settings: wrong answers show specialisation, exceptions
    are honest.
    """
    return TrialRow(
        name,
        when=lambda task: task.config.shapes != "off" and when(task),
        grades_task=False,
        telling=True,
        stage=Stage.VARIATIONS,
        reason=Reason.SHAPE_SPECIALISED,
        tolerated=lambda wrong: (
            wrong.config.shapes == "flag"
            and not wrong.dead
            and wrong.reason is not Reason.CUDA_ERROR
        ),
        flag=Reason.SHAPE_SPECIALISED.value,
        refusal_flag="declared_shape_only",
        **{"draws": (AS_IMPULSE,)} | columns,
    )


unlike = partial(TrialRow, grades_task=False, differs=True)
"""A row that is left out where its answer is that of `declared`."""


def flagged(name: str, when: Condition, flag: str) -> TrialRow:
    """A row that comes last, where a wrong answer is only a flag."""
    return unlike(
        name,
        draws=(name,),
        when=when,
        other_forms=name == RARE,
        stage=Stage.LAST,
        tolerated=lambda wrong: True,
        flag=flag,
    )


TRIALS = (
    TrialRow(DECLARED, required=True, screen=True),
    distribution("normal", screen=True),
    # with numbers at which an answer may jump, the ends of a domain and zero slices, where these
    # suit the task
    distribution("mixed", ("ends", "edges", "mixed")),
    # as declared but for a few elements: an answer that is kept for what looks alike shows
    distribution("impulse", same_seed=True),
    distribution("large", TIMES_TEN, hard=True, screen=True),
    distribution(
        "offset",
        hard=True,
        # honest sums of that length may err so
        tolerated=lambda wrong: wrong.reason is Reason.WRONG_OUTPUT and wrong.sums_products,
        flag="offset_inputs_differ",
    ),
    distribution("small", hard=True),
    # float64 that the task itself asks for
    unlike(
        "offset_in_float64",
        draws=("offset",),
        domains=True,
        when=lambda task: task.inputs_vary and task.loaded.widens,
        steady=True,
    ),
    # what holds everywhere but at one place is seen by no look at a part
    *(
        unlike(
            draws[-1],
            draws=draws,
            domains=True,
            same_seed=True,
            other_forms=True,
            when=lambda task: task.inputs_vary or could_save_work(task),
        )
        for draws in ((LONE,), (f"{OUTLIERS}_x32", OUTLIERS))
    ),
    # an order that nothing needs, and that a kernel may have taken for granted
    unlike(UNSORTED, draws=(UNSORTED,), when=has_needless_order),
    # what declared arguments never are, whatever that is; and what cannot be seen of each slice
    *(
        unlike(
            name,
            draws=draws,
            when=lambda task: bool(task.loaded.plan.notes),
            steady=True,
            other_forms=True,
        )
        for name, draws in (
            (MUTATED, (MUTATED,) * 3),
            (RELATED, (f"{MUTATED}{LESS}",) * 2),
            (FEW_SLICES, (f"{MUTATED}{FEW}",) * 2),
        )
    ),
    # of few products that are not zero: a factor of fewer digits shows, however long the sum
    TrialRow(
        "sparse_products",
        draws=("sparse",),
        domains=True,
        other_forms=True,
        when=lambda task: task.inputs_vary and sums_products(task),
    ),
    TrialRow("in_place", in_place=True, required=True, screen=True),
    TrialRow(
        "other_weights",
        same_seed=True,
        weights=(SIGNED, POSITIVE_VECTORS),
        when=has_weights,
        required=True,
        screen=True,
    ),
    # what a constructor draws, and a kernel may have kept: integers, masks, random buffers
    unlike(
        "other_buffers",
        same_seed=True,
        weights=(RENEWED_BUFFERS,),
        when=lambda task: bool(task.loaded.drawn),
    ),
    # fewer steps, iterations or terms than the task's, which weights that forget do not need
    *(
        unlike(f"{forms[0]}_weights", same_seed=True, weights=forms, when=has_weights)
        for forms in (LASTING, LARGE)
    ),
    unlike(
        "leading_weights",
        same_seed=True,
        weights=LEADING,
        when=lambda task: has_weights(task) and iterates(task),
    ),
    unlike(LASTING_INPUTS, draws=(LASTING_INPUTS,), when=forgets, steady=True),
    # without what declared arguments have and what would save work
    TrialRow(
        VARIED,
        draws=(f"{VARIED}_edges", VARIED, f"{VARIED}_otherwise"),
        when=could_save_work,
        differs=True,
        screen=True,
    ),
    # what arguments may be and no other draw has; of masks, perhaps for a flag
    unlike(
        RARE,
        draws=(RARE,),
        when=lambda task: has_rare_values(task) and not has_sentinels(task),
        other_forms=True,
        screen=True,
    ),
    flagged(RARE, has_sentinels, "full_masks_differ"),
    # a mask of 0 and 1, and what sums to 1, are promises that honest kernels use, too
    flagged(GENERAL, lambda task: task.loaded.plan.general, "general_values_differ"),
    # integers that nothing bounds; iterations (shortest paths, say) may need positive ones
    unlike(BEYOND[0], draws=BEYOND, when=takes_others(iterating=False), steady=True),
    unlike(BEYOND[0], draws=BEYOND[1:], when=takes_others(iterating=True), steady=True),
    # integers that few bits hold, and that may be any of these
    *(
        unlike(
            WHOLE_RANGE[0],
            draws=WHOLE_RANGE[int(iterating) :],
            when=takes_whole_range(iterating=iterating),
            steady=True,
            other_forms=True,
        )
        for iterating in (False, True)
    ),
    unlike(UPPER_BITS, draws=(UPPER_BITS,), when=lambda task: task.loaded.plan.wide, steady=True),
    # fewer iterations than the task's, which ordinary inputs do not need, show
    *(
        unlike(name, draws=(name,), when=iterates, steady=True, screen=name == BLOCKS)
        for name in (BLOCKS, PATH)
    ),
    # what a model keeps for later calls shows in these
    *(
        TrialRow(
            f"call_{count}_in_a_row",
            earlier=count - 1,
            when=takes_calls(count),
            screen=True,
            grades_task=False,
        )
        for count in range(2, LEAST_IN_A_ROW + 1)
    ),
    # of much the same inputs in turn, which independent draws never are
    *(
        TrialRow(name, alike=draws, when=takes_alike_calls, grades_task=False)
        for name, draws in (
            ("alike_calls", (FEW_SLICES, NEARLY)),
            ("alike_calls_2", (NEARLY, FEW_SLICES)),
        )
    ),
    TrialRow("long_row", earlier=LONG_ROW - 1, when=takes_long_row, grades_task=False, steady=True),
    # what the task replaces or counts is required
    TrialRow(NON_FINITE, draws=(NON_FINITE,), when=requires_non_finite, grades_task=False),
    # without symmetry, or half of zeros, that the task's text promises
    flagged(UNSTRUCTURED, has_promises, "unstructured_inputs_differ"),
    # last, for a flag: fmaxf(x, 0), which many honest kernels use, drops NaN
    flagged(NON_FINITE, flags_non_finite, "non_finite_inputs_differ"),
    other_shape(
        OTHER_INTEGER, draws=("apart", "one_more", "two_more", "one_less"), when=has_settings
    ),
    *(
        other_shape(
            name,
            draws=(DECLARED,),
            settings=True,
            steady=True,
            when=partial(takes_settings, name),
        )
        for name in OTHER_SETTINGS
    ),
    other_shape("batch_1", shape="batch_1"),
    *(other_shape(f"tail_{tail}", tail=tail, screen=tail == SCREEN_TAIL) for tail in TAILS),
    unlike(
        "eval_mode",
        same_seed=True,
        evaluate=True,
        when=lambda task: bool(task.loaded.parameters),
        stage=Stage.VARIATIONS,
        reason=Reason.SHAPE_SPECIALISED,
        tolerated=lambda wrong: not wrong.dead,
        flag="wrong_in_eval_mode",
        refusal_flag="eval_mode_fails",
    ),
)
HARD_TRIALS = frozenset(row.name for row in TRIALS if row.hard)


def rows_of(config: CorrectnessConfig, level: Level) -> list[TrialRow]:
    """The table at a level: `declared`, the configured distributions in order (`small` with
    `large`, to show what is added to a variance), and every other row.
    """
    known = {row.name: row for row in TRIALS if row.configured}
    names = [name for name in config.distributions if name != DECLARED]
    if "large" in names:
        names.append("small")
    chosen = [known.get(name) or distribution(name) for name in names]
    first, *others = (row for row in TRIALS if not row.configured)
    rows = [first, *chosen, *others]
    return rows if level == "confirm" else [row for row in rows if row.screen]
