"""Messages of any process that runs a model: how it is made, its memory, samples, and rounds on
unseen inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Generic, TypeVar

from pydantic import FailFast, Field

from kernels_eval.config import MOST_ITEMS, MOST_KEPT_NUMBERS
from kernels_eval.languages import Language
from kernels_eval.protocol.message import (
    Count,
    Done,
    Finite,
    Nanoseconds,
    Payload,
    Report,
    Request,
    Several,
    Shape,
    Text,
)

DECLARED = "declared"
"""The task's own inputs and shape, not drawn distributions or other sizes."""
MOVED = "moved"
"""The task's own inputs, each float a little off: what saves work by chance does not hold."""
VARIED = "varied"
"""Arguments without what saves work."""
UNSTRUCTURED = "unstructured"
"""As declared, but for promised structures, which are shuffled."""
UNSORTED, LASTING_INPUTS = "unsorted", "lasting_inputs"
"""As declared, but for integers in an order that nothing needs, which are shuffled; and but for
tables of places in themselves, which are permutations, and square matrices of probabilities, which
are near the identity."""
RARE, BLOCKS, PATH = "rare", "blocks", "path"
"""As declared, but for values that a task may be given and no other draw has; and, for tasks that
iterate, matrices of two blocks that are hardly coupled, and masks that are one path."""
BEYOND = ("beyond", "above", "above_x4")
"""As declared, but for whole numbers that nothing bounds, which are up to 16 times as large, or
negative; or none negative; or up to 4 times as large."""
GENERAL = "general_values"
"""As declared, but for floats of two numbers that are computed with, some of which lie between
these, and probabilities whose sums are less than 1."""
WHOLE_RANGE = ("whole_range", "whole_range_above", "whole_range_x4")
"""As declared, but for integers of few bits, and bytes that more bits hold, that are computed with:
some are any that these bits hold, or none is below the least, or up to 4 times as large."""
NARROW = ("narrow", "bytes")
"""Forms of what these change."""
UPPER_BITS = "upper_bits"
"""As declared, but for the upper 32 bits of some unbounded integers of 64 bits that integers are
computed from, or that are compared with each other, unless they are divided."""
WIDENED = ("unbounded", "positive", "wide")
"""Forms of what these bits may change."""
ENLARGED = ("large", "wide", "exponents")
RARE_FORMS = ("one_hot", "full_rows", *ENLARGED)
"""Forms of what `rare` changes; of these, integers that are larger there."""
EXTENDED = ("unbounded", "positive", "zeros", "places", "large")
"""Forms of what `beyond` changes: these numbers, also those that are divided; those that operators
sort or whose bits they read; floats that are all 0, which are of either sign in each of these
draws; and places, which are any in what the task looks up."""
MUTATED, RELATED, FEW_SLICES = "mutated", "related", "few_slices"
"""Arguments changed at random (`kernels_eval.model.mutations`): `mutated_SEED`, with
`_less` such that their slices look natural one by one, which is the trial called `related`, with
`_few` at one to eight places of an axis alone, which is the one called `few_slices`, with `_alike`
such that a few parts are exactly like others (`kernels_eval.model.copies`), with `_near` like what
the task computes with (`kernels_eval.reference.operands`), and with `_heldLENGTH` such that states
are held along an axis (`kernels_eval.model.held`)."""
LASTING_STATES = ("lasting_states", "lasting_states_2")
"""Trials of inputs that hold a state for long, on which the reference still tells what was before
it."""
FAINT, APART = "faint", "apart"
"""Arguments of floats, all times a power of two, `faint_EXPONENT`; or one as a whole away from the
others, `apart_INDEX_BY`, by so many times its RMS: on these a task's answer is tiny."""
DECISIONS = ("decisions", "decisions_2", "decisions_3", "decisions_4")
"""Trials of inputs that change what others seldom decide otherwise
(`kernels_eval.reference.decisions`)."""
SUM = "sum"
"""What some integers keep."""
FIXED = ("fixed",)
"""The structure of an argument that a task takes as declared only."""
POSITIVE_VECTORS, SIGNED, SCALED = "positive_vectors", "signed", "scaled"
LESS, FEW, ALIKE, NEAR, HELD = "_less", "_few", "_alike", "_near", "_held"
CHANGED = "_changed"
RENEWALS = RENEWED, RENEWED_BUFFERS = "renewed", "renewed_buffers"
"""Forms of weights that a constructor draws under another seed (`kernels_eval.model.renewals`):
all, or what is no floating parameter."""
LASTING, LARGE, LEADING = (
    (form, f"{form}{LESS}", f"{form}{LESS}{LESS}") for form in ("lasting", "large", "leading")
)
UNTAMED = (*LASTING, *LARGE, *LEADING)
"""Forms of redrawn weights (`kernels_eval.model.weights`), and the suffix of those that are then
changed at random (`kernels_eval.model.weight_changes`)."""
OTHER_SETTINGS = ("other_settings", "other_settings_2")
"""Trials of other arguments of the constructor: larger ones, and smaller ones."""
SHIFTED, BACK = "shifted", "back"
SHIFTED_WEIGHTS = ("shifted_weights", "shifted_weights_2")
"""The form of weights of which those that it names are moved far (`kernels_eval.model.shifts`), and
trials of these."""


