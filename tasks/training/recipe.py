"""The training recipe: every number that decides the adapter, with its source. Every key is in a
run's fingerprint."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from kernels_eval.records import Record
from kernels_eval.rewards import RECIPES, RewardRecipe
from tasks.keys import UNKEYED, LeastShare

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FSDP2: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": True,
        "activation_checkpointing": False,
        # one process of a node reads the weights, the others get their share from it
        "cpu_ram_efficient_loading": True,
        # each process writes its part of the adapter and of the optimiser
        "state_dict_type": "SHARDED_STATE_DICT",
    },
}
"""transformers' settings for `parallelism: fsdp2`"""


class FixedSettings(Record):
    """What no profile changes of a training, each with where it comes from."""

    target_modules: tuple[str, ...] = PROJECTIONS
    """all seven projections of a layer, named so that no default of PEFT decides (ours; the paper
    names none)"""
    lr_schedule: str = "cosine"
    """cosine, as public reviews of the paper quote it"""
    warmup_share: float = 0.03
    """share of all steps spent warming up; 3 % is ours, the paper gives none"""
    weight_decay: float = 0.0
    """AdamW's; 0 is ours, the paper gives none"""
    max_grad_norm: float = 1.0
    """gradients are scaled down to this norm; 1 is transformers' default, the paper gives none"""


FIXED = FixedSettings()


class TrainingRecipe(Record):
    """How the curated set becomes a LoRA adapter. "Paper" is ConCuR, arXiv 2510.07356."""

    base_model: Annotated[str, Field(min_length=1)] = "small"
    """hub id, directory, or 'small' for the local demo model"""
    lora_rank: PositiveInt = 32
    """paper, training setup: r = 32 (a vLLM server needs --max-lora-rank 32) and alpha = 32: alpha
    is the rank, so that the adapter is scaled by alpha / r = 1"""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """paper, training setup: 0.05"""
    num_epochs: PositiveInt = 3
    """paper, training setup: 3 epochs"""
    learning_rate: PositiveFloat = 1e-4
    """peak, 1e-4 as public reviews of the paper quote it"""
    batch_size: PositiveInt = 1
    """rows per forward pass; long rows make 1 the safe default (ours)"""
    gradient_accumulation: PositiveInt = 8
    """forward passes per optimiser step, those of all workers together (ours): a multiple of
    workers, so that more workers take the same steps in less time"""
    workers: PositiveInt = 1
    """processes that train together: one per GPU, or per CPU core where there is no GPU"""
    parallelism: Literal["auto", "ddp", "fsdp2"] = "auto"
    """how several workers share the work. ddp: each holds the whole model; fsdp2: each holds
    its share of it, for models that do not fit on one device; auto: ddp where one GPU, with its
    share of main memory, holds the model and half of the layers' activations, else fsdp2"""
    max_length: Annotated[int, Field(ge=16)] | Literal["data"] = 16384
    """longest row trained on, prompt and completion, tokens; 'data': the longest of the set.
    Never more than the base model's window. A row above it is left out and listed, never truncated:
    a trace without its end teaches not to end. One H200 holds 16,384 at batch size 1 for a
    QwQ-32B-shaped model (92 GB measured)"""
    acceleration: Literal["auto", "off", "on"] = "auto"
    """compiled layers, dropout without state, activations that wait in main memory, and
    recomputation that spends the free memory (tasks.training.acceleration): on with a GPU, 1.6
    times TRL's FSDP2 at rows of 16,384 tokens (measured, two H200); off on a CPU, which gains
    nothing. Where it is off, a GPU recomputes all activations"""
    row_order: Literal["random", "balanced"] = "random"
    """which rows share an optimiser step. balanced: those of about the same length, so that several
    workers hardly wait for the longest; each completion token of an epoch then weighs the same,
    where with random each step does"""
    seed: NonNegativeInt = 0
    """adapter initialisation, order of rows, dropout"""
    held_out: NonNegativeFloat = 0.02
    """tasks held out of training, whose loss is measured each epoch: below 1 about this share of
    20 tasks or more, else so many; 0: none. 2 % (ours) costs about 1 % of the training time: four
    forward passes over it in three epochs"""
    checkpoint_every_steps: Annotated[PositiveInt, UNKEYED] = 20
    """optimiser steps between checkpoints; there is one at the end of each epoch too. For
    QwQ-32B one is 3.2 GB, and 20 steps of 8 rows are about ten minutes of one H200"""

    @model_validator(mode="after")
    def _fits_together(self) -> TrainingRecipe:
        if self.gradient_accumulation % self.workers:
            raise ValueError(
                f"gradient_accumulation {self.gradient_accumulation} cannot be shared among"
                f" {self.workers} workers: make it a multiple"
            )
        return self

    @property
    def rows_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation

    @property
    def passes_per_worker(self) -> int:
        return self.gradient_accumulation // self.workers

    @property
    def sharded(self) -> bool:
        """Whether each worker holds a share of the model (`auto` must be decided)."""
        return self.workers > 1 and self.parallelism == "fsdp2"

    def resolve(self, *, gpu: bool) -> TrainingRecipe:
        """The recipe with `acceleration: auto` decided for a machine with or without a GPU."""
        if self.acceleration != "auto":
            return self
        return self.model_copy(update={"acceleration": "on" if gpu else "off"})


