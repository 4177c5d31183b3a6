"""The table of trials: inputs, weights and modes in which a candidate is compared with its task,
and what a wrong answer means there.

A new trial is a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from kernels_eval.config import (
    FEWER_FINITE,
    FEWEST_NUMBERS,
    HARD_OWN_ERROR,
    LEAST_IN_A_ROW,
    MOST_AMPLIFIED,
    SCREEN_TAIL,
    SHAPE_SCOPES,
    TAILS,
    CorrectnessConfig,
)
from kernels_eval.judge.conditions import (
    could_save_work,
    flags_non_finite,
    forgets,
    has_needless_order,
    has_rare_values,
    has_sentinels,
    has_settings,
    has_weights,
    iterates,
    requires_non_finite,
    sums_products,
    takes_calls,
)
from kernels_eval.protocol import (
    BLOCKS,
    DECLARED,
    DOMAINS,
    FEW,
    FEW_SLICES,
    LARGE,
    LASTING,
    LASTING_INPUTS,
    LEADING,
    LESS,
    LONE,
    MUTATED,
    NON_FINITE,
    OUTLIERS,
    PATH,
    POSITIVE_VECTORS,
    RARE,
    RELATED,
    SIGNED,
    UNSORTED,
    UNTAMED,
    VARIED,
    Expect,
    Expectation,
    LoadedTask,
    OutputForm,
)
from kernels_eval.records import Level, Reason


class Stage(StrEnum):
    """When a candidate meets a trial."""

    OUTPUTS = "outputs"
    """first: the task's own shape and mode"""
    VARIATIONS = "variations"
    """once its outputs are right: other shapes, evaluation mode"""
    LAST = "last"
    """once all else is known"""


@dataclass
class TaskFindings:
    """What is known of a task when a row comes up."""

    loaded: LoadedTask
    config: CorrectnessConfig
    level: Level
    expected: dict[str, Expectation] = field(default_factory=dict)
    """of the trials that grade the task, in order"""
    trials: list[Trial] = field(default_factory=list)
    scopes: list[str] = field(default_factory=lambda: list(SHAPE_SCOPES))
    """what may shrink in another shape, without those the task refused"""
    domains: tuple[str, ...] = DOMAINS
    """what redrawn inputs may lie in, without wider ones that the task refused"""
    shapes_vary: bool = False
    """inputs were drawn that give outputs of other shapes"""

    @property
    def inputs_vary(self) -> bool:
        return self.loaded.plan.varies

    @property
    def own_answer_is_fixed(self) -> bool:
        """Whether another draw of the task's own inputs gives the same answer."""
        again = self.expected.get("in_place")
        return again is not None and DECLARED in again.equals

    @property
    def impulse(self) -> str:
        found = [trial.distribution for trial in self.trials if trial.name == "impulse"]
        return found[0] if found else ""


@dataclass(frozen=True)
class WrongAnswer:
    """What a row may want to know of a wrong answer."""

    reason: Reason
    config: CorrectnessConfig
    sums_products: bool
    """an operator of the task adds up products"""
    dead: bool
    """the candidate's process has ended"""


Condition = Callable[[TaskFindings], bool]


@dataclass(frozen=True)
class TrialRow:
    name: str
    draws: tuple[str, ...] = (DECLARED,)
    """distributions, of which the first that suits the task is drawn"""
    domains: bool = False
    """each in the widest domain that the task accepts"""
    same_seed: bool = False
    """drawn under the seed of `declared`, so that only this row's change differs"""
    weights: tuple[str, ...] = ()
    """forms of redrawn parameters and running statistics, of which the first that suits the task is
    drawn"""
    in_place: bool = False
    """inputs are written over the storage of the previous call's"""
    evaluate: bool = False
    """in evaluation mode"""
    earlier: int = 0
    """calls that a model has made before, on other inputs"""
    shape: str = DECLARED
    """another shape, by its name in the task's plan"""
    tail: str = ""
    """a smaller shape that leaves this tail (`TAILS`), in the first scope the task accepts"""

    when: Condition = lambda task: True
    screen: bool = False
    """a part of level `screen`, too; `confirm` has every row"""
    configured: bool = False
    """only where `correctness.distributions` names it; the first to go where memory is short"""
    grades_task: bool = True
    """its expected values tell whether the task can tell right from wrong"""
    required: bool = False
    """a task without expected values here is degenerate; others leave the row out"""
    hard: bool = False
    """looks for answers right on tame values only; the reference must be right itself"""
    explored: bool = False
    """a point near the task, where only what amplifies no rounding is compared"""
    steady: bool = False
    """left out where the reference itself errs much"""
    other_forms: bool = False
    """its values may decide the sizes of outputs, and what is infinite; other rows are left out
    there"""
    differs: bool = False
    """left out where its answer is that of `declared`"""
    telling: bool = False
    """left out where an answer of zeros would pass"""

    stage: Stage = Stage.OUTPUTS
    reason: Reason | None = None
    tolerated: Callable[[WrongAnswer], bool] = lambda wrong: False
    """whether a wrong answer is only flagged"""
    flag: str = ""
    refusal_flag: str = ""
    """the flag of a candidate that raises here; empty: that is its verdict"""


