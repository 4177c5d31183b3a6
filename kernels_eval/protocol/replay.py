"""Messages that run a candidate under a sanitizer or a profiler."""

from __future__ import annotations

from kernels_eval.languages import Language
from kernels_eval.protocol.message import Payload, Report, Request
from kernels_eval.protocol.model import DECLARED, InputPlan, ModelSpec
from kernels_eval.protocol.task import OperatorTimes


class ProgramOutput(Report):
    """The end of what a program printed."""

    said: str


class RunProgram(Request[ProgramOutput]):
    """Run a program with exactly this child's rights."""

    program: list[str]
    environment: dict[str, str]


class Replay(Payload):
    """What a process needs to call a candidate: sources, libraries by build key, and the shapes of
    its calls in turn, by their names in `plan`.
    """

    task: str
    candidate: str
    spec: ModelSpec
    libraries: dict[str, str]
    language: Language | None = None
    plan: InputPlan | None = None
    shapes: list[str] = [DECLARED]


class ConfinedReplay(Payload):
    """What a program under a tool is given: it confines itself to `readable` (and the `tools`),
    calls the candidate, and prints `done`.
    """

    replay: Replay
    readable: list[str]
    tools: list[str] = []
    done: str = ""


class CandidateTimes(OperatorTimes):
    """With `resources`: each kernel's registers, bytes of stack, bytes of shared memory, share of
    local accesses.
    """

    resources: dict[str, list[float]]


class TimeCandidate(Request[CandidateTimes]):
    """Where does a candidate spend its time?"""

    replay: Replay
    budget_s: float
