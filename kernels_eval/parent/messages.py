"""What a candidate's process says of itself, checked for its form only.

Nothing here is believed because it was said: outputs are compared elsewhere, times are bounded by
the parent's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, ValidationError

from kernels_eval.records import Record


class Finding(Record):
    """The end of a verification that did not get to `correct`: a reason (which fixes the status), a
    detail, a log."""

    reason: str
    detail: str = ""
    log: str = ""


class Stop(Exception):
    """Raised inside the protocol when the verdict is known."""

    def __init__(self, reason: str, detail: str = "", log: str = "") -> None:
        super().__init__(reason)
        self.finding = Finding(reason=reason, detail=detail[:2000], log=log)


MAY_CLAIM = frozenset(
    """exception cuda_error out_of_memory undefined_symbol no_module syntax_error build_failed forbidden_call build
    missing_model_new""".split()
)
"""Reasons that a candidate's process may give for an error of its own. Never `ok`, never the
reference's."""


class _Said(Record):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class OutputForm(_Said):
    """Shape and dtype of one output tensor."""

    shape: list[int]
    dtype: str


class Notice(_Said):
    """One compared call."""

    kinds: list[str] = []
    devices: list[str] = []
    plain: bool = False
    tensors: bool = False
    structure: str = ""
    custom_calls: int = 0
    mutated: bool = False
    previous_changed: bool = False
    rerun_differs: bool = False
    outstanding_share: float = 0.0
    outputs: list[OutputForm] = []


class Seen(_Said):
    """Operators and custom kernels."""

    operators: list[str] = []
    custom: list[str] = []
    off_stream: int = 0


class Sample(_Said):
    """One timed sample."""

    ns: int
    custom_calls: int = 0


class State(_Said):
    """Settings that have changed since before the candidate was loaded."""

    changed: dict[str, str] = {}


REASON_OF_CHANGE: Mapping[str, str] = {
    "current_stream": "stream_escape",
    "patched": "harness_tampering",
    "default_dtype": "global_state_changed",
    "default_device": "global_state_changed",
    "threads": "global_state_changed",
    "current_device": "global_state_changed",
    "persisting_l2": "global_state_changed",
    "deterministic": "global_state_changed",
}
"""The reason that a change of each setting stands for. Settings that are not here are only flagged:
honest code writes them."""


class Share(_Said):
    share: float


class Ornamental(_Said):
    ornamental: bool


def believe_form(model: type[Any], answer: dict[str, Any]) -> Any:
    """The answer as `model`. Raises Stop (exited_early) where it has another form: whatever spoke,
    it was not our code."""
    try:
        return model.model_validate(answer)
    except ValidationError as error:
        said = one_line(str(error))[:200]
        raise Stop(
            "exited_early",
            f"the process answered with something that the protocol does not know: {said}",
        ) from error


def one_line(text: str) -> str:
    """Candidate text as data: one line, no control characters, bounded."""
    return "".join(c if c.isprintable() else " " for c in text)[:500].strip()
