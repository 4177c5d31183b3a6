"""What a candidate's process says of itself, parsed: its form is checked, its content never
trusted.

Outputs are compared elsewhere, and times are bounded by the parent's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import ConfigDict, Field, ValidationError

from kernels_eval.isolation.sandbox import Child, ChildFailure
from kernels_eval.records import Reason, Record

LOG_BYTES = 8192
"""Of a process's log, as much as a verdict keeps."""


class Finding(Record):
    """Why a verification ended before every check had passed."""

    reason: Reason
    detail: str = ""
    log: str = ""


class Stop(Exception):
    """Ends the protocol: the verdict is known."""

    def __init__(self, reason: Reason, detail: str = "", log: str = "") -> None:
        super().__init__(reason)
        self.finding = Finding(reason=reason, detail=detail[:2000], log=log)


def unanswered(failure: ChildFailure, child: Child, late: Reason) -> Stop:
    """What it means that a child did not answer: `late` where its deadline has passed."""
    reason = late if failure.reason is Reason.RUN else failure.reason
    return Stop(reason, failure.detail, child.log_tail(LOG_BYTES))


CLAIMABLE = frozenset(
    map(
        Reason,
        """exception cuda_error out_of_memory undefined_symbol no_module syntax_error build_failed
        forbidden_call build missing_model_new""".split(),
    )
)
"""Reasons that a candidate's process may give for an error of its own. Never OK, never the
reference's."""


class Report(Record):
    """Base of what a candidate's process reports. Unknown fields are ignored, types are strict."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class LoadReport(Report):
    """The constructed module: shapes of its parameters without dimensions of size 1, and whether
    its constructor made them on the CPU although it was told another device."""

    parameters: list[list[int]] = []
    made_elsewhere: bool = False


class ReportedOutput(Report):
    shape: list[int]
    dtype: str


class CallReport(Report):
    """One compared call."""

    kinds: list[str] = []
    devices: list[str] = []
    plain: bool = False
    tensors: bool = False
    expanded: bool = False
    structure: str = ""
    custom_calls: int = 0
    mutated: bool = False
    previous_changed: bool = False
    rerun_differs: bool = False
    outstanding_share: float = 0.0
    outputs: list[ReportedOutput] = []


class OperatorReport(Report):
    """Operators and custom kernels of one call."""

    operators: list[str] = []
    custom: list[str] = []
    off_stream: int = 0


class ShareReport(Report):
    """Share of a call's time in custom kernels."""

    share: float


class SampleReport(Report):
    """One timed sample."""

    ns: int
    custom_calls: int = 0


class UnseenReport(Report):
    """The different forms of the outputs of unseen inputs."""

    forms: list[CallReport] = Field(min_length=1)


class StateReport(Report):
    """Settings that have changed since before the candidate was loaded."""

    changed: dict[str, str] = {}


class OrnamentReport(Report):
    """Does the output stay the same when what the kernels wrote is replaced? None where nothing
    would show."""

    ornamental: bool | None


REASON_OF_CHANGE: Mapping[str, Reason] = {
    "current_stream": Reason.STREAM_ESCAPE,
    "patched": Reason.HARNESS_TAMPERING,
    **dict.fromkeys(
        "default_dtype default_device threads current_device persisting_l2 deterministic".split(),
        Reason.GLOBAL_STATE_CHANGED,
    ),
}
"""The reason that a change of each setting stands for. Other settings are only flagged: honest code
writes them."""

R = TypeVar("R", bound=Record)


def parse_report(model: type[R], answer: object) -> R:
    """The answer as `model`. Raises Stop (EXITED_EARLY) where it has another form: our own code did
    not send it."""
    try:
        return model.model_validate(answer)
    except ValidationError as error:
        raise Stop(
            Reason.EXITED_EARLY,
            "the process answered with something that the protocol does not know:"
            f" {one_line(str(error))[:200]}",
        ) from error


def one_line(text: str) -> str:
    """Candidate text as data: one line, no control characters, at most 500 characters."""
    return "".join(c if c.isprintable() else " " for c in text)[:500].strip()