def is_untamed(form: str) -> bool:
    """Whether weights of this form are unlike those that a constructor makes."""
    return form in UNTAMED or form.startswith(SHIFTED)


LONE, OUTLIERS = "lone", "outliers"
"""As declared but for one element (of what is no number of its own, one row), or for three that are
far larger."""
POSITIVE, UNIT, REACHED, WITHIN = "_positive", "_unit", "_reached", "_within"
DOMAINS = ("", POSITIVE, UNIT, REACHED, WITHIN)
"""Suffixes of distributions: what their values lie in, the widest first: any numbers, positive
ones (of symmetric matrices, positive definite ones), (-1, 1) or, where no declared one is negative,
(0, 1), what the task takes around the declared ones (`kernels_eval.reference.reaches`), and what
these lie in."""


def domain_of(distribution: str) -> str:
    return next(each for each in reversed(DOMAINS) if distribution.endswith(each))


NON_FINITE = "non_finite"
"""As declared, but for a NaN and infinities."""
FEW_TERMS, LONE_TERMS, LARGEST = "few_terms", "lone_terms", "largest"
ORDINARY_TERMS, UNIT_FACTORS, DECISIVE = "ordinary_terms", "unit_factors", "decisive"
"""Inputs of which a few elements make up every long sum, every largest element or every product, or
decide whether there is one (`kernels_eval.config.FEW_TERMS_KINDS`)."""


class InputNote(Payload):
    """What may vary about one tensor of the arguments (`kernels_eval.model.invariants`). `vary`: it
    is drawn from other distributions, and `keeps` these invariants; `varied`: the form in which it
    lacks what saves work, `timed` calls too. Empty: it stays as declared. Of integers, what else
    some may be: counted from the end (`wraps`), or this number (`also`). `rare`: its form
    with values that no other draw has (`RARE_FORMS`, `EXTENDED`); places lie `below` a size, and
    `wide` ones may differ in their upper 32 bits alone.
    Integers in an `order` that no operator needs have it in most draws; those that are places in
    themselves, along axis `into_itself`, are permutations in one. What a task takes in a
    `structure` only is drawn within it (`kernels_eval.model.structures`). `reach`: the least and
    the largest number that the task takes, where that was asked; a `free` one may be any numbers
    where others must lie in a domain, and a `general` one, of two numbers or probabilities, others
    than these. A symmetric or triangular
    `matrix` is none in one draw; where a docstring has `promised` it, a wrong answer there is a
    flag.
    """

    vary: bool
    keeps: tuple[str, ...] = ()
    varied: str = ""
    timed: bool = False
    wraps: bool = False
    also: int | None = None
    rare: str = ""
    below: int = 0
    wide: bool = False
    order: tuple[str, ...] = ()
    into_itself: int | None = None
    structure: tuple[str, ...] = ()
    reach: tuple[float, ...] = ()
    free: bool = False
    general: bool = False
    matrix: str = ""
    promised: bool = False

    @property
    def relates(self) -> bool:
        """Whether its elements may be like others of it, or of another argument."""
        return not self.keeps and (self.vary or self.varied == "resampled" or self.is_mask)

    @property
    def is_mask(self) -> bool:
        return self.rare == "full_rows"


