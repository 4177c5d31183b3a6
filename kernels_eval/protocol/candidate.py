"""Messages of the process that runs a candidate, and of the one that reads its build requests.
Answers are `Report`s."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from kernels_eval.languages import Language
from kernels_eval.protocol.message import (
    Count,
    Done,
    ErrorReport,
    Finite,
    Payload,
    Report,
    Request,
    Several,
    Shape,
    Text,
)
from kernels_eval.protocol.model import CallReport, ModelSpec, Numbers, PackedValues, SharedMemory


class LoadReport(Report):
    """The constructed module: shapes of parameters, of those among them without gradient, and of
    possible running statistics, without dimensions of size 1; names of parameters and digests of
    their values; whether it made parameters on the CPU instead of its device; `lacks`: names of the
    reference's buffers that it has in no such form, `lacks_drawn`: of what its constructor draws.
    """

    parameters: Several[Shape] = []
    parameter_names: Several[Text] = []
    parameter_digests: Several[Text] = []
    frozen: Several[Shape] = []
    statistics: Several[Shape] = []
    made_elsewhere: bool = False
    lacks: Several[Text] = []
    lacks_drawn: Several[Text] = []


class LoadCandidate(Request[LoadReport]):
    """Import the module at `path` and construct its ModelNew. `libraries`: paths by build key; with
    `kernels`, an archive of compiled ones comes along.
    """

    path: str
    spec: ModelSpec
    arguments: PackedValues
    outputs: SharedMemory
    libraries: dict[str, str]
    language: Language
    kernels: bool = False


class Rebuild(Request[Done]):
    """Construct the model anew."""


class Reconstruct(Request[Done]):
    """Construct the model anew, with these arguments, or without any with the first ones."""

    arguments: PackedValues | None = None


class CopyWeights(Request[Done]):
    """Take these values of the reference's weights."""

    weights: PackedValues


class Call(Request[CallReport]):
    """One forward call on the last of the inputs, after one on each other. Its outputs go to shared
    memory, but not those of other `devices`. `in_place`: its inputs lie where the previous call's
    did. `reruns`: so often it is made again. `fenced`: bytes around the inputs tell who leaves
    them."""

    inputs: PackedValues
    in_place: bool = False
    evaluate: bool = False
    reruns: int = 0
    fenced: bool = True
    output_bytes: int = 0
    devices: list[str] = []


class Forget(Request[Done]):
    """Let go of earlier calls and of the inputs of samples."""


class SpoilOutputs(Request[Done]):
    """Make so many calls on the inputs of samples, within so many seconds of work, and write over
    each output, as a caller may who has used it: no later answer may rely on it."""

    calls: int
    seconds: float


class TakeTimingInputs(Request[Done]):
    """Sets of inputs that samples rotate over."""

    inputs: PackedValues


def _few(value: object) -> object:
    return dict(list(value.items())[:64]) if isinstance(value, dict) else value


class StateReport(Report):
    """Settings changed since before the candidate was loaded: at most 64."""

    changed: Annotated[dict[str, Text], BeforeValidator(_few)] = {}


class ReadState(Request[StateReport]):
    """Which settings are no longer what they were? Torch's own operators take 50 ms of it."""

    operators: bool = True


class OperatorReport(Report):
    """Operators and custom kernels of one call."""

    operators: Several[Text] = []
    custom: Several[Text] = []
    off_stream: Count = 0


class NameOperators(Request[OperatorReport]):
    """Which operators and kernels does a call run?"""

    inputs: PackedValues


class KeptReport(Report):
    """As `KeptNumbers`: of at most 64 attributes."""

    before: Annotated[dict[str, Numbers], BeforeValidator(_few)] = {}
    after: Annotated[dict[str, Numbers], BeforeValidator(_few)] = {}


class KeepOwnNumbers(Request[KeptReport]):
    """The same of a candidate's attributes, on these inputs, in a new model."""

    inputs: PackedValues
    names: list[str]


class RecordSample(Request[OperatorReport]):
    """The same of a sample of so many calls, or of as many as their record does not take seconds:
    made as a timed one is.
    """

    calls: int


class ShareReport(Report):
    share: Finite


class MeasureShare(Request[ShareReport]):
    """What share of a call's time do custom kernels take?"""

    inputs: PackedValues


class OrnamentReport(Report):
    """Does the output stay the same with replaced kernel writes? None where nothing would show."""

    ornamental: bool | None


class ReplaceWritten(Request[OrnamentReport]):
    """Replace what the kernels write, on two sets of inputs."""

    inputs: PackedValues


class PackKernels(Request[Done]):
    """Write the language's compiled kernels to the file that comes along."""


class LateBuildAnswer(Payload):
    """The outcome of a build requested by `{"build": ...}` during a command."""

    ok: bool
    path: str = ""
    reason: str | None = None
    log: str = ""


class CaptureReport(ErrorReport):
    """What a module, or its constructor, asks to build."""

    specs: list[object] = []


class Capture(Request[CaptureReport]):
    """Import the module with builds replaced by stubs; those with keys in `failed` fail."""

    path: str
    failed: list[str] = []


class CaptureConstructor(Request[CaptureReport]):
    task_path: str
    init_form: str
