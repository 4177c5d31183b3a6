"""Every number of the verification protocol, resolved once. VERIFIER numbers are the defaults; docs
say where each comes from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
)

Baseline = Literal["eager", "compile"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BuildConfig(_Config):
    """How candidates are compiled."""

    timeout_s: float = Field(
        default=120, gt=0, description="deadline of one build with one header tier"
    )
    capture_timeout_s: float = Field(
        default=30,
        gt=0,
        description="deadline for reading the build requests out of the candidate's module",
    )
    cuda_arch: str | None = Field(
        default=None, description="e.g. '9.0'; default: the GPU that is there, else 9.0"
    )
    lite_headers: bool = Field(
        default=True,
        description="try the lite header tier first; the verdict does not depend on it",
    )


class CorrectnessConfig(_Config):
    """What counts as the same answer. Relative errors against a float64 oracle.

    Attributes:
        rms_fp32: gate for fp32 tasks, RMS(error) / RMS(oracle)
        rms_bf16: gate for bf16 tasks
    """

    distributions: tuple[str, ...] = Field(
        default=("declared", "uniform", "normal", "normal_x10", "sparse", "small_integers"),
        description=(
            "input distributions, one secret seed each; 'declared' is what the task's own"
            " get_inputs() draws"
        ),
    )
    rms_fp32: float = Field(default=1e-5, gt=0)
    rms_reference_factor: float = Field(
        default=8,
        gt=0,
        description="the gate is never below this multiple of the fp32 reference's own error",
    )
    rms_half: float = Field(default=2e-3, gt=0, description="gate for fp16 and TF32 tasks")
    rms_bf16: float = Field(default=1.6e-2, gt=0)
    elementwise_fp32: float = Field(
        default=1e-4, gt=0, description="|err| <= r (|y| + RMS(y)) on every element"
    )
    shapes: Literal["require", "flag", "off"] = Field(
        default="require",
        description=(
            "other shapes that the task accepts: a silently wrong answer is shape_specialised"
            " (require) or only flagged (flag)"
        ),
    )
    reruns: int = Field(
        default=3,
        ge=0,
        description=(
            "how often the first call is repeated on the same inputs, looking for other bits"
        ),
    )
    expected_max_bytes: int = Field(
        default=16 << 30,
        gt=0,
        description=(
            "memory for expected values of one task; above it fewer distributions are tried"
        ),
    )
    oracle_max_bytes: int = Field(
        default=8 << 30, gt=0, description="above this estimate the oracle falls back to float32"
    )


class TimingConfig(_Config):
    """Paired, interleaved measurement.

    Attributes:
        bootstrap: resamples of the interval of a speedup
    """

    min_pairs: int = Field(default=50, ge=2, description="ABBA half-pairs at least")
    min_side_s: float = Field(
        default=0.2, ge=0, description="seconds of samples on each side at least"
    )
    max_s: float = Field(
        default=20.0,
        gt=0,
        description=(
            "budget of one measurement, both sides together; half as much again for a third"
        ),
    )
    interval_width: float = Field(
        default=0.02,
        gt=0,
        description="stop when the 95 % interval of log(ratio) is within +- this",
    )
    precise_s: float = Field(
        default=0.2,
        gt=0,
        description=(
            "budget of a measurement whose interval is narrow enough by then, though it has fewer"
            " pairs than min_pairs"
        ),
    )
    precise_pairs: int = Field(
        default=20, ge=4, description="fewest pairs that such a measurement rests on"
    )
    sample_us: float = Field(
        default=2000,
        gt=0,
        description=(
            "calls are batched until a sample lasts this long; asking for one and flushing caches"
            " costs 0.5 ms beside it"
        ),
    )
    bootstrap: int = Field(default=2000, ge=100)
    process_spread: float = Field(
        default=0.01,
        ge=0,
        description=(
            "standard deviation of log(speedup) between processes, which no sample of one process"
            " shows; measured: median 0.007"
        ),
    )
    clock_bound_share: float = Field(
        default=0.8,
        gt=0,
        lt=1,
        description="reported time below this share of the parent's clock is implausible",
    )
    bandwidth_share: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description=(
            "faster than this share of the time that its bytes need at peak bandwidth is"
            " implausible"
        ),
    )
    input_bytes: int = Field(
        default=256 << 20,
        gt=0,
        description="memory for the sets of inputs that timed calls rotate over, each side",
    )
    baselines: tuple[Baseline, ...] = Field(
        default=("eager",),
        description=(
            "what a candidate is timed against; 'compile' adds the reference under torch.compile to"
            " the window"
        ),
    )
    compile_mode: CompileMode = Field(default="default", description="torch.compile's mode")
    compile_s: float = Field(
        default=300,
        gt=0,
        description=(
            "deadline of compiling one task's reference, which no candidate's deadline counts"
        ),
    )

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

    @model_serializer(mode="wrap")
    def _as_it_was(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without a second baseline nothing about it is written: every hash over such a
        configuration stays what it was."""
        left_out = () if self.compiles else ("baselines", "compile_mode", "compile_s")
        return {name: value for name, value in dump(self).items() if name not in left_out}


class LimitsConfig(_Config):
    """What one candidate may use.

    Attributes:
        load_s: deadline of importing a candidate and constructing its module
    """

    load_s: float = Field(default=30, gt=0)
    run_s: float = Field(
        default=60, gt=0, description="deadline of one command: a call, or a sample of calls"
    )
    reference_s: float = Field(
        default=120, gt=0, description="deadline of one command to the reference"
    )
    memory_gb: float = Field(
        default=16,
        gt=0,
        description="resident memory of a child (host side), and never above 60 % of the machine's",
    )
    file_mb: int = Field(default=64, gt=0, description="largest file a child may write")
    scratch_mb: int = Field(default=512, gt=0, description="all files of a child together")
    cpu_s: int = Field(
        default=1800,
        gt=0,
        description="processor time of one process of a candidate, all its threads together",
    )
    processes: int = Field(
        default=64,
        gt=0,
        description="processes of a child, where its language may start any (Triton's compilers)",
    )
    threads: int = Field(
        default=512, gt=0, description="threads of a child and its processes together"
    )


class EvalConfig(_Config):
    """The whole protocol of one verification. Part of every verdict's key."""

    build: BuildConfig = BuildConfig()
    correctness: CorrectnessConfig = CorrectnessConfig()
    timing: TimingConfig = TimingConfig()
    limits: LimitsConfig = LimitsConfig()
    threads: int = Field(
        default=1, ge=1, description="CPU threads for reference and candidate alike"
    )
    time_correct: bool = Field(default=True, description="off: correctness only")
