"""Messages of the reference process, which runs the task's own model, holds expected values and
compares a candidate's outputs.
"""

from __future__ import annotations

from typing import Literal

from kernels_eval.config import MOST_CALLS_PER_SAMPLE
from kernels_eval.protocol.message import Done, Payload, Request
from kernels_eval.protocol.model import (
    DECLARED,
    BufferForm,
    Gradients,
    HandedOver,
    InputPlan,
    KeptNumbers,
    MemoryRequest,
    ModelSpec,
    OutputForm,
    Shared,
    SideEffects,
)

LATER, EARLIER = "a later call", "an earlier call"
"""Other calls of a round, as `Comparison.equals_trial` names them."""


class LoadedTask(Payload):
    """What loading a task and running it once has shown.

    `parameters` and (running) `statistics` are shapes without dimensions of size 1; `structured`:
    parameters that a constructor made of less than their elements; `parameter_digests`: of their
    values; `depth`: how often one operator
    is applied to what it gave (`kernels_eval.reference.depth`); `infinite`: whether one is given an
    infinity (`kernels_eval.reference.infinities`); `widens`: whether one
    makes float64 of less; `input_bytes` are those of one set of inputs;
    `packed_bytes`, `argument_bytes` and `weight_bytes` what a set, the constructor's
    arguments and the weights take in shared memory.
    `precision`, `gradients`, `effects`, `padded` and `drawn` as in `ModelSpec`.
    `peak_bytes_per_s`: of the device's memory, 0 for a task that its cache holds. `memory_share`:
    of a GPU's memory, what loading and one run took.
    `kept`: plain attributes that calls set by their inputs; `attributes`: those of them that
    nothing compares.
    `layout`: of the reference's outputs (`layout_of`). `ambiguous`: why no answer can be told to be
    right, as there are several.
    """

    plan: InputPlan
    structure: str
    operators: tuple[str, ...]
    depth: int = 0
    infinite: bool = False
    widens: bool = False
    parameters: list[list[int]]
    parameter_names: list[str]
    parameter_digests: list[str]
    statistics: list[list[int]]
    structured: list[int]
    dtype: str
    device_name: str
    input_bytes: int
    packed_bytes: int
    argument_bytes: int
    weight_bytes: int
    precision: str
    gradients: Gradients | None
    effects: SideEffects | None
    padded: list[list[int]] = []
    drawn: list[BufferForm] = []
    peak_bytes_per_s: float
    cache_bytes: int
    memory_share: float = 0.0
    layout: int = 0
    kept: list[str] = []
    attributes: list[str] = []
    ambiguous: str = ""

    @property
    def calls_in_a_row(self) -> int:
        """How many calls of a model tell what it keeps from one to the next; 1 for most."""
        return self.effects.calls if self.effects else 1

    @property
    def long_row(self) -> int:
        """How many calls the longest row has that is compared."""
        return self.effects.row if self.effects else 1

    @property
    def remembers(self) -> bool:
        return bool(self.effects and self.effects.remembers)

    @property
    def longest_run(self) -> int:
        """How many calls of one model in a row may be timed."""
        return self.calls_in_a_row if self.remembers else MOST_CALLS_PER_SAMPLE

    @property
    def changes_arguments(self) -> bool:
        """Whether a call leaves other inputs than it was given."""
        return bool(self.effects and self.effects.arguments)


OTHER_INPUTS, OTHER_ROUNDING = "other_inputs", "other_rounding"
"""What a task may be loaded without: runs on inputs that are not its own while it is loaded, and
runs in float64 or with operators that round otherwise."""


class LoadTask(Request[LoadedTask]):
    """Load a task and run it once. Oracles in float64 take `oracle_max_bytes` at most. `left_out`:
    what has broken its process before."""

    path: str
    spec: ModelSpec
    oracle_max_bytes: int = 0
    left_out: list[str] = []


