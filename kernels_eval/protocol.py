"""Every message between the judge and the processes that it starts: a request beside its answer.

The judge sends a `Request`; its class says which command it is and of which type the answer is. A
process serves a request by the method that `handles` it. Messages are JSON; file descriptors
(shared memory, archives) travel beside them. No torch here, for the judge never imports it.

Guarantees: a request or an answer of another form is refused where it arrives; `handlers_of`
refuses a handler that promises another answer than its request. Answers of a candidate are
`Report`s: types are strict and everything has bounds. Their content is never trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    TypeVar,
    get_args,
    get_type_hints,
)

from pydantic import (
    BeforeValidator,
    FailFast,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    field_validator,
)

from kernels_eval.languages import Language
from kernels_eval.records import Record

A = TypeVar("A", bound=Record)
H = TypeVar("H", bound=Callable[..., object])


class Request(Record, Generic[A]):
    """A command for a process, which answers with `A`."""

    answer: ClassVar[type[Any]]
    """the type of the answer"""
    command: ClassVar[str]
    """its name on the wire"""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        arguments = cls.__pydantic_generic_metadata__["args"]
        if arguments:  # `Request[A]` itself
            cls.answer = arguments[0] if isinstance(arguments[0], type) else Record
        else:
            cls.command = cls.__name__

    def message(self) -> dict[str, object]:
        """What is sent."""
        return {"command": self.command, **self.model_dump(mode="json")}


def parsed(request: Request[A], answer: object) -> A:
    """The answer as the type that its request promises. Raises ValidationError for another form."""
    found: A = request.answer.model_validate(answer)
    return found


def handles(request: type[Request[Any]]) -> Callable[[H], H]:
    """Mark the method, or the function, that answers this request."""

    def mark(handler: H) -> H:
        handler.__dict__["handles"] = request
        return handler

    return mark


def handlers_of(role: object) -> dict[str, Callable[[Any], Record]]:
    """The handlers of a role (an object, or a module of functions) by the command that they serve,
    each of which takes the message. Raises TypeError for one with another answer than its
    request's."""
    owner = role if isinstance(role, ModuleType) else type(role)
    found = {}
    for name in dir(owner):
        request = getattr(getattr(owner, name), "handles", None)
        if isinstance(request, type) and issubclass(request, Request):
            promised = get_type_hints(getattr(owner, name)).get("return")
            if request.answer not in (promised, *get_args(promised)):
                raise TypeError(f"{owner.__name__}.{name} answers {request.command} otherwise")
            found[request.command] = _served(request, getattr(role, name))
    return found


def _served(
    request: type[Request[Any]], handler: Callable[[Any], Record]
) -> Callable[[Any], Record]:
    return lambda message: handler(request.model_validate(message))


class Done(Record):
    """The answer of a command that only does something."""


DECLARED = "declared"
"""The task's own inputs and shape, as opposed to drawn distributions and other sizes."""
LATER, EARLIER = "a later call", "an earlier call"
"""Other calls of a round, as `Comparison.equals_trial` names them."""


# -- what reports hold -----------------------------------------------------------------------------

MOST_ITEMS = MOST_LETTERS = 65_536
MOST_NS = 10**15
Count = Annotated[int, Field(ge=0, lt=1 << 62)]
Text = Annotated[str, Field(max_length=MOST_LETTERS)]
Finite = Annotated[float, Field(ge=-1e9, le=1e9)]
Item = TypeVar("Item")
Several = Annotated[list[Item], FailFast(), Field(max_length=MOST_ITEMS)]
"""A list. The first item that is wrong is the last that is looked at."""
Shape = Annotated[list[Count], FailFast(), Field(max_length=64)]
Nanoseconds = Annotated[int, Field(ge=0, le=MOST_NS)]


def storable(text: str) -> str:
    """Text that a record can hold and a terminal print: without lone surrogates."""
    return text.encode("utf-8", "replace").decode()


def _few(value: object) -> object:
    """The first entries of a dictionary."""
    return dict(list(value.items())[:64]) if isinstance(value, dict) else value


class Report(Record, extra="ignore", strict=True):
    """Base of what a candidate's process reports. Unknown fields are ignored, types are strict, and
    everything has bounds: no answer can overflow an arithmetic or hold the judge up."""


