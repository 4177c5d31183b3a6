"""The records that cross the trust boundary: task, candidate, verdict. Frozen, validated on
construction; an illegal combination (a timing on a kernel that is not correct) cannot be built."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from kernels_eval.languages import Language as Language  # noqa: PLC0414 (records are imported from here)

VERDICT_SCHEMA_VERSION = 2
Level = Literal["screen", "confirm"]
"""How much of the protocol a candidate passed: what orders candidates, or all of it."""
Json = dict[str, Any]
"""An object as JSON has it, such as the row of a table or the manifest of a snapshot."""
Row = Mapping[str, Any]
"""The same, where it is only read."""


class Status(StrEnum):
    """The result of verifying a candidate, in one word."""

    CORRECT = "correct"
    INCORRECT = "incorrect"
    COMPILE_ERROR = "compile_error"
    RUNTIME_ERROR = "runtime_error"
    TIMEOUT = "timeout"
    NO_CODE = "no_code"
    REJECTED = "rejected"
    TASK_ERROR = "task_error"


class Reason(StrEnum):
    """Why a verdict has its status. A closed vocabulary: each reason belongs to one status."""

    OK = "ok"
    """Every check passed."""

    WRONG_OUTPUT = "wrong_output"
    """Values differ from the expected ones beyond the tolerance."""
    APPROXIMATION = "approximation"
    """Computes another formula, whose values are within KernelBench's tolerance of 1e-4."""
    WRONG_SHAPE = "wrong_shape"
    """An output has another shape or structure, or is not a tensor."""
    WRONG_DTYPE = "wrong_dtype"
    """An output has another dtype than the reference's."""
    WRONG_DEVICE = "wrong_device"
    """An output is on another device than the reference's."""
    NON_FINITE = "non_finite"
    """NaN or infinities where the reference has none, or the reverse."""
    NON_DETERMINISTIC = "non_deterministic"
    """Repeated calls give different bits, and nothing in the code explains it."""
    STALE_WEIGHTS = "stale_weights"
    """Correct only for the weights with which the module was constructed."""
    SHAPE_SPECIALISED = "shape_specialised"
    """Correct only for the shape that the task declares."""
    MEMORY_ERROR = "memory_error"
    """Reads or writes outside of its memory, by a sanitizer: what it answers is chance."""
    WRONG_GRADIENT = "wrong_gradient"
    """The outputs are right, and a gradient that the task asks for is not."""

    NO_CUSTOM_KERNEL = "no_custom_kernel"
    """The custom kernel is absent, never called, or does not affect the output."""
    INPUT_MUTATED = "input_mutated"
    """Changes its inputs in place where the reference does not."""
    OUTPUT_ALIASED = "output_aliased"
    """A later call overwrites the output of an earlier one."""
    INPUT_INDEPENDENT = "input_independent"
    """Returns the same answer for different inputs."""
    STALE_CACHE = "stale_cache"
    """Returns the answer of an earlier call for new inputs."""
    LAZY_OUTPUT = "lazy_output"
    """Returns a tensor subclass, which can compute when it is read."""
    STREAM_ESCAPE = "stream_escape"
    """Works on another CUDA stream, which the current one does not wait for."""
    BACKGROUND_WORK = "background_work"
    """Continues to compute after the call has returned."""
    GLOBAL_STATE_CHANGED = "global_state_changed"
    """Leaves process-wide settings of torch or CUDA changed."""
    PRECISION_DOWNCAST = "precision_downcast"
    """Computes an fp32 task in fp16, bf16 or TF32."""
    HARNESS_TAMPERING = "harness_tampering"
    """Replaces functions of torch or Python, or imports this package."""
    FORBIDDEN_CALL = "forbidden_call"
    """Calls what no kernel needs: processes, sockets, tracing, loading libraries."""
    IMPLAUSIBLE_TIME = "implausible_time"
    """Reports less time than the parent's clock or the memory bandwidth allows."""

    NO_MODULE = "no_module"
    """Imports a module that is not installed."""
    SYNTAX_ERROR = "syntax_error"
    """Is not valid Python."""
    BUILD_FAILED = "build_failed"
    """The compiler or the linker refused the sources."""
    UNDEFINED_SYMBOL = "undefined_symbol"
    """The built library refers to a symbol that nothing defines."""

    EXCEPTION = "exception"
    """The module, its constructor or a call raised an exception."""
    CUDA_ERROR = "cuda_error"
    """CUDA reported an error, such as an illegal memory access."""
    OUT_OF_MEMORY = "out_of_memory"
    """Host or device memory ran out, or the limit of a child was exceeded."""
    CRASHED = "crashed"
    """The process died of a signal or exceeded a limit."""
    EXITED_EARLY = "exited_early"
    """The process ended by itself or broke the message protocol."""

    BUILD = "build"
    """A build exceeded its deadline."""
    LOAD = "load"
    """Import and construction exceeded their deadline."""
    RUN = "run"
    """A call exceeded its deadline."""

    NO_CODE_BLOCK = "no_code_block"
    """The response contains no complete module."""
    TRUNCATED = "truncated"
    """The response ended before its code was complete."""
    MISSING_MODEL_NEW = "missing_model_new"
    """The code defines no ModelNew."""

    REFERENCE_FAILED = "reference_failed"
    """The task's own program fails. This is not the candidate's fault."""
    DEGENERATE_TASK = "degenerate_task"
    """The task cannot distinguish right from wrong, for example because its output is constant."""

    @property
    def status(self) -> Status:
        return STATUS_OF[self]