class Comparison(Payload):
    """Errors of an output against the expected one, all dimensionless.

    `rms` is RMS(err)/RMS(oracle), `max` the largest |err| / (|y| + RMS(y)); `reference_rms` and
    `reference_max` those of the fp32 reference; `sequential_rms` that of the long sums that an
    output comes from, added term by term; `widest` the gate of the coarsest type that it was
    rounded to on the way; `scatter_rms` and `scatter_max` what it differs by where operators round
    otherwise, 0 unless that was asked. `wrong_share`: elements off by more than half their value
    and more than rounding at one, `wrong_slice` most of them at one index of a dimension;
    `reference_wrong_share`, `reference_wrong_slice`: the fp32 reference's (0 without a float64
    oracle). `of_slice`: `rms` and `reference_rms` are those of one slice. `systematic`: the error
    is a function of the output, as another formula's is, but for `left_rms`; `offset`: it is one
    number everywhere. `lost_bits`: of fp32's mantissa, those that no element of the output has.
    `masks_match`: NaN and infinities are in the same places. `worst`: position
    of the tensor with the largest of these errors. `unequal`: differing elements of a tensor
    without floating-point type. `only_chosen`: the reference moves and chooses numbers, computes
    none. `ordered`: it sorted them; `misplaced`: neighbours that are in order in its output, not in
    this. `unwritten`: elements that hold what free memory was filled with, where an answer is far
    off. `equals_trial` and `equals_answer` name other trials with this as the expected, or the
    candidate's own, answer; `constant`: it is of one number, which is no other trial's answer.
    `mutates_inputs` is of timed calls alone.
    `precision`: of the outputs that these errors are of, as `Gates` names it.
    """

    rms: float
    reference_rms: float
    max: float
    precision: str = ""
    reference_max: float = 0.0
    sequential_rms: float = 0.0
    scatter_rms: float = 0.0
    scatter_max: float = 0.0
    widest: float = 0.0
    left_rms: float = 0.0
    lost_bits: int = 0
    wrong_share: float = 0.0
    reference_wrong_share: float = 0.0
    wrong_slice: float = 0.0
    reference_wrong_slice: float = 0.0
    of_slice: bool = False
    masks_match: bool = True
    kernelbench_1e4: bool = True
    kernelbench_1e2: bool = True
    systematic: bool = False
    offset: bool = False
    worst: int = 0
    unequal: int = 0
    misplaced: int = 0
    unwritten: int = 0
    only_chosen: bool = False
    ordered: bool = False
    equals_trial: list[str] = []
    equals_answer: list[str] = []
    constant: bool = False
    mutates_inputs: bool = False


class Expectation(Payload):
    """Of a trial's expected values. `finite_share`: of an output's elements, the least of any
    output that has some; `told_share`: the same with infinities that float64 gives, too.
    `shapes_hold`: shapes other than the declared ones hang on no rounding. `equals` names earlier
    trials with the same answer. `constants`: errors of answers that ignore the inputs: zeros, the
    answer of "declared", and that answer's mean over its first dimension; none unless they are
    asked for. `reference_rms` and `sequential_rms`: of the output that has most.
    """

    finite_share: float
    reference_rms: float
    sequential_rms: float
    deterministic: bool
    bit_identical: bool
    oracle: Literal["float64", "float32"]
    equals: list[str]
    constants: list[Comparison]
    outputs: list[OutputForm]
    told_share: float = 1.0
    shapes_hold: bool = True

    @property
    def shapes(self) -> list[list[int]]:
        return [output.shape for output in self.outputs]


class Expect(Request[Expectation]):
    """Compute and keep a trial's expected outputs. `hard`: judge numbers alone, as integers may
    depend on a step. `earlier`: seeds and distributions of the calls that a model has made before.
    `weights`: the form of redrawn ones. `explored`: what rounding costs there is measured by moving
    its inputs and weights, too. `constants`: whether answers that ignore the inputs are measured.
    `settings`: the name of other arguments of its constructor.
    """

    name: str
    seed: int
    distribution: str = DECLARED
    weights: str = ""
    weights_seed: int = 0
    shape: str = DECLARED
    evaluate: bool = False
    hard: bool = False
    explored: bool = False
    constants: bool = False
    earlier: list[tuple[int, str]] = []
    settings: str = ""