class FewTerms(Payload):
    """Of a long sum's `length` elements, how many are `terms`, what is `around` them and their
    `size`; `fewer`: without one of each sum.
    """

    length: int
    terms: int
    around: float | None = None
    size: float | None = None
    fewer: bool = False


class InputPlan(Payload):
    """What may vary about a task's inputs: a note per tensor (or other value), smaller shapes by
    name, as (tensor, dimension, size). `distinct`: no two elements of a tensor are equal.
    `constants`: numbers of the task's source; `singular`: whether matrices may be.
    """

    notes: list[InputNote]
    shapes: dict[str, list[tuple[int, int, int]]]
    distinct: bool = False
    constants: list[float] = []
    singular: bool = True
    few_terms: dict[str, FewTerms] = {}

    @property
    def varies(self) -> bool:
        return any(note.vary for note in self.notes)

    @property
    def extends(self) -> bool:
        """Whether `beyond` changes anything: whole numbers may leave their declared range."""
        return any(note.rare in EXTENDED for note in self.notes)

    @property
    def general(self) -> bool:
        """Whether `general_values` changes anything."""
        return any(note.general for note in self.notes)

    @property
    def narrow(self) -> bool:
        """Whether `whole_range` changes anything: integers may be any that few bits hold."""
        return any(note.rare in NARROW for note in self.notes)

    @property
    def wide(self) -> bool:
        """Whether `upper_bits` may change anything."""
        return any(note.wide for note in self.notes)


class OutputForm(Payload):
    """One output tensor of the reference. Without `strides` its elements lie in order."""

    shape: list[int]
    strides: list[int] = []
    dtype: str
    device: str = "cpu"
    bytes: int = 0


class Gradients(Payload):
    """Gradients that a task asks for: at positions `wanted` of its first `arguments` inputs, and of
    these `parameters`. Later inputs are gradients of the outputs.
    """

    arguments: int
    wanted: tuple[int, ...]
    parameters: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        own = [f"argument {index}" for index in self.wanted]
        return own + [f"parameter {name}" for name in self.parameters]


class BufferForm(Payload):
    """`told`: later outputs tell what is in it, so a candidate may keep it in its own way."""

    name: str
    shape: list[int]
    dtype: str
    told: bool = False


def by_kind(forms: Sequence[BufferForm]) -> list[list[BufferForm]]:
    """Buffers of one kind together: the running means of all layers, say."""
    kinds: dict[tuple[str, str], list[BufferForm]] = {}
    for form in forms:
        kinds.setdefault((form.name.rpartition(".")[2], form.dtype), []).append(form)
    return list(kinds.values())


class SideEffects(Payload):
    """What a task's reference changes in a call: `arguments` by position, and `buffers`. `names`
    says what each tensor is that therefore follows the outputs. `calls`: so many in a row it takes,
    of which `row` are compared at most; where it `remembers` them, putting its buffers back is not
    enough, and it is made anew.
    """

    arguments: list[int]
    buffers: list[BufferForm]
    names: list[str]
    calls: int = 1
    row: int = 1
    remembers: bool = False

    def told(self, names: Collection[str]) -> list[int]:
        """Positions in `names`, from the end, of these buffers, as far as later outputs tell."""
        kinds = by_kind(self.buffers)
        return [
            len(kinds) - index
            for index, kind in enumerate(kinds)
            if any(form.told and form.name in names for form in kind)
        ]


Numbers = Annotated[list[float], FailFast(), Field(max_length=MOST_KEPT_NUMBERS)]


class KeptNumbers(Payload):
    """What a model's plain attributes hold, before and after calls in a row: of each, by name, how
    many numbers, and some of these."""

    before: dict[str, Numbers] = {}
    after: dict[str, Numbers] = {}


class ModelSpec(Payload):
    """How a process makes a task's model; one seed gives the same weights.

    Weights are made on `construct_on`, then moved to `device`. The task's module asks for
    `precision` (empty: as made) and `gradients`; running it has shown its `effects`. `padded`:
    shapes of tables with a row for padding; `drawn`: what the constructor draws besides floating
    parameters, by name.
    """

    entry_point: str
    init_form: str
    device: str
    construct_on: str
    threads: int = 1
    seed: int = 0
    precision: str = ""
    gradients: Gradients | None = None
    effects: SideEffects | None = None
    padded: list[list[int]] = []
    drawn: list[BufferForm] = []