_NAMES_BY_STATUS = {
    Status.CORRECT: """ok""",
    Status.INCORRECT: """wrong_output approximation wrong_shape wrong_dtype wrong_device non_finite
    non_deterministic stale_weights shape_specialised
    memory_error wrong_gradient""",
    Status.REJECTED: """no_custom_kernel input_mutated output_aliased input_independent
    stale_cache lazy_output stream_escape background_work global_state_changed precision_downcast
    harness_tampering forbidden_call implausible_time""",
    Status.COMPILE_ERROR: """no_module syntax_error build_failed undefined_symbol""",
    Status.RUNTIME_ERROR: """exception cuda_error out_of_memory crashed exited_early""",
    Status.TIMEOUT: """build load run""",
    Status.NO_CODE: """no_code_block truncated missing_model_new""",
    Status.TASK_ERROR: """reference_failed degenerate_task""",
}
REASONS: Mapping[Status, frozenset[Reason]] = {
    status: frozenset(map(Reason, names.split())) for status, names in _NAMES_BY_STATUS.items()
}
STATUS_OF: Mapping[Reason, Status] = {
    reason: status for status, reasons in REASONS.items() for reason in reasons
}


class Record(BaseModel):
    """Base of every record: immutable, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


UNWRITTEN: Any = Field(default=None, exclude_if=operator.not_)
"""Of a field that is not written where it says nothing: every hash over a record without it, and
every such record on disk, stays what it was."""


class KernelTask(Record):
    """A PyTorch reference program in KernelBench form.

    `code` defines the class named `entry_point`, `get_inputs()` (a list of arguments for `forward`)
    and `get_init_inputs()` (constructor arguments: a plain list, or KernelBook's `[args, kwargs]`,
    told apart by `init_form`). `level` is its difficulty and `family` the kind of its operators.
    """

    task_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    code: str = Field(min_length=1)
    entry_point: str = "Model"
    init_form: Literal["args", "args_kwargs"] = "args"
    source: str = "user"
    level: int | None = None
    family: str | None = UNWRITTEN


class SamplingParams(Record):
    """How a response was drawn. Part of the candidate's identity.

    What is None is not sent, and the server's own default holds: vLLM takes it from the model's
    `generation_config.json`. It is no part of an identity either.
    """

    temperature: NonNegativeFloat = 1.0
    """of the softmax that tokens are drawn from; 0 is greedy"""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """share of the probability that is drawn from"""
    max_tokens: PositiveInt = 16384
    """most tokens of a response, reasoning and answer together"""
    seed: int = 0
    """of the first sample; sample i is drawn with seed + i"""
    top_k: NonNegativeInt | None = None
    """draw from this many of the most likely tokens; 0: from all; null: not sent"""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """draw no token less likely than this share of the likeliest one; null: not sent"""
    repetition_penalty: PositiveFloat | None = None
    """above 1 makes tokens of the prompt and the response so far less likely; null: not sent"""

    @model_serializer(mode="wrap")
    def _without_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Keep an explicit None, which says that no default of a known model is wanted."""
        chosen = self.model_fields_set
        values: dict[str, object] = dump(self)
        return {name: x for name, x in values.items() if x is not None or name in chosen}

    @property
    def identity(self) -> dict[str, Any]:
        """What a hash may cover: the settings that are sent."""
        return self.model_dump(exclude_none=True)