class Glimpse(Payload):
    """Whether outputs have only finite numbers, and their forms."""

    finite: bool
    outputs: list[OutputForm]


class GlanceAt(Request[Glimpse]):
    """Keep a trial's expected outputs as those of the reference alone, which errs as on its own
    inputs: whether a candidate's are near is known soon."""

    trial: Expect


class ForgetTrial(Request[Done]):
    trial: str


class LeftOut(Payload):
    """How many elements the task's longest sum has, or are compared for the largest (0: not many),
    the error of its own answer without one of few terms, and how many draws of these are enough.
    """

    length: int = 0
    less: Comparison | None = None
    draws: int = 0


class LeaveOut(Request[LeftOut]):
    """How wrong is an answer without one term, of so few, `around` them this and of this `size`?
    The plan has then these terms of that `kind`.
    """

    seed: int
    kind: str
    terms: int
    around: float | None
    size: float | None


class NewCandidate(Request[Done]):
    """What follows is about another candidate."""


class ExpectWithout(Request[Done]):
    """The candidate keeps these outputs, counted from the end, in its own way."""

    positions: list[int]


class ShareMemory(MemoryRequest[Shared]):
    """Memory for outputs. `whose`: "candidate", or in a round "unseen" or the reference's "own";
    "inputs" is for those of a round.
    """

    whose: str


class DrawInputs(MemoryRequest[HandedOver]):
    """Put the inputs of these seeds, each of a distribution, into shared memory: new, or that of a
    round."""

    seeds: list[int]
    distributions: list[str]
    shape: str = DECLARED
    of_round: bool = False


class HandOver(MemoryRequest[HandedOver]):
    """Put the constructor's arguments, or those of these `settings`, or the model's `weights`, into
    shared memory."""

    weights: bool = False
    settings: str = ""


class Compare(Request[Comparison]):
    """Compare the candidate's output with the expected values of this and earlier trials. `marks`:
    a number far larger than all others may stand for an infinity.
    """

    trial: str
    marks: bool = False


GELU_BY_TANH = "GELU by tanh"


def operands_in(name: str) -> str:
    """What explains an error where all operators take numbers in this format."""
    return f"operands in {name}"


class Explained(Payload):
    """What explains a small error of an fp32 task: a format of factors of products,
    `operands_in` one, or `GELU_BY_TANH`; "": none of these. `as_large`: then the first that gives
    an error of this size, at other places."""

    by: str = ""
    as_large: str = ""


class ExplainError(Request[Explained]):
    """What explains the error of the candidate's output, the last that was compared in a trial:
    that of any tensor, or of the one at this place."""

    trial: str
    place: int | None = None


class OmittedTerm(Payload):
    """A term or factor of the task's formula, and its coefficient in a candidate's error: 1 where
    it is left out."""

    name: str
    coefficient: float
    standard_error: float


class Omitted(Payload):
    terms: list[OmittedTerm] = []


class FindOmitted(Request[Omitted]):
    """Which terms of its formula the candidate's output lacks, the last that was compared in a
    trial. `every`: also those that it does not lack, for measurements."""

    trial: str
    every: bool = False


class KeepNumbers(Request[KeptNumbers]):
    """What do attributes hold after calls in a row, on inputs of these seeds?"""

    seeds: list[int]
    names: list[str]


class Likeness(Payload):
    """By how much two errors differ, in units of the earlier one's size; 1 where there is none."""

    distance: float = 1.0


class LikenError(Request[Likeness]):
    """How much the error of the candidate's output in a trial is like the one before it that was
    asked for."""

    trial: str


class UnseenComparison(Payload):
    """Which outputs of unseen inputs were compared, by position, and their errors."""

    positions: list[int]
    found: list[Comparison]