class ErrorReport(Report):
    """An error that a process reports of itself; `error` is a reason, empty where there is none."""

    error: str = ""
    detail: str = ""
    trace: str = ""

    @field_validator("*", mode="before")
    @classmethod
    def _as_text(cls, said: object) -> object:
        """The text of an exception may hold anything."""
        return storable(said) if isinstance(said, str) else said


# -- what a task is --------------------------------------------------------------------------------


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


# -- memory ----------------------------------------------------------------------------------------


class SharedMemory(Record):
    """Memory whose descriptor comes with the message: the host's, or `size` bytes of a device's."""

    on_device: bool
    size: int = 0


class PackedValues(SharedMemory):
    """Values in such memory, `stride` bytes from one to the next; `packed` says how each lies
    there, or how all do."""

    packed: list[str]
    count: int
    stride: int


class Shared(Record):
    """Whether memory could be had: a device's cannot where its driver does not share it."""

    shared: bool


F = TypeVar("F", bound=Shared)


class MemoryRequest(Request[F], Generic[F]):
    """What takes `size` bytes of new memory: the host's, whose descriptor comes along, or a
    device's, whose descriptor the answer carries."""

    on_device: bool = False
    size: int = 0


class HandedOver(Shared):
    """Values that were put into shared memory, as in `PackedValues`."""

    packed: list[str] = []
    count: int = 0
    stride: int = 0


# -- any process that runs a model -----------------------------------------------------------------


class Prepare(Request[Done]):
    """Make the device ready before the work is known."""

    device: str
    threads: int


class RedrawWeights(Request[Done]):
    """Redraw parameters, mapped by `names` where all are there, and the running statistics of
    these shapes; `transposed`: square matrices the other way round."""

    seed: int
    statistics: list[list[int]] = []
    names: list[str] = []
    transposed: bool = False


class SampleReport(Report):
    """One timed sample. `graphs`: how many torch.compile has made so far."""

    ns: Nanoseconds
    custom_calls: Count = 0
    graphs: Count = 0


class Sample(Request[SampleReport]):
    """Time so many calls, each on the next of the prepared inputs; of calls with gradients `only`
    one pass if asked ("forward", "backward")."""

    calls: int
    only: str = ""


class ReportedOutput(Report):
    """The form of one output."""

    shape: Shape
    dtype: Text


class CallReport(Report):
    """One compared call."""

    kinds: Several[Text] = []
    devices: Several[Text] = []
    plain: bool = False
    tensors: bool = False
    expanded: bool = False
    structure: Text = ""
    custom_calls: Count = 0
    mutated: bool = False
    previous_changed: bool = False
    rerun_differs: bool = False
    outstanding_share: Finite = 0.0
    outputs: Several[ReportedOutput] = []


class UnseenReport(Report):
    """The different forms of the outputs of unseen inputs."""

    forms: Annotated[list[CallReport], FailFast(), Field(min_length=1, max_length=MOST_ITEMS)]
    custom_calls: Count = 0


class RunUnseen(Request[UnseenReport]):
    """Call the model on inputs that no process but the reference's has seen before, and put all
    outputs into shared memory once all calls are made."""

    inputs: PackedValues
    outputs: SharedMemory


# -- the candidate ---------------------------------------------------------------------------------


class LoadReport(Report):
    """The constructed module: shapes of its parameters, and of what may be running statistics,
    without dimensions of size 1; whether its constructor made parameters on the CPU although it was
    told another device."""

    parameters: Several[Shape] = []
    statistics: Several[Shape] = []
    made_elsewhere: bool = False


class LoadCandidate(Request[LoadReport]):
    """Import the module at `path` and construct its ModelNew; `libraries` are paths by the key of
    their build; with `kernels`, an archive of compiled ones comes along, too."""

    path: str
    spec: ModelSpec
    arguments: PackedValues
    outputs: SharedMemory
    libraries: dict[str, str]
    language: Language
    kernels: bool = False


class Rebuild(Request[Done]):
    """Construct the model anew with these arguments, under another seed where there is one."""

    arguments: PackedValues
    seed: int | None = None


class Call(Request[CallReport]):
    """One forward call whose outputs go to shared memory. `in_place` writes its inputs over the
    storage of the previous call's. With `reruns` the same call is made again, and the bytes are
    those of the last. Outputs that are not on `devices` are not copied."""

    inputs: PackedValues
    in_place: bool = False
    evaluate: bool = False
    reruns: int = 0
    output_bytes: int = 0
    devices: list[str] = []