class Candidate(Record):
    """One sampled response to a task, parsed.

    `code` is None exactly when `parse_reason` says why (a `no_code` reason). `reasoning_tokens`
    counts the text before `</think>` with the generator's own tokenizer; None: unknown.
    """

    candidate_id: str
    task_id: str
    language: Language
    generator: str
    sampling: SamplingParams = SamplingParams()
    sample_index: NonNegativeInt = 0
    prompt_hash: str = ""
    response: str = ""
    reasoning: str = ""
    answer: str = ""
    """what follows the reasoning, as the model wrote it; the code is taken from it"""
    code: str | None = None
    parse_reason: Reason | None = None
    reasoning_tokens: NonNegativeInt | None = None
    completion_tokens: NonNegativeInt | None = None
    finish_reason: str | None = None
    turn: PositiveInt = 1
    """1 answers the prompt of the task; a later one answers a follow-up on `parent`"""
    parent: str | None = None
    """candidate_id of the attempt that was followed up; None exactly at turn 1"""

    @field_validator("parse_reason", mode="before")
    @classmethod
    def _of_no_code(cls, value: object) -> object:
        known = sorted(reason.value for reason in REASONS[Status.NO_CODE])
        if value is not None and value not in known:
            raise ValueError(f"parse_reason {str(value)!r} is not one of {known}")
        return value

    @model_validator(mode="after")
    def _later_turns_have_parents(self) -> Candidate:
        if (self.turn == 1) != (self.parent is None):
            raise ValueError(
                "a candidate has a parent exactly where its turn is later than the first"
            )
        return self

    @model_validator(mode="after")
    def _code_or_reason(self) -> Candidate:
        if (self.code is None) == (self.parse_reason is None):
            raise ValueError("a candidate has either code or a parse_reason")
        return self


def stable_hash(value: Any) -> str:
    """Hex SHA-256 (first 32 digits) of a JSON-serialisable value; key order does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def candidate_id(
    task: KernelTask,
    generator: str,
    sampling: SamplingParams,
    sample_index: int,
    response: str,
    turn: int = 1,
    parent: str | None = None,
) -> str:
    """Identity of a candidate: hash(task code, generator, sampling parameters, sample index,
    response), after the first turn also of turn and parent.
    """
    later = [] if turn == 1 else [turn, parent]
    return stable_hash([task.code, generator, sampling.identity, sample_index, response, *later])


class CompiledBaseline(Record):
    """What a candidate is worth against the reference under torch.compile.

    `speedup` is the candidate's speedup over the eager reference divided by that of the compiled
    one; the arms of both 95 % intervals add in quadrature on the log scale. `reference_ms` =
    speedup x candidate_ms, in milliseconds per forward call. `unavailable_reason` says why there is
    no such time.
    """

    mode: str
    """torch.compile's mode"""
    reference_ms: PositiveFloat | None = None
    speedup: PositiveFloat | None = None
    speedup_lower: PositiveFloat | None = None
    speedup_upper: PositiveFloat | None = None
    graphs: PositiveInt | None = None
    """graphs that were compiled; more than one: it is broken by Python between"""
    compile_s: NonNegativeFloat | None = None
    """seconds that compiling took; 0 where an earlier candidate's was used"""
    unavailable_reason: str = ""

    @model_validator(mode="after")
    def _numbers_or_reason(self) -> CompiledBaseline:
        numbers = (self.reference_ms, self.speedup, self.speedup_lower, self.speedup_upper)
        if any(numbers) if self.unavailable_reason else None in numbers:
            raise ValueError(
                "a compiled baseline has either all of its numbers or a reason why there are none"
            )
        return self


