"""How candidates are made."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from kernels_eval.records import SamplingParams


class SynthesisConfig(BaseModel):
    """The generator and how it is asked. Defaults: the recorded responses that ship with concur."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sampler: Literal["recorded", "transformers", "openai"] = "recorded"
    model: str | None = Field(default=None, description="model name at the endpoint, hub id or directory; 'small' is the local demo model")
    responses: str | None = Field(default=None, description="recorded: a Parquet file of responses instead of the bundled ones")
    base_url: str | None = Field(default=None, description="openai: the endpoint, such as http://127.0.0.1:8000/v1")
    api_key_env: str = Field(default="OPENAI_API_KEY", description="environment variable that holds the key; never logged")
    tokenizer: str | None = Field(
        default=None, description="the generator's tokenizer (directory or hub id), for reasoning lengths; 'small' for the demo's"
    )
    samples_per_task: int = Field(default=5, ge=1, description="paper section 3: five candidates a task")
    sampling: SamplingParams = SamplingParams()
    hardware: str | None = Field(default=None, description="one line on the target hardware for the prompt")
    concurrency: int = Field(default=64, ge=1, description="openai: requests in flight")