class SharedMemory(Payload):
    """Memory whose descriptor comes along: the host's, or `size` bytes of a device's."""

    on_device: bool
    size: int = 0


class InputLayout(Payload):
    """Values in shared memory, `stride` bytes apart; `packed` gives each one's layout, or that of
    all.
    """

    packed: list[str]
    count: int
    stride: int


class PackedValues(InputLayout, SharedMemory):
    """The same, with the memory whose descriptor comes along."""


class Shared(Payload):
    """Whether memory could be had: not where a device's driver does not share it."""

    shared: bool


F = TypeVar("F", bound=Shared)


class MemoryRequest(Request[F], Generic[F]):
    """A request with `size` bytes of new memory: the host's descriptor comes along, a device's
    comes back.
    """

    on_device: bool = False
    size: int = 0


class HandedOver(Shared):
    """Values put into shared memory, as in `PackedValues`."""

    packed: list[str] = []
    count: int = 0
    stride: int = 0


class MapMemory(Request[Done]):
    """Map memory whose descriptor comes along, under the name of what is in it: "inputs" or
    outputs."""

    name: str
    memory: SharedMemory


class Prepare(Request[Done]):
    """Make the device ready before the work is known, and what a `language` compiles with."""

    device: str
    threads: int
    language: Language | None = None


class RedrawWeights(Request[Done]):
    """Redraw parameters, those of `names` first, and the running statistics of these shapes, held
    in parameters without gradient if `frozen`; `transposed` transposes square matrices. `nearly`:
    with two elements of each exchanged. Without a seed: as constructed.
    """

    seed: int | None
    statistics: list[list[int]] = []
    names: list[str] = []
    frozen: bool = False
    transposed: bool = False
    nearly: bool = False
    form: str = POSITIVE_VECTORS


class Renew(Request[Done]):
    """Make a model that remembers its calls anew, so that the next is its first."""


class SampleReport(Report):
    """One timed sample. `graphs`: how many torch.compile has made so far."""

    ns: Nanoseconds
    custom_calls: Count = 0
    graphs: Count = 0


class Sample(Request[SampleReport]):
    """Time this many calls, each on the next of the prepared inputs. `by_processor`: `counted_ns`,
    as the judge's own clock counts. `copied`: with a copy of their outputs. `kept`: hold the output
    of one of them, at random."""

    calls: int
    by_processor: bool = False
    copied: bool = False
    kept: bool = False


def counted_ns(passed: int, used: int, threads: int) -> int:
    """Nanoseconds that count of what passed and of the processor time that all threads used: all of
    it where one thread was granted, however many there are.
    """
    return used if threads == 1 else min(passed, used)


class ReportedOutput(Report):
    shape: Shape
    dtype: Text


class CallReport(Report):
    kinds: Several[Text] = []
    devices: Several[Text] = []
    plain: bool = False
    tensors: bool = False
    layout: Count = 0
    structure: Text = ""
    custom_calls: Count = 0
    mutated: bool = False
    overrun: bool = False
    previous_changed: bool = False
    rerun_differs: bool = False
    outstanding_share: Finite = 0.0
    outputs: Several[ReportedOutput] = []


class UnseenReport(Report):
    """The distinct forms of the outputs of unseen inputs."""

    forms: Annotated[list[CallReport], FailFast(), Field(min_length=1, max_length=MOST_ITEMS)]
    custom_calls: Count = 0


class KeptOutputs(Report):
    """Of each output that samples hold, the place of its inputs among those of samples, and its
    form."""

    places: Several[Count] = []
    forms: Several[CallReport] = []


class ShowKept(Request[KeptOutputs]):
    """Put the outputs that samples hold into the memory of name `into`, and let go of them."""

    into: str


class RunUnseen(Request[UnseenReport]):
    """Call the model on inputs that only the reference's process has seen, in the memory that is
    mapped as "inputs"; put the outputs into that of name `into` after all calls, or with `at_once`
    each when its call returns, and let go of it, as a sample does. `empty`: call no model, but make
    outputs of these forms.
    """

    inputs: InputLayout
    into: str
    at_once: bool = False
    empty: list[OutputForm] = []
