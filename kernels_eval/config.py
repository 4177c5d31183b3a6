"""Every number of the verification protocol: what a user may set, resolved once, and then the
constants, each with its source."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from kernels_eval.extensions import require_known
from kernels_eval.records import Level, Record

TRANSFORMS = "concur.build_transforms"
Baseline = Literal["eager", "compile"]
SanitizerTool = Literal["memcheck", "racecheck", "initcheck", "synccheck"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


class BuildConfig(Record):
    """How candidates are compiled."""

    timeout_s: PositiveFloat = 120
    """deadline of one build with one header tier, in processor time and sleep (twice as long with
    torch's own headers); ten times as long by the clock"""
    capture_timeout_s: PositiveFloat = 30
    """the same for reading the build requests out of the candidate's module"""
    cuda_arch: str | None = None
    """such as '9.0'; default: that of the GPU, else 9.0"""
    lite_headers: bool = True
    """try the lite header tier first; the verdict does not depend on it"""
    transforms: tuple[str, ...] = ()
    """what changes libraries once they are linked, in this order: extensions by their names
    (docs/how-to/extend.md)"""

    @field_validator("transforms")
    @classmethod
    def _are_known(cls, transforms: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(require_known(TRANSFORMS, name, ()) for name in transforms)


class CorrectnessConfig(Record):
    """What counts as the same answer; the gates are constants below."""

    distributions: tuple[str, ...] = (
        "declared",
        "normal",
        "mixed",
        "impulse",
        "large",
        "offset",
    )
    """input distributions, one secret seed each; 'declared' is what the task's own get_inputs()
    draws. Others: 'uniform', 'normal_x10', 'sparse', 'small_integers'"""
    non_finite: Literal["require", "flag", "off"] = "flag"
    """one call on inputs with a NaN and infinities: another answer than the reference's is refused
    (require) or only flagged (flag)"""
    shapes: Literal["require", "flag", "off"] = "require"
    """other shapes that the task accepts: a silently wrong answer is shape_specialised (require) or
    only flagged (flag)"""
    formula: Literal["require", "flag", "off"] = "require"
    """an approximation that passes KernelBench's 1e-4 is incorrect (require), correct with the flag
    `approximation` (flag), or simply correct (off)"""
    weights: Literal["seed", "copy"] = "seed"
    """a candidate makes the reference's weights from the same seed (seed), or is given the
    reference's values once it is constructed, as harnesses do that copy them (copy)"""
    output_buffer: Literal["reject", "flag"] = "reject"
    """an output that a later call overwrites is refused (reject), or read before that call and
    flagged (flag)"""
    reruns: NonNegativeInt = 3
    """how often the first call is repeated on the same inputs, looking for other bits"""


class TimingConfig(Record):
    """Paired, interleaved measurement."""

    min_pairs: int = Field(default=50, ge=2)
    """ABBA half-pairs at least"""
    min_side_s: NonNegativeFloat = 0.2
    """seconds of samples on each side at least"""
    max_s: PositiveFloat = 2.0
    """budget of one measurement, both sides together; who publishes a number may give it 20"""
    interval_width: PositiveFloat = 0.02
    """stop when the 95 % interval of log(speedup) is within +- this"""
    decided_share: NonNegativeFloat = 0.1
    """or within +- this share of |log(speedup)|, up to DECIDED_WIDTH: what is twice as fast, or
    twenty times slower, needs no 2 %; 0 asks for `interval_width` of every candidate"""
    precise_s: PositiveFloat = 0.2
    """budget of a measurement whose interval is narrow enough by then, though it has fewer pairs
    than min_pairs (20 at least)"""
    sample_us: PositiveFloat = 2000
    """calls are batched until a sample of the faster side lasts this long, or one of the slower
    side LONGEST_SAMPLE_NS; asking for one and flushing caches costs 0.5 ms beside it"""
    baselines: tuple[Baseline, ...] = ("eager",)
    """what speedups are over; 'compile' adds the reference under torch.compile, which is timed once
    a task"""
    compile_mode: CompileMode = "default"
    """torch.compile's mode"""
    compile_s: PositiveFloat = 300
    """deadline of compiling one task's reference, which no candidate's deadline counts"""

    @property
    def compiles(self) -> bool:
        return "compile" in self.baselines

    @field_validator("baselines")
    @classmethod
    def _with_eager(cls, value: tuple[Baseline, ...]) -> tuple[Baseline, ...]:
        """Always include the eager baseline, which the verdict's speedup is against."""
        if "eager" not in value:
            raise ValueError(
                "'eager' must be among the baselines: ('eager',) or ('eager', 'compile')"
            )
        return ("eager", "compile") if "compile" in value else ("eager",)


COMPILING_CALL = 3
"""How many times as long a call may take that compiles. A choice: 27 configurations passed 60 s."""


class LimitsConfig(Record):
    """What one candidate may use."""

    load_s: PositiveFloat = 30
    """deadline of importing a candidate and constructing its module"""
    run_s: PositiveFloat = 60
    """deadline of one command: a call, or a sample of calls"""
    reference_s: PositiveFloat = 120
    """deadline of one command to the reference"""
    memory_gb: PositiveFloat = 16
    """resident memory of a child (host side), and never above 60 % of the machine's"""
    file_mb: PositiveInt = 64
    """largest file a child may write"""
    scratch_mb: PositiveInt = 512
    """all files of a child together"""
    cpu_s: PositiveInt = 1800
    """processor time of one process of a candidate, all its threads together"""
    processes: PositiveInt = 64
    """processes of a child, where its language may start any (Triton's compilers)"""
    threads: PositiveInt = 512
    """threads of a child and its processes together"""

    def call_s(self, *, compiles: bool) -> float:
        """Deadline of one call, in seconds; `compiles`: its language compiles in calls, and
        autotuners try dozens of configurations."""
        return self.run_s * (COMPILING_CALL if compiles else 1)


class EvalConfig(Record):
    """The whole protocol of one verification. Part of every verdict's key."""

    level: Level = "confirm"
    """`screen` decides a status and a rough speedup, and leaves to `confirm` what its table
    says (docs/explanation/verification.md)"""
    build: BuildConfig = BuildConfig()
    correctness: CorrectnessConfig = CorrectnessConfig()
    timing: TimingConfig = TimingConfig()
    limits: LimitsConfig = LimitsConfig()
    threads: PositiveInt = 1
    """CPU threads for reference and candidate alike"""
    time_correct: bool = True
    """off: correctness only"""
    address_sanitizer: Literal["off", "lite", "correct"] = "lite"
    """C++ candidates that are built once more with GCC's AddressSanitizer at level `confirm`, and
    are a `memory_error` where they reach other memory: none, correct ones of the lite header tier
    (seconds), or every correct one (a minute with torch's full headers)"""
    compute_sanitizer: tuple[SanitizerTool, ...] = ("memcheck",)
    """tools of NVIDIA's compute-sanitizer under which correct CUDA candidates run once more at
    level `confirm`, one after the other. What memcheck counts is a `memory_error`, what others
    count a flag: honest kernels have hazards. Where it is not installed, the flag says `not_run`"""
    compute_sanitizer_s: PositiveFloat = 60
    """deadline of one tool; past it the flag says `not_run`"""

    def screened(self) -> EvalConfig:
        """The same protocol at level `screen`."""
        timing = self.timing
        short = {
            "max_s": min(timing.max_s, SCREEN_TIMING_S),
            "min_side_s": min(timing.min_side_s, SCREEN_SIDE_S),
            "min_pairs": min(timing.min_pairs, SCREEN_PAIRS),
            "interval_width": max(timing.interval_width, SCREEN_WIDTH),
            "baselines": ("eager",),
        }
        reruns = min(self.correctness.reruns, SCREEN_RERUNS)
        return self.model_copy(
            update={
                "level": "screen",
                "correctness": self.correctness.model_copy(update={"reruns": reruns}),
                "timing": timing.model_copy(update=short),
            }
        )


# -- what a task is compared on --------------------------------------------------------------------
#
# Constants of the protocol, which nobody sets. Each says where it comes from: a measurement, the
# protocol's description (docs/explanation/verification.md), or that it is a choice.

SHAPE_SCOPES = ("each", "all", "last", "first")
"""What shrinks in another shape (`model.smaller_shapes`), tried in this order."""
TAILS = {"1": 1, "2": 2, "odd": -1}
"""How many elements another shape leaves over in blocks of 4 and more, or lacks to fill them: the
tails of vector loads and of warps that kernels forget. A choice."""
MOST_PARTS = 4
"""So many equal parts of a dimension stay equal in another shape: halves of a rotary embedding,
gates of an LSTM. More are steps of a loop. A choice."""
OFFSET_MEAN = 8192.0
"""The mean of `offset`, in standard deviations: in fp32 E[x^2] - E[x]^2 then has no digit left. A
power of two, for long sums of it, too, are rounded without a bias: adding 1e5 values about 1e4 one
by one is off by more than their spread."""
SMALL_DEVIATION, LEAST_NORMAL = 2.0**-14, 32
"""The standard deviation of `small`, and how many times the least normal number of its type that is
at least: what is added to a variance, or to the inputs themselves, then shows."""
IMPULSE_RANGE = (20, 36)
"""Least and largest value of a large element of `impulse`. Above 36.7, 1 - sigmoid(x) is 0 in
float64, too, and a kernel that is exact there, as from logits, would differ from the reference in
any precision."""
ROW_SCALES = {"lasting": (4, 1, 2**-5, 2**-10), "large": (16, 8), "leading": (1,)}
"""What rows of weights are multiplied by: some units keep a state, others lose it slowly, some
inputs are small; or all are large; or none is. Half of that where a task cannot take these, then a
quarter. Choices."""
ROW_SHIFTS, SCALED_FAN_IN, MOST_SHIFTED = (-8, 8, -4, 4, -2, 2, 0), 1.5, 12
"""What is added to weights of which a task may take the exponential, how large rows of a matrix are
at least that is no factor of products (those that layers make have a norm of about one), and how
many weights at most are shifted. Choices."""
COUPLING = 1 / 64
"""Of square matrices of such weights, what the rest is as a share of the identity, or of what has
rank one. A choice."""
CHANGED_SHARES, MOST_CHANGES = (1 / 4, 1 / 2, 1), 2
"""What share of weights one draw changes, and in how many ways each. Choices."""
LIKE_ANOTHER = 1 / 4
"""What share of weights gets rows of an earlier one of its shape in a draw. A choice."""
DOUBLINGS, ROW_DOUBLINGS, ROW_SHARES = 2, 4, (1 / 8, 1 / 2)
"""How often weights are doubled or halved, and how often some rows of them are. Choices."""
EXPLORED_POINTS, FEWEST_EXPLORED, EXPLORED_S, FAR = 24, 4, 0.8, 8
"""Points near a task that are compared, all of them within so many seconds of processor time (what
it takes to be sure of a large error is not counted), and by how many times an error must be beyond
its gate there. Measured: benchmarks/results/2026-11-29-points.md."""
MOST_STEPS, SEEN_RMS = 4, 1e-6
"""Most changes of weights, and twice those of inputs, that make a point, and from which error on
others start from it. Choices."""
SAME_ERROR = 0.5
"""By how much an error changes on inputs up to a sixteenth smaller, from which on it is rounding. A
choice."""
BESIDE, MOST_AMPLIFIED = 2**-16, 64
"""By what share of themselves inputs and weights are moved to see what rounding costs, and how many
times as much as on declared ones a reference may err. Choices. Measured: chaotic weights err by
some thousand times as much, others by at most 40."""
VARIED_SHARE = 1 / 8
"""Of a mask of ones, how many elements are 0 where that varies. A choice."""
LARGE_INTEGER, WIDE_INTEGER, WIDE_INT32, LARGE_EXPONENT = 2**28, 2**20, 2**17, 16
"""Up to which some integers are enlarged that flow into arithmetic alone: fp32 does not hold all of
these, and 32 bits hold them and a few such added up; those that are multiplied or sorted, too, as
their products' sums have room in float64, and their counts in memory; and those that are exponents.
Choices."""
BEYOND_TIMES, MOST_NUMBERS = 16, 4
"""How many times their largest whole numbers are that nothing bounds, and with how many numbers of
the task's source they may be compared: more are places. Choices."""
FULL_BYTE, MOST_CODES = 240, 16
"""From which largest number on whole numbers fill bytes, and how many different ones may be codes,
of four bits say, which have no others. Choices."""
RUN_OF_ENDS, ENDS_SHARE = 64, 1 / 16
"""How many integers of few bits in a row are the largest, or the least, of their type, and in how
many such runs. Choices."""
DEFINITE_SHARE = 1024
"""One part in so many of the largest element of a positive definite matrix's diagonal is added to
it: its condition is some thousands then. A choice."""
ITERATIONS = 4
"""Calls of one operator on what it gave from which on a task iterates that has fewer weights. A
choice."""
MOVED_SHARE = 1 / 16
"""How far an element of timed inputs is from the declared one, at most, as a share of it. A
choice."""
ZEROS_SHARE, RANK_SAMPLE = 0.2, 32
"""The share of zeros from which on they are a pattern, and the rows and columns of which a rank is
taken. Choices."""
MOST_SHUFFLED = 1 << 24
"""Elements that are shuffled one by one, with 8 bytes for each. A choice of memory."""
NOTE_DRAWS, NOTE_BYTES = 3, 1 << 20
"""How many draws of a task's inputs tell what all of them have, and bytes of inputs from which on
one must do. Choices of time."""
EDGES, HALVES, EDGE_SPACING = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0), (0.5, 1.5, 2.5), 8
"""Numbers at which an answer may jump, of either sign: ends of activations, and halves, which round
to even; and of how many elements of `edges` one is such. Choices."""
MOST_CONSTANTS, LEAST_SCALE, LARGEST_CONSTANT = 16, 2.0**-6, 32.0
"""How many numbers of a task's source are such, the least ones, from which on halves are multiplied
and divided by them, and up to which: larger ones are sizes. Choices."""
NEARLY, JUMP = 2.0**-18, 1e-2
"""How far whole numbers are moved, as a share of their size, and how much an answer then changes at
least that jumps. Choices."""
CONSTANT_SAMPLE, CONSTANT_SHARE = 1 << 13, 1 / 64
"""Of so many elements of a weight, the share of one number from which on it is made constant, in
part at least: timed calls then have other weights. Random ones in bf16 share a number in 500."""
DIGEST_SAMPLE = 64
"""How many elements of a weight tell whether two constructors made it alike. A choice."""
RIGHT_ANGLE = 1e-4
"""Largest cosine between rows of a weight that are made to be at right angles: random rows of 10^6
elements have 1e-3. A choice."""
OWN_SHARE, RUN_SHARE, RUNS, OWN_PART = (2.0**-8, 2.0**-2), (1 / 32, 1 / 2), 1 / 8, 2.0**-6
"""How many of its elements a slice that is like another one has of its own, here and there or in a
run, how many slices have runs, and how much of the others. Choices."""
MOST_SHIFTS, MOST_PLACES = 32, 1024
"""In how many parts an argument is another one shifted, and at how many places it changes.
Choices."""
MOST_DOUBLINGS, COMMON_NUMBER, COMMON_SLICE, DENSITY = 3, 2.0, 8.0, (-8, -4)
"""How often slices are doubled or halved, what number is added to them in units of their RMS, how
many times another slice, and which share of a mask is set, or is not, as powers of two. Choices."""
CHANGING = 2.0**-10
"""Of states that last, the share that changes in a step. A choice."""
MOST_FEW, SHARPNESS = 8, (1.0, 7.0)
"""At how many places of an axis few slices change, and the power of what sharpens them. Choices."""
FEWEST_HELD, PERIODS = 16, (1, 2, 2, 3, 4)
"""Along how many elements at least states are held, and how many elements these are in turn.
Choices."""
MOST_EVENTS, EVENT_SHARES = 2, (0, 0, 1 / 32)
"""Places at most of a line that holds a state where something happens, and in how many lines it
does. Choices."""
HELD_S, HELD_TRIES = 0.1, 8
"""Seconds of processor time in which inputs are searched that hold a state, and tries for each
length. Choices of time."""
FEWEST_ALIKE = 5
"""Rows of integers from which on they may be alike: sources and targets of edges differ. A
choice."""
FEWEST_OFFSET = 16
"""Elements from which on equal errors are an offset: one number has one error. A choice."""
BEYOND = 36.0
"""How large mutated numbers may be where declared ones are not (`IMPULSE_RANGE`)."""
DECISION_S, DECISION_TRIES, DECISION_TRIALS = 0.5, 64, 3
"""How long, in seconds of processor time, and how often inputs are searched that change what few
trials decide otherwise, and how many trials these make at most. Choices of time."""
STRUCTURE_S, STRUCTURE_TRIES = 0.5, 96
"""How long, in seconds of processor time, and how often a task is asked which structures of its
arguments it takes. Choices of time."""
REACH_S, REACH_DOUBLINGS = 0.5, 5
"""How long, in seconds of processor time, a task is asked how far its arguments may leave their
declared ranges, and how often a float is doubled or halved at most. Choices of time."""
REACHES = (1 / 8, 1 / 2, 1, 2, 4, 8)
"""How far beyond its range, in units of that, a tensor's numbers are moved. A choice."""
EDGE_HALVINGS, EDGE_MARGIN = 3, 15 / 16
"""How often the distance to an edge is halved that a task does not take, and what share of it is
drawn. Choices."""
SETTINGS_S, SETTING_DOUBLINGS = 0.5, (5, 3, 2, 1, 1 / 4)
"""How long, in seconds of processor time, a task is asked which other arguments its constructor
takes, and how often a float is doubled or halved at most. Choices of time."""
LEAST_COUNT, LEAST_TEXT = 5, 16
"""From which on an integer of a constructor is a count, and no axis or flag, and a string is a
text, and no name. Choices."""
LEAST_TOLD, MOST_TOLD = 1e-15, 1e15
"""The RMS of answers between which there are digits to compare. A choice."""
FAINT_EXPONENT, FAINT_SHARE, LEAST_FAINT = -20, 2.0**-8, 2.0**-70
"""By which power of two inputs are multiplied for a tiny answer, of what share of its usual size it
is then, and of which at least: fp32 has room below. Choices."""
APART_STEPS, APART_HALVINGS, MOST_APART = (4, 8, 16, 32, 64), 6, 2
"""By how many times its RMS an argument is moved away from the others, how often the distance to
the last tiny answer is halved, and how many arguments are moved. Choices of time."""
MOST_INVARIANTS, FEWEST_PLACES, ROOTS_SHARE = 4, 8, 1 / 8
"""How many invariants a structure has, of how many elements at least one of places is told, and how
many may lack it. Choices."""
ENOUGH_ASKED = 2
"""How many trials must change what a place decides. A choice: one may do so by chance."""
ALIKE_SHARE = 3 / 4
"""How many arguments have parts like others in one draw: where one gets a block of another, that
one should stay. A choice."""
MOST_DECIDED, DECISION_BYTES = 1024, 1 << 26
"""How many results of decisions are recorded in a call, the first ones, and how large they may be.
Choices of time and memory."""
MOST_OPERANDS, OPERAND_ELEMENTS, OPERAND_ROWS, LARGEST_OPERAND = 16, 1 << 20, 64, 1e5
"""Of how many tensors and numbers that a task computes with, the first ones, parts get into inputs,
how many elements are copied whole, how many rows of others, and the largest number: larger ones
stand for infinities. Choices of memory and time."""
MOST_NEAR = 4
"""How many parts of an argument become like such. A choice."""
MOST_DISTINCT = 1 << 24
"""Elements of a tensor that are made distinct, which sorts them. A choice of time."""
DISTINCT_STEP = 2.0**-16
"""How far equal elements are moved apart, as a share of their size: some 100 units in the last
place."""

# -- screening -------------------------------------------------------------------------------------

SCREEN_WIDTH = 0.1
"""Half of a screened interval of log(speedup): what orders candidates, not what is published."""
SCREEN_TAIL = "1"
"""The one smaller shape of a screening (`TAILS`): three of 30 recorded candidates that did not pass
ended there, and none by another shape."""
SCREEN_CALLS_S, SCREEN_FIRST_S = 1.0, 3.0
"""Where the trials after the first take longer, the others are left to `confirm`: so slow a kernel
is kept by nobody. Where the first does, other shapes are: it is compiled for each, and Triton's
tuning took up to 28 s a shape."""
SCREEN_RERUNS = 1
"""How often the first call is repeated. A choice of time."""
SCREEN_TIMING_S, SCREEN_SIDE_S, SCREEN_PAIRS = 0.5, 0.02, 10
"""Budget of a screened measurement in seconds, samples of a side in seconds, half-pairs. Samples
are as long as those of `confirm`: speedups hang on the number of calls in a row."""

# -- expected values -------------------------------------------------------------------------------

ORACLE_MAX_BYTES = 8 << 30
"""Above this estimate the oracle is computed in float32. A choice: a tenth of a GPU of 80 GB."""
ORACLE_MAX_S = 5.0
"""A float64 oracle that takes more work is computed once and then done without. A choice."""
LEAST_IN_A_ROW, MOST_IN_A_ROW = 3, 64
"""Calls in a row of a model that keeps something: compared ones, and at most those of a sample or a
round, after which one whose outputs tell of it is made anew. A choice."""
NEAR_SHARE = 63 / 64
"""What inputs are multiplied by that are much like those of the call before. A choice."""
LONG_ROW, LONG_ROW_S = 1024, 0.1
"""Calls of the longest compared row at most, and seconds that these may take the reference. Choices
of time."""
EXPECTED_MAX_BYTES = 16 << 30
"""Memory for expected values of one task; above it fewer distributions are tried. A choice."""
LEAST_DISTRIBUTIONS = 4
"""Trials that are kept whatever their expected values take. A choice."""
EXPECTED_HELD_SHARE = 8
"""Expected values without an oracle hold one part in so many of a GPU's memory: the candidate needs
the rest, several times its inputs and outputs. More are computed again when they are asked for."""
REPEATABLE_RTOL = 1e-3
"""Two runs of a reference on the same inputs that differ by more are random: atomics of torch
differ by 1e-6."""
SAME_ANSWER_RTOL = 1e-4
"""Two answers that differ by less are one: the gate of single elements in fp32."""
MOST_CAST_ERROR = 0.5
"""What a task's casts may change in its own answer and still be rounding: x - x.half() is what they
leave. A choice."""
HARD_OWN_ERROR = 0.02
"""A reference that errs by more is no judge of hard inputs."""
FEWER_FINITE = 1 / 4
"""Of a task whose own answer is not finite everywhere: by what share other inputs may have fewer
finite elements. A choice."""
FEWEST_NUMBERS = 1 / 2
"""Where infinities are answers, too: of the declared share of finite elements, what other inputs
must give. A choice."""
NARROWED_SHARE = 1 / 4
"""Of the error of an answer that ignores the inputs, what a gate may let pass. A choice."""
SAMPLE_ROWS = 4
"""Rows of a batch that tell the reference's own error where there is no oracle. A choice."""
CPU_CACHE_BYTES = 64 << 20
"""What the caches of a processor may hold. A choice: a task of half as many bytes is never told by
the bandwidth of memory."""
BYTES_PROBES = 8
"""Pieces of an argument that are changed to find out how much of it is used. A choice of time."""
ENOUGH_ELEMENTS = 1 << 26
"""Outputs of more are not copied once more for what is only a flag or a few elements. A choice."""
FIRST_ELEMENTS, SPREAD_ELEMENTS = 1 << 22, 1 << 12
"""Of a large tensor, how many tell what an answer that ignores the inputs would be worth, and
whether two tensors may be the same. A choice of time."""
MOST_TASK_OPERATORS = 256
"""Operators of a reference that a verdict names. A choice."""
SCATTER_DRAWS, SCATTER_UNITS, SCATTER_UNITS_HALF = 4, 2.0, 0.25
"""How often operators round otherwise, by how many units in fp32 (RMS) and in a 16-bit type (where
that is one rounding), in a look for how far apart outputs are; gates allow for a multiple of that.
A choice: __expf and Triton's exp err by two."""
ARGUMENT, WINOGRAD = 1 / 4, 4
"""How many times as far arguments of exp and the like are moved, as rounding x log2(e) does (0.29
units), and factors of a convolution: Winograd's F(4x4, 3x3) costs that much (measured; A. Lavin,
S. Gray, Fast Algorithms for Convolutional Neural Networks, 2016)."""
COMPARED_AT_ONCE, OUTPUTS_AT_ONCE, TERMS_AT_ONCE = 1 << 24, 8, 1 << 17
"""Elements, outputs of a round, and terms of sums that are worked on at once: float64 copies of
whole outputs would not fit, and page faults of longer arrays cost a new process more than adding
them."""
DIGEST_BYTES = 1 << 20
"""Bytes that tell whether two answers are one: hashing costs processor time."""
FEW_OUTPUTS = 64
"""Fewer floating elements, zeros not counted, tell too little of what rounding costs. A choice."""
LONG_SUM, MOST_TERMS = 128, 1 << 24
"""Shorter sums err by less than any gate; of longer ones so many terms are added."""
MOST_SUMS, FEWEST_SUMS, ENOUGH_TERMS = 64, 2, 1 << 21
"""How many outputs of an operator are added up in order: as many as have so many terms together. A
choice of time."""
ORDERS, REORDERED_TERMS = 3, 3 << 15
"""In how many more orders so many terms are added. By one order alone, 1 of 35 verdicts of an
honest loss that adds 512 terms by atomics was a refusal, by 1.00e-6 against 1e-6. A choice of
time."""

LEAST_LEFT_OUT, LONG_PRODUCT = 1024, 1 << 16
"""From how many elements on a sum may lack some, and the answer still pass: of a share p, an fp32
sum of one sign shows all; one in 16 bits, or scaled up for what it lacks, does not. Products in
fp32 of random signs lack sqrt(p), which shows until plain addition errs by as much. A choice."""


class FewTermsKind(NamedTuple):
    """Draws in which a few elements of what an output is made of are `terms` of it, `half` as many
    in fewer bits. `around` them: None as declared, so that no few elements tell where they are; the
    `size` of each: None as declared. The first of these `backgrounds` that shows one left out is
    taken. `in_all`: terms of all draws, all rows together.
    """

    terms: int
    half: int
    in_all: int
    backgrounds: tuple[tuple[float | None, float | None], ...]


FEW_TERMS_KINDS = {
    "few_terms": FewTermsKind(
        *(256, 16, 1024),
        ((None, 2.0**12), (None, 2.0**24), (0.0, 1.0), (0.0, 2.0**12), (-128.0, 1.0), (1.0, 2.0)),
    ),
    "ordinary_terms": FewTermsKind(0, 16, 1024, ((0.0, 1.0), (-128.0, 1.0))),
    "lone_terms": FewTermsKind(4, 0, 32, ((0.0, None), (-128.0, None), (128.0, None), (1.0, None))),
    "largest": FewTermsKind(1, 1, 1024, ((None, 2.0**12), (None, -(2.0**12)))),
    "unit_factors": FewTermsKind(0, 1, 16, ((0.0, 0.5),)),
    "decisive": FewTermsKind(
        *(1, 1, 64),
        (
            *(
                (around, sign * 2.0**12)
                for around in (None, 0.0, -128.0, 128.0)
                for sign in (1, -1)
            ),
            *((1.0, 0.0), (None, 2.0**130)),
        ),
    ),
}
"""So few terms that one left out of a sum is seen, in 16 bits also in the declared range; so few
that the error of each is; the one that a maximum or minimum is; a one in each row, by which a
product in 16 bits is the other factor; the one by which `any` or `all` answers otherwise (2^130 is
infinite in fp32). Large ones exceed all else, 0 is no term of a sum, exp(-128) none of
exponentials, and log(1) none of logarithms. 1 % of the places, left out, are missed by 1,024 terms
once in 30,000 times, 2 % once in 10^9; half of them by 64 once in 10^19. A choice."""
LEFT_OUT_SHARE = 0.1
"""Of the worst element of an answer without one term: below it, no term is missing. A choice."""
MOST_DRAWS, SCREEN_DRAWS = 64, 4
"""Such draws at most, of a screening too. A choice of time."""

# -- gates -----------------------------------------------------------------------------------------


class Gates(NamedTuple):
    """Largest RMS(err)/RMS(oracle) by a task's precision, where nothing widens it, and the least
    gate of an element in fp32: |err| <= r (|y| + RMS(y))."""

    fp64: float = 1e-12
    fp32: float = 1e-6
    half: float = 8e-4
    bf16: float = 6.4e-3
    elementwise_fp32: float = 1e-4

    def of(self, precision: str) -> float:
        """That of `fp64`, `fp32`, `fp16`, `bf16`, `e4m3` or `e5m2`."""
        known = {"fp64": self.fp64, "fp32": self.fp32, "fp16": self.half, "bf16": self.bf16}
        return (known | {"e4m3": E4M3_GATE, "e5m2": 2 * E4M3_GATE})[precision]


GATES = Gates()
"""fp32: honest kernels without long sums err by at most 5e-7 (fast exp, rsqrt and division
included), 17 bits of mantissa by 1.5e-6. fp64: what is rounded to fp32 errs by 3e-8. fp16, bf16:
four times the RMS error of one rounding, 2.1e-4 and 1.7e-3; kernels that round every step err by
twice that, int8 factors by 7e-3. Measured: benchmarks/results/2026-11-28-gates.md."""
WIDEST = Gates(fp64=1e-5, fp32=1e-5, half=2e-3, bf16=1.6e-2)
"""No scatter widens a gate beyond, where there are many outputs: four roundings to 11 or 8 bits; of
fp32, a thirtieth of what TF32 costs (2.9e-4, K = 4096)."""
HARD_GATES = Gates(fp64=0.1, fp32=0.1, half=0.1, bf16=0.1, elementwise_fp32=1.0)
"""On hard inputs. Measured in fp32 with `offset`, up to 4e6 elements a row: one by one in two
passes at most 0.008, by Welford's updates 0.013, in one pass 0.5 and more."""
EXACT_GATES = Gates(fp64=2**-52, fp32=2**-23)
"""Of numbers that the reference only moves and chooses: what four roundings cost, as every gate of
fp16 and bf16 is. A choice that is written as arithmetic, b + (a - b), errs by 3e-8 to 5e-8 in fp32,
a sort by 26 bits by 4e-7."""
E4M3_GATE = 0.04
"""Gate of outputs in float8_e4m3fn. The RMS error of one rounding is at most 0.036 (relative
spacing of 2^-3 / sqrt(12)). Measured: cutting digits off costs 0.062, bf16 before FP8 0.012."""
ELEMENT_FACTOR = 10
"""How many times as wide the gate of single elements is."""
TIGHTEST_GATE = 1e-6
"""No gate asks for more of a sound fp32 kernel: 16 units in the last place."""
REFERENCE_FACTOR, REFERENCE_FACTOR_HALF = 8, 4
"""A gate is never below this multiple of the fp32 reference's own error: Strassen's products err by
four times as much as plain ones. In fp16 and bf16 a kernel rounds where the reference does, or
less: there twice as much was the most."""
UNKNOWN_OWN_ERROR = 1.25e-6
"""What an fp32 reference is taken to err by where that could not be measured."""
FACTORING_ERROR, MOST_FACTORING_ERROR = 1.25e-6, 1e-4
"""What a reference's factors of a matrix are taken to err by: at least, and at most where Gram and
Schmidt's method errs by eps times the matrix's condition. A choice."""
SCATTER_FACTOR = 3
"""Nor below this multiple of what outputs differ by where every operator rounds otherwise.
Measured: Winograd's F(4x4, 3x3) errs by 1.3 times that."""
SEQUENTIAL_FACTOR = 4
"""Nor below this multiple of the error of adding up the reference's long sums in fp32, one term
after the other. A choice: honest kernels add in blocks, and err by less."""
MOST_WRONG_SHARE = 0.05
"""Largest share of elements that may be off by half of their own value where the reference's are
not: a few outputs that are far larger than all others make any error of these look small."""
MOST_WRONG_SLICE, FEWEST_IN_SLICE = 0.25, 32
"""The same among at least so many elements at one index of a dimension, such as a column that is
far smaller than all others. A choice: wrong elements of rounding are strewn."""
SOUND_SLICE, MOST_SLICED = 32, 1 << 24
"""A slice in which the reference errs by at most one part in so many of the widest gate has that
gate, whatever others err by, in outputs of at most so many elements. Choices."""
APPROXIMATION_RMS = 2e-3
"""Largest RMS(err)/RMS(oracle) of an approximation, which GELU by tanh has a tenth of."""
DOWNCAST_SPREAD = 10
"""Largest worst element / RMS error of a downcast. Rounding errors that are normal reach 5 among a
million elements; one wrong element of N reaches about sqrt(N)."""
LONE_GATES = GATES._replace(fp64=4e-12, fp32=4e-6)
"""Where four terms make up a sum: what is honest elsewhere may be hard there. Measured: honest
formulas err by 2e-7 where plain addition does not err by more, one by 1.5e-6. A choice."""
UNIT_GATES = Gates(half=2.1e-4, bf16=1.7e-3)
UNIT_FACTOR = 2.5
"""Where products are of ones: one rounding, or so many times what the reference errs by there. A
choice: int8 factors in groups of 32 err by 4.8e-3."""
FORMULA_RMS, FORMULA_MAX, FORMULA_TO = 1e-6, 1e-4, 0.1
"""Relative errors (RMS, or of the worst element; at most) of which it is asked whether they look
like rounding or like another formula: from the fp32 gates on."""
FORMULA_NAMED = 1e-2
"""Largest relative RMS error that is called another formula: beyond, an answer is plainly wrong."""
LAYERS = 4
"""Products one after the other from which on an error's size alone tells of fewer digits. A
choice."""
LOOSE_MATH_RMS = 1e-4
"""Largest relative RMS error that compiler flags which give up digits may explain. A choice: fast
exp, tanh and division lose 1e-7 to 1e-5."""
FORMULA_SAMPLE, FORMULA_BINS, FORMULA_SHARE = 1 << 20, 64, 0.45
"""Elements, bins, and the share of the squared error that the bins of another formula explain:
measured 0.6 and more, and 0.1 (0.38 where digits are cut off) for rounding."""
FORMULA_NEIGHBOURS, NEIGHBOUR_SHARE, FORMULA_LEFT = 8, 0.165, 0.05
"""What of another formula's error its output leaves open: the least difference from the errors of
the next outputs on either side, of three quarters of them at most. Of noise that is this share of
its RMS (measured). It may be a gate, or this share of the error (GELU by tanh: 0.007 of 4,096
outputs, 0.03 of 1,024)."""
LARGE_VIEW = 16
"""How many times fewer elements than the outputs an attribute may have that holds what its last
call has computed on its way (an attention map), and is not compared. A choice: statistics have
far fewer."""
MOST_KEPT_NUMBERS = 512
"""How many numbers of an attribute are compared. A choice."""
KEPT_CALLS, KEPT_ERROR = 2, 0.01
"""Calls after which attributes are compared, and how far they may be off, as a share of what these
calls have changed. A choice: counts of bins hang on roundings."""
OMITTED_SAMPLE, OMITTED_FEWEST = 1 << 16, 64
"""Elements of an output, at most and at least, by which it is told whether terms of the task's
formula are left out. A choice of time."""
MOST_FORMULA_TERMS, LEAST_FORMULA_TERMS, TERMS_S = 256, 2, 0.05
"""How many terms are looked at, without how many, the smallest, the task's answer is computed at
least, and for how long others follow. A choice of time: a twentieth of a verdict's."""
OMITTED_UNITS, OMITTED_UNITS_HALF = 32, 0.125
"""Units in the last place of an output that a term must change it by, of fp32 and fp64, whose
errors are of formulas, and of fp16 and bf16, whose errors are of the output's rounding."""
LEAST_COEFFICIENT, SIGNIFICANT = 0.25, 8
"""The coefficient of a term in an error, and how many standard errors of it, from which on the term
is left out, or scaled."""
MARK_SIZE, MARKS_ALIKE = 1e3, 1 - 1e-3
"""How large a mark is (such as -1e9 for what is masked), and how many times larger than all others;
how much alike marks are. A choice."""
ORDER_UNITS, FEWEST_IN_ORDER = 4, 64
"""By how many units in the last place of |y| + RMS(y) neighbours may be out of order that a task
sorted, and of how many at least it is asked whether they are in order. Choices: exp may err by two
on either side, and a sort by 26 bits of 32 by 63."""
KERNELBENCH_TOLERANCES = (1e-4, 1e-2)
"""KernelBench's absolute and relative tolerances: v0.1's, v0's."""

# -- what a wrong answer is ------------------------------------------------------------------------

SAME_ERROR_SHARE = 1e-3
"""An answer whose error changes by a smaller share when the call is repeated is the same answer:
last bits do not explain a wrong one. A choice."""
DOUBTFUL_RMS = 1e-6
"""Relative RMS error from which an unseen answer is compared with a float64 oracle, too: the fp32
gate."""
FEW_BESIDE_STEP, FEW_BESIDE_STEP_SHARE = 4, 1e-3
"""Elements, and the share of all, that may be off because they hang on a step (floor, argmax). A
choice."""
STEP_MOVES, STEP_UNITS = 36, (4, 4, 1)
"""How often operators round otherwise, by how many units in turn, in a look for what is beside a
step: several steps that one value takes seldom agree where it is moved far."""
MOST_BESIDE_STEP_SHARE = 0.25
"""Where more of the numbers of an output are off, it is not asked whether they hang on steps. A
choice."""
EXACT_ZERO, LINE_NOISE = 1e-12, 1e-2
"""What share of an output's RMS is zero in float64, and up to what share all of a line is noise
there: the last digit of a mean of equal numbers, divided by the root of 1e-5. Choices."""
EQUAL_ELEMENT_RUNS = 2
"""Before these, runs that take the first and the last of equal elements."""

# -- how a candidate works -------------------------------------------------------------------------

MOST_BUILDS = 16
"""Builds that one candidate may ask for. A choice: honest modules ask for three at most."""
FULL_HEADERS_TIMES = 2
"""How many times the deadline a build with torch's own headers may take: beside as many others as
there are cores, 15 of 45 such builds of recorded kernels took more than 120 s of processor time."""
BUILDS_DEADLINE_SHARE = 4
"""All builds of one candidate may take so many times the deadline of one. A choice."""
IDLE_WINDOW_S, LONGEST_IDLE_WINDOW_S = 0.02, 1.0
"""In which a process that was asked nothing should not compute; longer on a busy machine, where one
that wants to run does not always get a processor."""
IDLE_SHARE = 0.5
"""Share of each window in a row with which a process continues to compute: OpenMP's threads spin
for a while after a call."""
IDLE_WORK_NS = 20_000_000
"""Processor time that these windows show, at least: else it only waits to end what it did."""
OUTSTANDING_SHARE = 0.3
"""Share of a call's time in which work goes on after its stream has finished. A choice."""
LARGE_OUTPUT_BYTES = 1 << 30
"""A call with larger outputs is repeated once only. A choice of time."""
RERUN_S = 0.3
"""Calls that only sharpen a judgement are repeated no longer than this. A choice of time."""
SHARE_S = 0.1
"""So are calls that tell the kernels' share of the time."""
TRACED_CALLS = 1000
"""Operators of one forward call whose record does not take seconds."""
CORRUPT_VALUES = (1.0e4, -3.7e3)
"""What takes the place of what kernels wrote. Finite: a result that is multiplied by zero must not
look as if it mattered."""
INDIFFERENT_RTOL = 1e-4
"""Of an answer, what counts as no change: the gate of single elements."""

DEEPEST_CLASS = 4
"""Classes within classes of an extension's module whose functions are watched. A choice."""
LOWEST_ADDRESS = 1 << 20
"""Integers below are no pointers."""
SHARE_CALLS = 5
"""Calls whose median tells the kernels' share of the time."""
FEWEST_LOOKS, LOOKS, LOOK_S, LOOKS_S = 10, 40, 5e-4, 1.0
"""How often samples on a CPU are looked at to tell in whose code they are, at least and at most,
and seconds between these moments and of all (`WALL_SHARE` times as many where a busy machine shows
too few). A choice of time: a share by 40 is known to 16 %."""
LOOK_WORK_NS = 100_000
"""Processor time between two looks, at least: else both would see one moment."""
MOST_LOOKED_AT = 64
"""Times as many calls as in a sample that was timed, where it ends before anybody has looked."""
LIBRARY_SHARE = 0.5
"""Share of these moments from which on a library's code is named beside operators. A choice."""
CALLING_SHARE = 0.2
"""Share of these moments up to which a candidate's library may only be calling others. A choice."""
SYNCHRONISE_NS = 30_000
"""What to wait for an idle device takes."""
MOST_OPERATORS, MOST_CUSTOM_KERNELS, MOST_FLAGS = 64, 32, 64
"""Library calls, kernels and flags of the text that a verdict names. A choice."""
HOARD_BYTES, HOARD_SHARE = 1 << 30, 32
"""Device memory that a process may keep for its next call: so much, or of a large device one in so
many parts. To ask the driver again takes longer than the call."""
SANITIZED_KERNELS = 8
"""Kernels by whose names compute-sanitizer looks. A choice."""
PRINTED_ERRORS, PRINTED_READS = 3, 400
"""Errors that a tool prints; all of initcheck's are read."""
SANITIZED_TRIALS = ("declared", "tail_odd")
"""What a candidate is called on under a sanitizer: its own inputs and an odd shape."""
SANITIZER_LOG_BYTES = 1 << 16
"""Of its log, what is read from the end. A choice."""
REPLAYED_CALLS = 2
"""Calls under a sanitizer or a profiler."""

# -- timing ----------------------------------------------------------------------------------------

RESAMPLES, RESAMPLES_MEANWHILE = 2000, 200
"""Of the bootstrap interval of a speedup, and of one that only tells whether to go on: three
digits, and two. A choice."""
PROCESS_SPREAD = 0.01
"""Standard deviation of log(speedup) between processes, which no sample of one process shows.
Measured: median 0.007."""
LASTING_SHARE = 0.75
"""The same between moments of a busy machine, which favours one side for seconds, by the median
deviation of log(speedup) of pairs. Measured on a CPU: 0.6 to 0.7."""
DECIDED_WIDTH = 0.1
"""The widest interval, +- in log(speedup), that ends a measurement early: about 10 % is what tells
candidates apart that are far from 1. A choice."""
PRECISE_PAIRS = 20
"""Fewest pairs that a measurement of `timing.precise_s` rests on. A choice."""
WARM_ROUNDS, WARM_SHARE = 12, 0.01
"""Rounds of three samples until two medians agree within this share (docs: 1 %)."""
MOST_CALLS_PER_SAMPLE = 10_000
SHORTEST_SAMPLE_NS, LONGEST_SAMPLE_NS = 2e5, 2e7
"""Where one side is many times slower, its samples are kept this short, as long as those of the
faster one last 0.2 ms, which clocks and events resolve to 1 %. A choice of time."""
CLOCK_BOUND_SHARE = 0.8
"""Where the reported time is below this share of what the parent's clock saw pass, that is the time
that counts (docs: implausible_time)."""
ACCUSED_SHARE = 0.5
"""Below this share, in each of three rounds or in all samples, the reported time is implausible."""
IMPOSSIBLE_SHARE = 0.1
"""Below this share of the best estimate, no noise explains what is reported."""
NEW_DRAWS, FEWEST_NEW_DRAWS, NEW_DRAWS_S, NEW_SAMPLE_NS = 8, 5, 0.5, 2e7
"""How often samples on new inputs are compared with others; at least so often, however much work
that is; and what such a sample should take. Choices of time."""
BOUND_ATTEMPTS, BOUND_SAMPLES = 3, 20
"""How often a bound is measured before it counts or accuses, and most samples of a side before each
but the first. A choice."""
DOUBTED = 2
"""How often an implausible time is measured anew before it is believed. A choice."""
MOST_DRIFT = 0.1
"""A change of the reference's time within a measurement that quiet machines do not show."""
CONTENDED_SHARE = 0.2
"""Of the processor time that several threads wanted, what others may have had."""
DISTURBED_RATIO, DISTURBED_LEAST_MS = 2.0, 0.1
"""A call that takes so many milliseconds takes at most so many times its bound."""
REFERENCE_DRIFT = 1.2
"""A reference median that differs by this factor from the first one of this process is flagged."""
REMEASURED = 1
"""How often a measurement that the machine disturbed is repeated."""
FEWEST_SETS, MOST_SETS = 3, 64
"""Sets of inputs that timed calls rotate over."""
COPIED_BYTES = 1 << 20
"""Up to this, a GPU's inputs come through memory of the machine: sharing a device's takes longer
than their copy."""
LARGE_TASK_BYTES = 2 << 30
"""Above this, two sets must do."""
TIMED_INPUT_BYTES = 256 << 20
"""Memory for the sets of inputs that timed calls rotate over, each side."""
DRAW_SETS_S, DRAW_SETS_SHARE = 0.1, 0.1
"""Time for drawing the sets of one process, and the largest share of a measurement's budget. Both
processes draw them, and each round as many: at 0.3 s that was half of what timing a call of 0.3 ms
took on a CPU."""
BANDWIDTH_SHARE = 0.5
"""Faster than this share of the time that its bytes need at peak bandwidth is implausible."""
BURNT_SHARE = 0.5
"""Processor time in the reference's turns that is taken for work, of each thread."""
ANSWER_NS = 100_000
"""Processor time of a candidate in a turn of the reference that is no work: it has answered, and
waits again. 30,000 were seen with one thread, and 110,000 with four."""
AROUND_SAMPLES = 16
AROUND_FACTOR, AROUND_SHARE = 2, 0.02
"""Processor time around a candidate's calls in a sample: this times the median of the reference's
last samples, and this share of all. A choice."""

# -- rounds on unseen inputs, by the parent's clock ------------------------------------------------

SPOILED, SPOILED_S, SPOILED_WALL = 1024, 0.3, 16
"""Outputs that are written over before rounds, seconds of work for it, and how many times as long
that may take. Choices."""
KEPT_SAMPLES, KEPT_OF = 4, 2
"""Samples of which the answer of one call, at random, is compared when they are taken, the last
ones, and of how many samples one is kept: what is left out only where an output is dropped at once
shows in no round, since a round holds its outputs. Choices."""
MOST_UNSEEN = 512
"""Calls of a round: a delay once in a round must weigh little on each of them."""
UNSEEN_DRAW_S = 0.06
"""Time for drawing the inputs of one round. A choice."""
UNSEEN_BYTES = 4 << 30
"""Memory of a GPU for the inputs and outputs of a round. Calls of 60 us, three a round, counted up
to five times what they took: a round costs a candidate up to a millisecond more than the
reference."""
UNSEEN_ROUND_NS = 5e6
"""What a round should take. A choice of time: as many inputs are drawn."""
REVEALING_CALLS, REVEALING_ROUND_NS = 10, 1e8
"""But more calls than a ring of eight buffers holds, where that does not take longer than this: on
a busy machine, too."""
FEWEST_ROUNDS, MOST_ROUNDS = 3, 5
"""The first one touches memory that later ones do not, and one may be disturbed. The lower quartile
of all counts, of three the second."""
ROUNDS_S, LONG_S = 0.06, 0.5
"""Calls that take long are bounded by fewer rounds, or by one: a delay of the machine weighs little
on them."""
KEPT_BYTES = 1 << 18
"""Outputs of a call that all calls of a round may keep and still find in a cache."""
TELLING_SHARE = 0.2
"""A round of which less is left without its own cost tells nothing that could accuse."""
ALONE_ROUNDS, ALONE_MESSAGE_NS = 3, 2.5e5
"""Rounds of one call, and what a message and cold caches may cost such a call besides what they
cost a round without work."""
COMPARED_UNSEEN = 4
"""Outputs of each round that are drawn after all of them are written, to be compared; of the first
round, so many others that differ most."""
UNSEEN_TRIALS = ("mixed", "impulse", "mutated", "related")
"""Trials whose distribution one call of each round has, so that an answer that is right on the
task's own inputs alone shows while it is timed, too."""

MOST_FORMS = 4
"""Forms of a round's outputs that are described: honest ones have one."""

# -- the reference under torch.compile -------------------------------------------------------------

FIRST_CALLS_S, FEWEST_FIRST_CALLS = 0.3, 3
"""Calls before it is timed: CUDA graphs run a shape once as it is, and record it with the second
call."""

# -- sources and builds ----------------------------------------------------------------------------

MOST_SOURCE_LETTERS = 1_000_000
"""Longest source that is screened; the time grows with its length alone."""
MOST_FLAG_LETTERS = 16_384
"""Letters of all compiler flags together; more do not fit a command line."""
LONGEST_NAME = 200
"""Bytes of a name that becomes a file's: file systems take 255."""
FILE_LIMIT_BYTES = 2 << 30
"""Largest file of a compiler: torch's precompiled header takes 0.8 GB."""
COMPILER_BYTES = 16 << 30
"""Address space of a compiler's process. A choice: torch's full headers take 2 GB, and an endless
text as many as there are."""
CANDIDATE_FILE_BYTES = 256 << 20
"""Largest file of a candidate's compiler: honest objects take a few megabytes, and the cache keeps
up to 16 libraries of a candidate."""
ROOM_BYTES = 64 << 20
"""With less free on the disk, a compiler's failure says nothing about its source."""
MOST_SYMBOLS, MOST_SYMBOL_LETTERS = 1 << 17, 1024
"""Undefined symbols of a library, and letters read of each; honest libraries have some hundreds."""

# -- messages and logs -----------------------------------------------------------------------------

MOST_ITEMS = MOST_TEXT_LETTERS = 65_536
"""Items of a list and letters of a text that a candidate's process may report. A choice."""
MOST_NS = 10**15
"""Longest time that it may report: eleven days."""
MESSAGE_BYTES, SEND_S = 4 << 20, 30
"""Longest message, and seconds until one must be taken."""
LOG_BYTES = 8192
"""Bytes of a process's log that a verdict keeps."""
PROGRAM_OUTPUT_BYTES = 1 << 18
"""Bytes of what a program under a tool printed, from its end."""

# -- processes -------------------------------------------------------------------------------------

WALL_SHARE = 10
"""A deadline in processor time is also one of this multiple in wall time: for what waits for a disk
for ever, or stops itself."""
MEMORY_SHARE = 0.6
"""Of the machine's memory, the most that a child may hold. A choice."""
SCRATCH_FILES, DESCRIPTORS = 65_536, 4096
"""Files of a child, and those that it may hold open. A choice."""
CPU_GRACE_S = 5
"""Seconds of processor time between the signal that can be caught and the one that cannot."""
HEADLESS_S = 1.0
"""Seconds that threads of a killed process may stay in a driver after its first thread ended."""
CHECK_S = 60.0
"""Deadline of a device's health check."""
SOON_S, MEMORY_RETURN_S = 2.0, 20.0
"""Seconds to wait for a device's memory: as it is, and where nothing of this worker holds any."""
ENOUGH_MEMORY = 0.9
"""Share of the initial free memory that must be free again, beside waiting processes."""

# -- lanes of one device ---------------------------------------------------------------------------

ROOM_COPIES = 5
"""How many times what loading a task took its verification takes, both processes together: eighteen
times the inputs of a task whose outputs are as large, of which loading holds five, and expected
values."""
ROOM_SHARE = 0.5
"""Share of a GPU's memory that must be free to begin the next task, or that it takes at most, while
the last one's processes give theirs back."""

# -- memory that processes share -------------------------------------------------------------------

FENCE, FENCE_BYTES = 0xFF, 512
"""What each byte before and after a candidate's inputs holds, and of a GPU's free memory before a
call, and how many there are: NaN in every type, and the alignment of torch's allocator on a GPU."""
UNUSED = 0xFE
"""What each byte of a processor's free memory holds before a call: -1.7e38 in fp32."""
SHARED_ALIGNMENT = 256
"""Each tensor in shared memory starts at a multiple of so many bytes, as torch's own do."""