class CompareUnseen(Request[UnseenComparison]):
    """Compare outputs of a round: those at these positions, and so many that are `farthest` off."""

    positions: list[int]
    farthest: int
    seeds: list[int]
    distributions: list[str]


class CompareSums(Request[UnseenComparison]):
    """Compare all outputs of a round on inputs of few terms, of this kind and these seeds."""

    kind: str
    seeds: list[int]


class DrawnTimingInputs(Payload):
    """Seconds of drawing. `graphs`: how many torch.compile has made so far."""

    seconds: float
    graphs: int = 0


class DrawTimingInputs(Request[DrawnTimingInputs]):
    """Draw a set of inputs for each seed, for samples to rotate over."""

    seeds: list[int]
    distribution: str = DECLARED


class EndTiming(Request[Done]):
    """Give back the memory that only timing needs."""


class IgnoredInputs(Payload):
    """Positions of arguments that may vary and do not change the output."""

    ignored: list[int]


class FindIgnoredInputs(Request[IgnoredInputs]):
    seed: int


class FoundDecisive(Payload):
    """Inputs that change what is decided, if any, and the lines of the task whose decisions all
    trials leave as they are on declared inputs."""

    seed: int = 0
    distribution: str = ""
    lines: list[int] = []


class FindDecisive(Request[FoundDecisive]):
    """Search inputs, within a `domain`, that change what is decided alike in all of these trials,
    the declared one first, so that the answer changes with it."""

    trials: list[str]
    seed: int
    domain: str


class FoundLasting(Payload):
    """Distributions."""

    found: list[str]


class FindLasting(Request[FoundLasting]):
    """Search inputs, within a `domain`, that hold a state for long, and on which the reference's
    last outputs still tell what came before it; of each length along which they do one."""

    seed: int
    domain: str


class FoundReach(Payload):
    """What may vary about a task's inputs, with the numbers that it takes."""

    plan: InputPlan


class FindReach(Request[FoundReach]):
    """Find how far each argument of floats may leave its declared range, the others as declared."""

    seed: int


class FindFree(Request[FoundReach]):
    """Find which arguments may be any numbers, of a task that does not take these of all."""

    seed: int


class FoundSettings(Payload):
    """Names of other arguments of the constructor."""

    found: list[str]


class FindSettings(Request[FoundSettings]):
    """Find which other arguments a task's constructor takes."""

    seed: int


class FoundFaint(Payload):
    """Distributions."""

    found: list[str]


class FindFaint(Request[FoundFaint]):
    """Find inputs on which the reference's answer is tiny, and no multiple of its usual one;
    `apart`: also by moving one argument away from the others."""

    seed: int
    apart: bool


class FoundShifted(Payload):
    """Forms of weights."""

    found: list[str]


class FindShifted(Request[FoundShifted]):
    """Find weights that may be moved far from where they are (`kernels_eval.model.shifts`),
    together if the task takes that."""

    seed: int
    weights_seed: int


class FoundStructures(Payload):
    """What may vary about a task's inputs, with the structures that it takes."""

    plan: InputPlan


class FindStructures(Request[FoundStructures]):
    """Find the structures within which a task takes other values of its arguments, and draw them
    so from now on."""

    seed: int


class UnvariedArguments(Payload):
    arguments: list[int]


class FindUnvaried(Request[UnvariedArguments]):
    """Which arguments are as declared in all of these trials?"""

    trials: list[str]


class UsedBytes(Payload):
    bytes: float


class EstimateUsedBytes(Request[UsedBytes]):
    seed: int


class WeightsMatter(Payload):
    """Whether the output changes with these weights."""

    matter: bool


class TryOtherWeights(Request[WeightsMatter]):
    """Does the output change when these parameters (by position; none: the running statistics) get
    other values? With `drawn`: what the constructor draws of these names.
    """

    seed: int
    only: list[int]
    drawn: list[str] = []