class Forget(Request[Done]):
    """Let go of earlier calls and of the inputs of samples."""


class TakeTimingInputs(Request[Done]):
    """Sets of inputs that samples rotate over."""

    inputs: PackedValues


class StateReport(Report):
    """Settings that have changed since before the candidate was loaded: at most 64 of them."""

    changed: Annotated[dict[str, Text], BeforeValidator(_few)] = {}


class ReadState(Request[StateReport]):
    """Which settings are no longer what they were?"""


class OperatorReport(Report):
    """Operators and custom kernels of one call."""

    operators: Several[Text] = []
    custom: Several[Text] = []
    off_stream: Count = 0


class NameOperators(Request[OperatorReport]):
    """Which operators and kernels does a call run? `again`: without a mode that a candidate can
    see, where that is possible."""

    inputs: PackedValues
    again: bool = False


class ShareReport(Report):
    """Share of a call's time in custom kernels."""

    share: Finite


class MeasureShare(Request[ShareReport]):
    """What share of a call's time do custom kernels take?"""

    inputs: PackedValues


class OrnamentReport(Report):
    """Does the output stay the same when what the kernels wrote is replaced? None where nothing
    would show."""

    ornamental: bool | None


class ReplaceWritten(Request[OrnamentReport]):
    """Replace what the kernels write, on two sets of inputs."""

    inputs: PackedValues


class PackKernels(Request[Done]):
    """Write what the language's compiler has made to the file that comes along."""


class LateBuildAnswer(Record):
    """What came of a build that a candidate's process asks for while it serves a command. The
    question is `{"build": ...}` with what it wants built."""

    ok: bool
    path: str = ""
    reason: str | None = None
    log: str = ""


# -- what a candidate asks to build ----------------------------------------------------------------


class CaptureReport(ErrorReport):
    """What a module, or its constructor, asks to build."""

    specs: list[object] = []


class Capture(Request[CaptureReport]):
    """Import the module with builds replaced by stubs. Builds with the keys `failed` fail."""

    path: str
    failed: list[str] = []


class CaptureConstructor(Request[CaptureReport]):
    """What does the constructor of the module ask to build?"""

    task_path: str
    init_form: str


# -- the reference ---------------------------------------------------------------------------------


class LoadTask(Request[LoadedTask]):
    """Load a task and run it once. Oracles in float64 take `oracle_max_bytes` at most."""

    path: str
    spec: ModelSpec
    oracle_max_bytes: int = 0


class Expect(Request[Expectation]):
    """Compute and keep the expected outputs of one trial."""

    name: str
    seed: int
    distribution: str = DECLARED
    weights_seed: int | None = None
    shape: str = DECLARED
    evaluate: bool = False
    construct_seed: int | None = None


class ForgetTrial(Request[Done]):
    """Let go of a trial's expected values."""

    trial: str


class NewCandidate(Request[Done]):
    """What follows is about another candidate."""


class ShareMemory(MemoryRequest[Shared]):
    """Have memory for outputs. `whose`: the "candidate" of a compared call, or of a round "unseen"
    or the reference's "own"."""

    whose: str


class DrawInputs(MemoryRequest[HandedOver]):
    """Put the inputs of these seeds, of a distribution each, into shared memory."""

    seeds: list[int]
    distributions: list[str]
    shape: str = DECLARED


class DrawArguments(MemoryRequest[HandedOver]):
    """Put what the constructor is called with under this seed into shared memory."""

    seed: int


class Compare(Request[Comparison]):
    """Compare what the candidate has written with this trial's expected values, and with those of
    earlier trials."""

    trial: str


class MeasureCompiled(Request[Comparison]):
    """Compare what the compiled reference has written to the memory that comes along."""

    trial: str


class CompareUnseen(Request[UnseenComparison]):
    """Compare outputs of a round: those at these positions, and those that are farthest off."""

    positions: list[int]
    seeds: list[int]
    distributions: list[str]


class DrawnTimingInputs(Record):
    """How long drawing took. `graphs`: how many torch.compile has made so far."""

    seconds: float
    graphs: int = 0


class DrawTimingInputs(Request[DrawnTimingInputs]):
    """Draw a set of inputs for each seed, that samples rotate over."""

    seeds: list[int]


class EndTiming(Request[Done]):
    """Give back the memory that only timing needs."""


class IgnoredInputs(Record):
    """Positions of arguments that may vary and do not change the output."""

    ignored: list[int]