class Timing(Record):
    """Paired, interleaved measurement of reference and candidate. All latencies are medians in
    milliseconds per forward call.

    `speedup` = reference_ms / candidate_ms; `speedup_lower` and `speedup_upper` bound it with 95 %
    confidence (percentile bootstrap over pairs of the ratio of medians, Efron and Tibshirani 1993,
    chapter 13).
    """

    reference_ms: PositiveFloat
    candidate_ms: PositiveFloat
    speedup: PositiveFloat
    speedup_lower: PositiveFloat
    speedup_upper: PositiveFloat
    pairs: PositiveInt
    calls_per_sample: PositiveInt
    clock_bound_ms: PositiveFloat | None = None
    """candidate's latency on unseen inputs by the parent's clock, which nobody can forge; None at
    level `screen`, which believes what is reported"""
    drift: float = 0.0
    """relative change of the reference's median, first to last third of the window"""
    throttled: bool | None = None
    """did the GPU report lowered clocks; None where it cannot say"""
    compiled: CompiledBaseline | None = UNWRITTEN
    """None where torch.compile was not asked for as a baseline"""


class Correctness(Record):
    """Errors against the oracle, worst over all trials. Relative errors are dimensionless."""

    trials: NonNegativeInt
    rms_error: float | None = None
    """max over trials of RMS(error) / RMS(oracle)"""
    reference_rms_error: float | None = None
    """the fp32 reference's own RMS error against the oracle"""
    max_error: float | None = None
    """max over elements of |error| / (|oracle| + RMS(oracle))"""
    kernelbench_1e4: bool | None = None
    """allclose(atol=1e-4, rtol=1e-4) against the reference, as KernelBench v0.1"""
    kernelbench_1e2: bool | None = None
    """allclose(atol=1e-2, rtol=1e-2) against the reference, as KernelBench v0"""
    oracle: Literal["float64", "float32"] | None = None


class Phases(Record):
    """Where `run_s` went: wall seconds with the device held. 0 for phases that were not reached."""

    reference_s: NonNegativeFloat = 0.0
    """loading the task and computing expected values; 0 where they were there"""
    load_s: NonNegativeFloat = 0.0
    """the candidate's import and constructor"""
    correctness_s: NonNegativeFloat = 0.0
    """compared calls, other shapes and modes"""
    attribution_s: NonNegativeFloat = 0.0
    """which kernel did the work, what is still running or was changed"""
    timing_s: NonNegativeFloat = 0.0
    """paired samples and the parent's clock bound"""


class Verdict(Record):
    """What verification says of one candidate: one status, one reason, a timing only when
    correct."""

    schema_version: int = VERDICT_SCHEMA_VERSION
    candidate_id: str
    task_id: str
    language: Language
    level: Level = "confirm"
    """how much of the protocol it passed: a `screen` verdict is confirmed before it is used"""
    status: Status
    reason: Reason
    detail: str = ""
    """one line for a person: what was seen"""
    timing: Timing | None = None
    correctness: Correctness | None = None
    outputs_match: bool | None = None
    """did every compared output match, whoever computed it"""
    custom_kernels: tuple[str, ...] = ()
    custom_kernel_time_share: float | None = Field(default=None, ge=0, le=1)
    library_calls: tuple[str, ...] = ()
    reference_operators: tuple[str, ...] = ()
    """compute operators the reference executes, in order"""
    precision_class: str | None = None
    flags: tuple[str, ...] = ()
    """what static screening noticed without rejecting"""
    build_tier: str | None = None
    build_cached: bool = False
    isolation: tuple[str, ...] = ()
    device: str = ""
    build_s: NonNegativeFloat = 0.0
    run_s: NonNegativeFloat = 0.0
    phases: Phases | None = None
    log_tail: str = ""

    @field_validator("level", mode="before")
    @classmethod
    def _unsaid(cls, level: object) -> object:
        """A table without this column holds verdicts of the whole protocol."""
        return "confirm" if level is None else level

    @model_validator(mode="after")
    def _legal(self) -> Verdict:
        if self.reason.status is not self.status:
            raise ValueError(f"reason {self.reason} does not belong to status {self.status}")
        if (self.timing is not None) and self.status is not Status.CORRECT:
            raise ValueError("only a correct candidate has a timing")
        return self

    @property
    def speedup(self) -> float:
        """Median reference time / median candidate time; 0 where not correct."""
        return self.timing.speedup if self.timing else 0.0

    @property
    def correct_any(self) -> bool:
        """First track: the outputs are right, with or without a custom kernel."""
        return self.status is Status.CORRECT or (
            self.reason is Reason.NO_CUSTOM_KERNEL and bool(self.outputs_match)
        )

    @property
    def correct_custom(self) -> bool:
        """Second track (what curation takes): correct with a custom kernel doing the work."""
        return self.status is Status.CORRECT
