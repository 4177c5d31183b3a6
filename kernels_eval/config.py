"""Every number of the verification protocol, resolved once. VERIFIER numbers are the defaults; docs
say where each comes from."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from kernels_eval.extensions import require_known
from kernels_eval.records import Record, Sparing

TRANSFORMS = "concur.build_transforms"
Baseline = Literal["eager", "compile"]
SanitizerTool = Literal["memcheck", "racecheck", "initcheck", "synccheck"]
Architecture = Annotated[str, Field(pattern=r"^sm_\d{2,3}[af]?$")]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


class BuildConfig(Record):
    """How candidates are compiled."""

    timeout_s: PositiveFloat = 120
    """deadline of one build with one header tier, in processor time and sleep; ten times as long by
    the clock"""
    capture_timeout_s: PositiveFloat = 30
    """the same for reading the build requests out of the candidate's module"""
    cuda_arch: str | None = None
    """such as '9.0'; default: that of the GPU, else 9.0"""
    lite_headers: bool = True
    """try the lite header tier first; the verdict does not depend on it"""
    architectures: tuple[Architecture, ...] = Field(default=(), exclude_if=lambda asked: not asked)
    """compile CUDA candidates for these as well, such as sm_80, and note what comes of it; the
    verdict does not depend on it"""
    transforms: tuple[str, ...] = Field(default=(), exclude_if=lambda asked: not asked)
    """what changes libraries once they are linked, in this order: extensions by their names
    (docs/how-to/extend.md)"""

    @field_validator("transforms")
    @classmethod
    def _are_known(cls, transforms: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(require_known(TRANSFORMS, name, ()) for name in transforms)


class CorrectnessConfig(Record):
    """What counts as the same answer; the gates are in kernels_eval.model.correctness."""

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
    reruns: NonNegativeInt = 3
    """how often the first call is repeated on the same inputs, looking for other bits"""


class TimingConfig(Sparing):
    """Paired, interleaved measurement.

    Attributes:
        bootstrap: resamples of the interval of a speedup
    """

    min_pairs: int = Field(default=50, ge=2)
    """ABBA half-pairs at least"""
    min_side_s: NonNegativeFloat = 0.2
    """seconds of samples on each side at least"""
    max_s: PositiveFloat = 20.0
    """budget of one measurement, both sides together; half as much again for a third"""
    interval_width: PositiveFloat = 0.02
    """stop when the 95 % interval of log(ratio) is within +- this"""
    precise_s: PositiveFloat = 0.2
    """budget of a measurement whose interval is narrow enough by then, though it has fewer pairs
    than min_pairs (20 at least)"""
    sample_us: PositiveFloat = 2000
    """calls are batched until a sample lasts this long; asking for one and flushing caches costs
    0.5 ms beside it"""
    bootstrap: int = Field(default=2000, ge=100)
    process_spread: NonNegativeFloat = 0.01
    """standard deviation of log(speedup) between processes, which no sample of one process shows;
    measured: median 0.007"""
    baselines: tuple[Baseline, ...] = ("eager",)
    """what a candidate is timed against; 'compile' adds the reference under torch.compile to the
    window"""
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
        """The verdict's own speedup is against eager PyTorch, so that baseline is always there; the
        order means nothing."""
        if "eager" not in value:
            raise ValueError(
                "'eager' must be among the baselines: ('eager',) or ('eager', 'compile')"
            )
        return ("eager", "compile") if "compile" in value else ("eager",)

    def _says(self, name: str, value: object) -> bool:
        return self.compiles or name not in ("baselines", "compile_mode", "compile_s")


class LimitsConfig(Record):
    """What one candidate may use.

    Attributes:
        load_s: deadline of importing a candidate and constructing its module
    """

    load_s: PositiveFloat = 30
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


class EvalConfig(Sparing):
    """The whole protocol of one verification. Part of every verdict's key."""

    build: BuildConfig = BuildConfig()
    correctness: CorrectnessConfig = CorrectnessConfig()
    timing: TimingConfig = TimingConfig()
    limits: LimitsConfig = LimitsConfig()
    threads: PositiveInt = 1
    """CPU threads for reference and candidate alike"""
    time_correct: bool = True
    """off: correctness only"""
    sanitizer: Literal["off", "curated", "correct"] = "off"
    """CUDA candidates that compute-sanitizer checks: none, those that are certainly faster than
    the reference (`speedup_lower` above 1), or every correct one"""
    sanitizer_tools: tuple[SanitizerTool, ...] = get_args(SanitizerTool)
    """each runs separately"""
    sanitizer_finding: Literal["flag", "refuse"] = "flag"
    """what errors that a tool counts are: a flag, or `cuda_error` (`non_deterministic` for a
    race)"""
    sanitizer_s: PositiveFloat = 120
    """deadline of one tool; past it the flag says `not_run`"""

    def _says(self, name: str, value: object) -> bool:
        return self.sanitizer != "off" or not name.startswith("sanitizer")