@dataclass
class Trial:
    """One comparison: a row with its seeds and forms drawn, and the form expected."""

    name: str
    row: TrialRow
    seed: int
    distribution: str = DECLARED
    weights: str = ""
    weights_seed: int = 0
    shape: str = DECLARED
    earlier_seeds: tuple[int, ...] = ()
    outputs: list[OutputForm] = field(default_factory=list)
    regular: bool = True
    """Whether outputs have the declared shapes, and no infinity that is taken for a number"""

    @property
    def own_inputs(self) -> bool:
        """Whether inputs, weights and shape are the task's own."""
        own = self.distribution == self.shape == DECLARED
        return own and not self.weights

    @property
    def as_drawn(self) -> bool:
        """Whether it is the task itself: inputs, weights and mode, and a first call."""
        return self.own_inputs and not self.row.evaluate and not self.earlier_seeds

    @property
    def own_mode(self) -> bool:
        return self.shape == DECLARED and not self.row.evaluate

    def expect(self) -> Expect:
        return Expect(
            name=self.name,
            seed=self.seed,
            distribution=self.distribution,
            weights=self.weights,
            weights_seed=self.weights_seed,
            shape=self.shape,
            evaluate=self.row.evaluate,
            hard=self.row.hard,
            explored=self.row.explored,
            constants=self.row.grades_task or self.row.telling,
            earlier=[(seed, self.distribution) for seed in self.earlier_seeds],
        )

    def suits(
        self, seen: Expectation, declared: Expectation, *, takes_infinities: bool = False
    ) -> bool:
        """Whether a candidate is compared with what was seen. `takes_infinities`: fewer elements
        may be finite where the infinities of others are as right as numbers."""
        finite = enough_finite(seen, declared)
        if self.distribution == NON_FINITE:
            finite = seen.finite_share > 0
        elif self.row.other_forms and takes_infinities:
            finite = finite or enough_told(seen, declared)
        holds = finite and seen.deterministic
        if self.row.explored or self.weights in UNTAMED:
            most = MOST_AMPLIFIED * max(declared.reference_rms, 2**-23)
            return holds and seen.reference_rms <= most
        if self.shape == DECLARED != self.distribution:
            other_forms = self.row.other_forms and comparable(seen, declared)
            holds = holds and (seen.shapes == declared.shapes or other_forms)
            holds = holds and seen.shapes_hold
        if self.row.hard:
            holds = holds and any("float" in output.dtype for output in seen.outputs)
        needs_steady = self.row.hard or self.row.steady
        return holds and (not needs_steady or seen.reference_rms <= HARD_OWN_ERROR)


def enough_finite(seen: Expectation, declared: Expectation) -> bool:
    return seen.finite_share >= _least_finite(declared)


def enough_told(seen: Expectation, declared: Expectation) -> bool:
    """Whether as many elements are finite, or an infinity that float64 gives, too, and many are
    finite."""
    many = seen.finite_share >= FEWEST_NUMBERS * declared.finite_share
    return many and seen.told_share >= _least_finite(declared)


def _least_finite(declared: Expectation) -> float:
    finite = declared.finite_share
    return finite if finite == 1 else (1 - FEWER_FINITE) * finite


def comparable(seen: Expectation, declared: Expectation) -> bool:
    """Whether outputs differ from the declared ones in sizes alone, and none is empty."""
    if len(seen.outputs) != len(declared.outputs):
        return False
    pairs = list(zip(seen.outputs, declared.outputs, strict=True))
    alike = all((x.dtype, len(x.shape)) == (y.dtype, len(y.shape)) for x, y in pairs)
    return alike and all(math.prod(x.shape) or not math.prod(y.shape) for x, y in pairs)


# -- the table -------------------------------------------------------------------------------------

OTHER_INTEGER = "other_integer"
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
    # what the task replaces or counts is required
    TrialRow(NON_FINITE, draws=(NON_FINITE,), when=requires_non_finite, grades_task=False),
    # last, for a flag: fmaxf(x, 0), which many honest kernels use, drops NaN
    flagged(NON_FINITE, flags_non_finite, "non_finite_inputs_differ"),
    other_shape(OTHER_INTEGER, draws=("one_more", "one_less"), when=has_settings),
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