class ReinforceRecipe(Record, allow_inf_nan=False):
    """How rewards change the adapter: GRPO (arXiv:2402.03300) on answers of the adapter itself."""

    reward: str = "concur"
    """what a verdict is worth: the name of a recipe, with its published numbers
    (kernels_eval.rewards)"""
    min_kernel_share: LeastShare = None
    """a correct kernel whose own kernels take less of its time earns what one without a custom
    kernel does"""
    steps: PositiveInt = 100
    """optimiser steps"""
    tasks_per_step: PositiveInt = 8
    """tasks that are answered for an optimiser step"""
    samples_per_task: Annotated[int, Field(ge=2)] = 8
    """answers to a task, which are compared with each other; Kevin (arXiv:2507.11948) takes 16"""
    batch_size: PositiveInt = 8
    """answers per forward pass"""
    learning_rate: PositiveFloat = 1e-5
    """TRL's 1e-6 is for all weights; for LoRA ten times as much is usual (ours)"""
    beta: NonNegativeFloat = 0.0
    """weight of the KL divergence from the adapter as it was; 0, as TRL has it, measures none"""
    temperature: PositiveFloat = 1.0
    """of the answers; 1 draws from the policy itself"""
    max_tokens: PositiveInt = 4096
    """most tokens of an answer"""
    turns: int = Field(default=1, ge=1, le=2, exclude_if=lambda turns: turns == 1)
    """2: an answer that fails is told its verdict and answers once more, which earns the reward
    (Kevin, arXiv:2507.11948, takes 8)"""
    vllm: Annotated[str, UNKEYED, Field(pattern="^(none|colocate|https?://.+)$")] = "none"
    """what writes the answers: none, the trainer itself; colocate, vLLM in its process on the same
    GPU; or the address of a `vllm serve` on GPUs of its own, such as http://127.0.0.1:8000,
    which gets the weights after each step"""
    seed: Annotated[int, Field(ge=0, lt=2**27)] = 0
    """order of tasks and answers"""

    @field_validator("reward")
    @classmethod
    def _is_known(cls, reward: str) -> str:
        if reward not in RECIPES:
            raise ValueError(f"there is no reward {reward!r}: rewards are {', '.join(RECIPES)}")
        return reward

    @model_validator(mode="after")
    def _fits_together(self) -> ReinforceRecipe:
        if self.answers_per_step % self.batch_size:
            raise ValueError(
                f"batch_size {self.batch_size} does not divide the {self.answers_per_step} answers"
                " of a step (tasks_per_step * samples_per_task)"
            )
        return self

    @property
    def rewarded(self) -> RewardRecipe:
        least = {"min_kernel_share": self.min_kernel_share}
        return RECIPES[self.reward].model_copy(update=least)

    @property
    def answers_per_step(self) -> int:
        return self.tasks_per_step * self.samples_per_task
