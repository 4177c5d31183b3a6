"""How candidates are made."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from kernels_eval.extensions import require_known
from kernels_eval.records import Record, SamplingParams
from tasks.keys import UNKEYED
from tasks.synthesis.known_models import sampling_for

GROUP = "concur.samplers"
BUILT_IN = ("recorded", "transformers", "openai", "agent", "vllm")


class ServerConfig(Record, coerce_numbers_to_str=True):
    """The vLLM server that concur starts for `sampler: vllm`. Where a default is null, it is
    derived.

    `args` holds numbers in YAML. They alone decide what is generated: the others may change without
    a response being asked for again.
    """

    command: str | None = None
    """what starts vLLM, such as '/opt/vllm/bin/vllm serve'; the model and its options follow. null:
    the vLLM of the interpreter $CONCUR_VLLM_PYTHON, else vllm on PATH"""
    tensor_parallel: PositiveInt | None = None
    """GPUs of one replica; null: as many as write most, computed"""
    replicas: PositiveInt | None = None
    """copies of the model (data parallel); null: as many as the GPUs of this machine hold"""
    args: tuple[str, ...] = ()
    """further arguments of vllm serve; they win over those that are derived"""


class SynthesisConfig(Record):
    """The generator and its settings. Default: the recorded responses that ship with concur."""

    sampler: str = "recorded"
    """recorded responses, transformers (a model in this process), openai (a compatible endpoint),
    agent (one with tools, docs/how-to/agents.md), vllm (a server that concur starts), or the name
    of an extension (docs/how-to/extend.md)"""
    model: str | None = None
    """model name at the endpoint, hub id or directory; 'small' is the local demo model"""
    responses: str | None = None
    """recorded: a table of responses (docs/how-to/import.md) instead of the bundled ones"""
    base_url: str | None = None
    """endpoint of openai, such as http://127.0.0.1:8000/v1; $OPENAI_API_KEY holds its key"""
    tokenizer: str | None = None
    """the generator's tokenizer (directory or hub id), for reasoning lengths; 'small' for the
    demo's. null: the model's own; of an endpoint what its usage counts as reasoning, else the
    reasoning's share, by characters, of the tokens that it counts"""
    samples_per_task: PositiveInt = 5
    """candidates per task; the paper's section 3 has five"""
    sampling: SamplingParams = Field(default=SamplingParams(), validate_default=True)
    """sampling parameters; those not set are the model's own, if known"""
    hardware: str | None = None
    """one line on the target hardware for the prompt"""
    concurrency: Annotated[PositiveInt, UNKEYED] = 64
    """openai: requests in flight"""
    turns: Annotated[int, UNKEYED] = Field(default=1, ge=1, le=8)
    """answers per sample: above 1, failed kernels are sent back to the model with feedback"""
    refine_below_speedup: NonNegativeFloat = 1.0
    """turns: also follow up correct kernels if the lower bound (95 %) of the speedup is at most
    this; 0: never"""
    profiles: Literal["shown", "withheld"] = "withheld"
    """turns: whether a follow-up of a correct kernel says what limits it (and correct kernels are
    profiled); withheld is its control, with the same turns"""
    adapter: Annotated[str | None, UNKEYED] = None
    """vllm, transformers: directory of a LoRA adapter of the model to sample from; its content is
    part of what is asked"""
    server: Annotated[ServerConfig, UNKEYED] = ServerConfig()
    options: dict[str, Any] = {}
    """settings of an agent or an extension, by the names it documents"""

    @property
    def counts_by_usage(self) -> bool:
        return self.sampler in ("openai", "agent") and not self.tokenizer

    @field_validator("sampler")
    @classmethod
    def _is_known(cls, sampler: str) -> str:
        return require_known(GROUP, sampler, BUILT_IN)

    @field_validator("sampling")
    @classmethod
    def _as_the_model_wants(cls, sampling: SamplingParams, info: ValidationInfo) -> SamplingParams:
        """Recorded responses were drawn long ago: no model's settings apply."""
        return (
            sampling
            if info.data.get("sampler") == "recorded"
            else sampling_for(info.data.get("model"), sampling)
        )

    @field_validator("turns")
    @classmethod
    def _recordings_have_one_turn(cls, turns: int, info: ValidationInfo) -> int:
        if turns > 1 and info.data.get("sampler") == "recorded":
            raise ValueError(
                "recorded responses hold no answer to a follow-up: set synthesis.sampler to a"
                " model, or turns to 1"
            )
        return turns