class FindIgnoredInputs(Request[IgnoredInputs]):
    """Which arguments does the output not depend on?"""

    seed: int


class UsedBytes(Record):
    """Bytes of the arguments that the output depends on."""

    bytes: float


class EstimateUsedBytes(Request[UsedBytes]):
    """How many bytes of the arguments does the output depend on?"""

    seed: int


class WeightsMatter(Record):
    """Whether the output changes with these weights."""

    matter: bool


class TryOtherWeights(Request[WeightsMatter]):
    """Does the output change when these parameters (by position; none: the running statistics) get
    other values?"""

    seed: int
    weights_seed: int
    only: list[int]


# -- the compiled reference ------------------------------------------------------------------------


class LoadModel(Request[Done]):
    """Construct the task's own model."""

    path: str
    spec: ModelSpec


class CompileReport(Report):
    """How many graphs were compiled."""

    graphs: Count


class Compile(Request[CompileReport]):
    """Compile the model by calling it on the inputs of this seed."""

    mode: str
    seed: int


class AnswerCompiled(Request[CallReport]):
    """Call the compiled model on the inputs of this seed, and write its outputs to the memory that
    comes along."""

    seed: int


# -- the device ------------------------------------------------------------------------------------


class HealthReport(Record):
    """What one health check saw."""

    right: bool
    free_bytes: int


class CheckHealth(Request[HealthReport]):
    """Compute something with a known answer; wait up to `patience_s` for so much free memory."""

    device: str
    wanted_bytes: int
    patience_s: float


# -- one program, or one task, in a process of its own ---------------------------------------------


class ProgramOutput(Report):
    """The end of what a program printed."""

    said: str


class RunProgram(Request[ProgramOutput]):
    """Run a program with everything that this child may and may not do."""

    program: list[str]
    environment: dict[str, str]


class AboutTask(Request[A], Generic[A]):
    """A question about a task, whose file is at `path`."""

    path: str
    entry_point: str
    init_form: str


class DescribeInterface(AboutTask[Interface]):
    """What goes in and out of one forward call?"""


class GraphReport(Record):
    """Digests of the ATen graph of one forward call (`kernels_eval.reference.graph.Graph`)."""

    normalised: str
    shapes: str
    structure: str
    operators: list[str]


class WorkloadReport(Record):
    """Operators, floating-point operations and least bytes of one forward call; `executed` says on
    what. `peak_rss_bytes` are those of the process."""

    operators: list[str]
    flops: int
    bytes_min: int
    uncounted: list[str]
    executed: str
    graph: GraphReport | None
    peak_rss_bytes: int


class MeasureWorkload(AboutTask[WorkloadReport]):
    """How much does a task's reference compute and move? Declared inputs of more bytes than that
    are not made."""

    declared_max_bytes: int


class OperatorTimes(Record):
    """Microseconds a call of every outermost operator, and of every own kernel, the slowest first,
    and by which clock."""

    operators: list[dict[str, Any]]
    kernels: list[dict[str, Any]] = []
    total_us: float
    clock: str


class TimeOperators(AboutTask[OperatorTimes]):
    """Where does a task's reference spend its time?"""

    device: str
    threads: int
    budget_s: float


class Replay(Record):
    """What a process needs to call a candidate on its task's declared inputs: where the sources
    are, and the libraries by the key of their build."""

    task: str
    candidate: str
    spec: ModelSpec
    libraries: dict[str, str]
    language: Language | None = None


class ConfinedReplay(Record):
    """What a program under a tool is given: it confines itself to `readable` (and the `tools`),
    calls the candidate, and prints `done`."""

    replay: Replay
    readable: list[str]
    tools: list[str] = []
    done: str = ""


class CandidateTimes(OperatorTimes):
    """With `resources`: what the code of each kernel takes (registers, bytes of stack, bytes of
    shared memory, share of local accesses)."""

    resources: dict[str, list[float]]


class TimeCandidate(Request[CandidateTimes]):
    """Where does a candidate spend its time?"""

    replay: Replay
    budget_s: float


class Peaks(Record):
    """What a processor reaches."""

    peak_flops: float
    peak_bytes_per_s: float


class MeasurePeaks(Request[Peaks]):
    """FLOP/s of a product of fp32 matrices, and bytes per second of copying within a working set of
    so many bytes."""

    threads: int
    working_set: int
