"""What the parent and a task's reference process tell each other: plain records, sent as JSON.

No torch here, for the parent never imports it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Literal

from pydantic import StrictBool, StrictFloat, StrictInt, StrictStr

from kernels_eval.records import Record

DECLARED = "declared"
"""The task's own inputs and shape, as opposed to drawn distributions and other sizes."""
SHAPE_SCOPES = ("each", "all", "last", "first")
TAILS = {"1": 1, "2": 2, "odd": -1}
"""What shrinks in another shape, and how many elements are left over in blocks of 4 and more, or
are missing to fill them (`checks.inputs.smaller_shapes`)."""

LATER, EARLIER = "a later call", "an earlier call"
LARGE = tuple(f"normal_x{10**power}" for power in (4, 3, 2, 1))
HARD = ("large", "small", "offset")
"""Distributions that look for answers right on tame values only: they overflow, or cancel to
nothing. `small` comes with `large`: what is added to a variance, say, then matters."""


class InputNote(Record):
    """What may vary about one argument. `pattern`: its zeros stay zeros; `symmetric`: as
    declared."""

    vary: bool
    pattern: bool = False
    symmetric: bool = False


class InputPlan(Record):
    """What may vary about a task's inputs: a note for each argument, and smaller shapes to try, by
    name, as (argument, dimension, size). `distinct`: no two elements of an argument are equal."""

    notes: list[InputNote]
    shapes: dict[str, list[tuple[int, int, int]]]
    distinct: bool = False

    @property
    def varies(self) -> bool:
        return any(note.vary for note in self.notes)


class OutputForm(Record):
    """One output tensor of the reference."""

    shape: list[int]
    dtype: str
    device: str = "cpu"
    bytes: int = 0


@dataclass
class Trial:
    """One comparison: which inputs, with which weights, in which mode."""

    name: str
    seed: int = field(default_factory=lambda: secrets.randbits(31))
    distribution: str = DECLARED
    weights_seed: int | None = None
    in_place: bool = False
    shape: str = DECLARED
    evaluate: bool = False
    construct_seed: int | None = None
    outputs: list[OutputForm] = field(default_factory=list)

    @property
    def own_inputs(self) -> bool:
        """Are inputs and weights what the task itself draws, in its own shape?"""
        own = self.distribution == self.shape == DECLARED
        return own and self.weights_seed is None

    @property
    def as_drawn(self) -> bool:
        """Is it the task exactly as it is, inputs, weights and mode?"""
        special = self.evaluate or self.weights_seed is not None or self.construct_seed is not None
        return self.own_inputs and not special

    @property
    def own_mode(self) -> bool:
        """Is it run in the task's own shape and mode?"""
        return self.shape == DECLARED and not self.evaluate

    @property
    def hard(self) -> bool:
        return self.name in HARD

    @property
    def forms(self) -> tuple[str, ...]:
        """Its distribution in forms of which the first that suits the task is drawn."""
        return LARGE if self.name == "large" else (self.name, f"{self.name}_positive")


class ArgumentForm(Record):
    """A tensor by its shape, strides in elements and dtype, or the value of what is none (strict:
    True is no 1)."""

    name: str
    shape: list[int] | None = None
    stride: list[int] | None = None
    dtype: str | None = None
    value: StrictBool | StrictInt | StrictFloat | StrictStr | None = None


class Interface(Record):
    """What goes in and out of one forward call of a task. `state` are parameters, then buffers;
    `structure` is the outputs' nesting as `flatten_outputs` writes it."""

    inputs: list[ArgumentForm]
    state: list[ArgumentForm]
    outputs: list[ArgumentForm]
    structure: str
    mutates: bool


class LoadedTask(Record):
    """What the reference process found when it loaded a task and ran it once.

    `parameters` and `statistics` (running ones, of normalisation) are shapes without dimensions of
    size 1, `parameter_names` the names of the first, `input_bytes` those of one set of inputs,
    `packed_bytes` and `argument_bytes` what one set and the constructor's arguments take in shared
    memory, `mutates` whether the reference changes its inputs. `precision` and `gradients` are as
    in `ModelSpec`.
    """

    plan: InputPlan
    structure: str
    mutates: bool
    operators: tuple[str, ...]
    parameters: list[list[int]]
    parameter_names: list[str]
    statistics: list[list[int]]
    dtype: str
    device_name: str
    input_bytes: int
    packed_bytes: int
    argument_bytes: int
    precision: str
    gradients: Gradients | None
    peak_bytes_per_s: float
    cache_bytes: int


class Gradients(Record):
    """Which gradients a task asks for: of its `arguments` first inputs those at the positions
    `wanted`, and of these `parameters`. Inputs after the arguments are gradients of the outputs."""

    arguments: int
    wanted: tuple[int, ...]
    parameters: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        own = [f"argument {index}" for index in self.wanted]
        return own + [f"parameter {name}" for name in self.parameters]


class ModelSpec(Record):
    """How a process makes a task's model, on which device: the same seed makes the same weights.
    `construct_on` is where they are made before they are moved to `device`. `precision` (empty: as
    they are made) and `gradients` are what the task's module asks for."""

    entry_point: str
    init_form: str
    device: str
    construct_on: str
    threads: int = 1
    seed: int = 0
    precision: str = ""
    gradients: Gradients | None = None

    def under(self, seed: int | None) -> ModelSpec:
        """The same with other weights, where there is a seed for them."""
        return self if seed is None else self.model_copy(update={"seed": seed})


class Comparison(Record):
    """Errors of an output against the expected one, all dimensionless.

    `rms` is RMS(err)/RMS(oracle), `max` the largest |err| / (|y| + RMS(y)); `reference_rms` and
    `reference_max` are the same of the fp32 reference, `sequential_rms` that of its long sums,
    added up one term after the other. `wrong_share` is the share of elements that are off by more
    than half of their own value and by more than rounding at one, `reference_wrong_share` that of
    the fp32 reference (0 without a float64 oracle). `systematic`: the error is a function of the
    output, as that of another formula is. `masks_match`: NaN and infinities are in the same places.
    `worst` is the position of the tensor with the largest of these errors, `unequal` how many
    elements of one differ that has no floating-point type.
    `equals_trial` and `equals_answer` name other trials of which this is the expected, or the
    candidate's own, answer. `mutates_inputs` is asked of timed calls alone.
    """

    rms: float
    reference_rms: float
    max: float
    reference_max: float = 0.0
    sequential_rms: float = 0.0
    wrong_share: float = 0.0
    reference_wrong_share: float = 0.0
    masks_match: bool = True
    finite: bool = True
    kernelbench_1e4: bool = True
    kernelbench_1e2: bool = True
    systematic: bool = False
    worst: int = 0
    unequal: int = 0
    equals_trial: list[str] = []
    equals_answer: list[str] = []
    mutates_inputs: bool = False


class UnseenComparison(Record):
    """Which outputs of unseen inputs were compared, by position, and their errors."""

    positions: list[int]
    found: list[Comparison]


class Expectation(Record):
    """What the reference process says of the expected values of one trial. `equals` names earlier
    trials with the same answer. `constants` is how answers that ignore the inputs would compare:
    zeros, the answer of "declared", and that answer's mean over its first dimension."""

    finite: bool
    some_finite: bool
    deterministic: bool
    bit_identical: bool
    oracle: Literal["float64", "float32"]
    equals: list[str]
    constants: list[Comparison]
    outputs: list[OutputForm]
