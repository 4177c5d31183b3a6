"""What a trial is: a row of the table with its seeds and forms drawn, and what is known of a task
when it comes up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from kernels_eval.config import (
    FEWER_FINITE,
    FEWEST_NUMBERS,
    HARD_OWN_ERROR,
    MOST_AMPLIFIED,
    SHAPE_SCOPES,
    CorrectnessConfig,
)
from kernels_eval.protocol import (
    DECLARED,
    DOMAINS,
    NON_FINITE,
    Expect,
    Expectation,
    LoadedTask,
    OutputForm,
    is_untamed,
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
    settings: tuple[str, ...] = ()
    """names of other arguments that the task's constructor takes"""
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
    """calls that a model has made before, on other inputs, or as many of these as are compared"""
    alike: tuple[str, ...] = ()
    """how the earlier calls' inputs differ from the compared one's, which they are like"""
    shape: str = DECLARED
    """another shape, by its name in the task's plan"""
    tail: str = ""
    """a smaller shape that leaves this tail (`TAILS`), in the first scope the task accepts"""

    settings: bool = False
    """constructed with other arguments, which have this row's name"""

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
    earlier_draws: tuple[str, ...] = ()
    """the distributions of these; empty: all as the compared call's"""
    outputs: list[OutputForm] = field(default_factory=list)
    regular: bool = True
    """Whether outputs have the declared shapes, and no infinity that is taken for a number"""

    @property
    def distributions(self) -> list[str]:
        """Of each call, the compared one last."""
        earlier = self.earlier_draws or [self.distribution] * len(self.earlier_seeds)
        return [*earlier, self.distribution]

    @property
    def own_inputs(self) -> bool:
        """Whether inputs, weights and shape are the task's own."""
        own = self.distribution == self.shape == DECLARED
        return own and not self.weights and not self.row.settings

    @property
    def as_drawn(self) -> bool:
        """Whether it is the task itself: inputs, weights and mode, and a first call."""
        return self.own_inputs and not self.row.evaluate and not self.earlier_seeds

    @property
    def own_mode(self) -> bool:
        return self.shape == DECLARED and not self.row.evaluate and not self.row.settings

    @property
    def settings(self) -> str:
        """The name of the constructor's arguments, empty for the declared ones."""
        return self.name if self.row.settings else ""

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
            earlier=list(zip(self.earlier_seeds, self.distributions, strict=False)),
            settings=self.settings,
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
        if self.row.explored or is_untamed(self.weights):
            most = MOST_AMPLIFIED * max(declared.reference_rms, 2**-23)
            return holds and seen.reference_rms <= most
        # one more of what an integer counts gives other sizes, as another shape does
        own_sizes = self.shape == DECLARED and self.row.stage is not Stage.VARIATIONS
        if own_sizes and self.distribution != DECLARED:
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
