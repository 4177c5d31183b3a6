"""LoRA training of a base model on curated rows with TRL's SFTTrainer and PEFT, in this process or
as one of several that train together.

Guarantees: held-out tasks are never trained on; loss on the whole completion (reasoning, answer,
end token) and nowhere else, checked against what TRL really prepared before the first step; a
second call in the same `out_dir` with the same rows and recipe goes on from the newest whole
checkpoint and, on a CPU, ends with the same losses and the same bytes of the adapter as a run that
was never interrupted, wherever it was killed; every number that the recipe names is what TRL and
PEFT get. Does not guarantee bit-equal adapters on a GPU or for another number of workers, nor that
a better loss means better kernels: the benchmark says that. `launch` starts the processes,
`checkpoints` keeps what a run goes on from, `faults` says what went wrong.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, ConfigDict, Field

from kernels_eval.errors import EvalError, UsageError
from tasks.sources.small_model import load_causal_model, load_tokenizer, quiet_progress
from tasks.training import evaluation, telemetry
from tasks.training.checkpoints import (
    HISTORY_FIELDS,
    KEPT,
    OnLog,
    RunIdentity,
    agreed,
    checkpoint_step,
    newest_checkpoint,
    save_adapter,
    watch,
)
from tasks.training.faults import explain, require_projections
from tasks.training.formatting import Dropped, label_mask, select_examples, to_prompt_completion
from tasks.training.recipe import TrainingRecipe

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import nn
    from transformers import TrainerCallback
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

CHECKED_ROWS = 8
PADDED_TO = 128
"""A packed line's length is a multiple of so many tokens: lines of like length share compiled
code."""

RenderPrompt = Callable[[Mapping[str, Any]], str]


class TrainingResult(BaseModel):
    """What one training run did. Losses are mean cross-entropy per completion token, nats."""

    model_config = ConfigDict(frozen=True)

    adapter_dir: Path
    history: tuple[dict[str, float], ...] = Field(
        description=(
            "one entry per optimiser step: step, epoch, loss, learning_rate, grad_norm, num_tokens"
            " (seen so far)"
        )
    )
    loss_first: float = Field(description="mean loss over the steps of the first epoch")
    loss_last: float = Field(
        description=(
            "mean loss over the steps of the last epoch: the same rows as the first, so the two"
            " compare"
        )
    )
    steps: int
    tokens: int = Field(description="tokens seen, prompts included, padding not, over all epochs")
    seconds: float = Field(
        description="wall time of this call alone; a resumed run reports only its own share"
    )
    rows: int = Field(description="rows trained on")
    max_length: int = Field(default=0, description="the longest row that was allowed, tokens")
    workers: int = Field(default=1, description="processes that trained together")
    held_out: tuple[evaluation.HeldOutLoss, ...] = Field(
        default=(), description="loss on held-out tasks, before the first step and each epoch"
    )
    held_out_rows: int = 0
    held_out_tasks: int = 0
    stopped_early: bool = Field(
        default=False,
        description="the held-out loss had not fallen for as many epochs as the recipe waits",
    )
    telemetry: tuple[dict[str, float | None], ...] = Field(
        default=(), description="`step` and telemetry.COLUMNS of each step of this machine"
    )
    batches: dict[str, float] = Field(
        default={},
        description=(
            "rows and real tokens of an optimiser step, and padding_waste, of the first epoch"
        ),
    )
    resumed_from_step: int = Field(
        default=0, description="0 where training started from the beginning"
    )
    dropped: tuple[Dropped, ...] = ()

    @property
    def dropped_ids(self) -> tuple[str, ...]:
        return tuple(row.candidate_id for row in self.dropped)


def train(
    rows: Sequence[Mapping[str, Any]],
    recipe: TrainingRecipe,
    base_model_dir: str | Path,
    out_dir: Path,
    render_prompt: RenderPrompt,
    on_log: OnLog | None = None,
) -> TrainingResult:
    """Train an adapter on rows of `tasks.tables.CURATED` and save it to `out_dir/adapter`;
    checkpoints go to `out_dir/checkpoints`.

    For a recipe with several workers each of them calls this, started by `launch.train_on_ray` (or
    torchrun). `on_log` gets one dict per optimiser step as it happens, in the first of them. Raises
    UsageError for rows or models that cannot be used, for checkpoints of another run and for a
    device that is too small (with the numbers), EvalError for anything that breaks while training:
    calling again resumes.
    """
    started = time.monotonic()
    out_dir = Path(out_dir)
    device = _device(recipe)
    recipe = recipe.resolve(gpu=device == "cuda")
    tokenizer = load_tokenizer(base_model_dir)
    split = evaluation.split_by_task(rows, recipe.evaluation)
    examples = to_prompt_completion(split.training, tokenizer, render_prompt)
    max_length = _longest_allowed(recipe, examples, base_model_dir)
    examples, dropped = select_examples(
        examples, tokenizer, max_length=max_length, overlong=recipe.overlong
    )
    held_out = _held_out_examples(split.held_out, tokenizer, render_prompt, max_length)
    identity = RunIdentity.of(recipe, base_model_dir, examples)
    checkpoint = newest_checkpoint(out_dir / "checkpoints", identity)
    try:
        with quiet_progress(), warnings.catch_warnings():
            # transformers renames the option; TRL and PEFT still read the old name, which holds
            # until transformers 6
            warnings.filterwarnings(
                "ignore", message=".*gradient_checkpointing.* is deprecated", category=FutureWarning
            )
            callback = watch(identity, recipe.checkpoint_every_steps, on_log)
            trainer = _build_trainer(
                examples,
                recipe,
                base_model_dir,
                tokenizer,
                out_dir / "checkpoints",
                device,
                callback,
            )
            _check_labels(trainer, examples, tokenizer)
            batches = _use_accelerations(trainer, recipe, examples, max_length, tokenizer)
            telemetry.attach(trainer)
            evaluation.attach(
                trainer, held_out, tokenizer, patience_epochs=recipe.evaluation.patience_epochs
            )
            checkpoint = agreed(checkpoint)
            if checkpoint and evaluation.stopped_at(checkpoint, recipe.evaluation.patience_epochs):
                trainer.args.max_steps = checkpoint_step(
                    checkpoint
                )  # it had stopped there, and only its adapter was not saved
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            adapter_dir = save_adapter(trainer, out_dir / "adapter")
    except EvalError:
        raise
    except Exception as error:
        raise explain(error, recipe, examples, device, out_dir) from error
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    history = tuple({name: entry[name] for name in HISTORY_FIELDS} for entry in steps)
    first, last = _epoch_losses(history)
    losses = evaluation.losses_of(trainer.state.log_history)
    return TrainingResult(
        adapter_dir=adapter_dir,
        history=history,
        loss_first=first,
        loss_last=last,
        steps=trainer.state.global_step,
        tokens=int(history[-1]["num_tokens"]),
        seconds=time.monotonic() - started,
        rows=len(examples),
        max_length=max_length,
        workers=recipe.workers,
        held_out=losses,
        held_out_rows=len(held_out),
        held_out_tasks=len({row["task_id"] for row in split.held_out}),
        stopped_early=evaluation.stopped(losses, recipe.evaluation.patience_epochs),
        telemetry=tuple({"step": entry["step"], **telemetry.columns_of(entry)} for entry in steps),
        batches=batches,
        resumed_from_step=checkpoint_step(checkpoint),
        dropped=tuple(dropped),
    )


def adapter_changes_output(base_model_dir: str | Path, adapter_dir: Path, prompt: str) -> float:
    """Largest absolute difference between the logits of the base model and of the same with the
    adapter, over all positions of `prompt`.

    Both are loaded from disk, in float32. 0 means that the adapter does nothing. Raises UsageError
    where either cannot be loaded.
    """
    import torch

    encoded = load_tokenizer(base_model_dir)(prompt, return_tensors="pt", add_special_tokens=False)
    with torch.inference_mode():
        logits = []
        for adapter in (None, adapter_dir):
            model = load_causal_model(base_model_dir, dtype=torch.float32, adapter=adapter)
            logits.append(model(**encoded).logits)
    return float((logits[0] - logits[1]).abs().max())


# -- one run ---------------------------------------------------------------------------------------


def _device(recipe: TrainingRecipe) -> str:
    """ "cuda" or "cpu". Raises UsageError where this process is not one of as many as the recipe
    says, and where it is alone and sees several GPUs: transformers would spread each batch over
    them with nn.DataParallel."""
    import torch

    together = int(os.environ.get("WORLD_SIZE", "1"))
    if together != recipe.workers:
        raise UsageError(
            f"the recipe trains with {recipe.workers} workers, and {together} were started",
            "call tasks.training.launch.train_on_ray, which starts them, or set workers",
        )
    if not torch.cuda.is_available():
        return "cpu"
    if together == 1 and torch.cuda.device_count() > 1:
        raise UsageError(
            f"{torch.cuda.device_count()} GPUs are visible and training uses one",
            "call tasks.training.launch.train_on_ray, or set CUDA_VISIBLE_DEVICES to one GPU",
        )
    return "cuda"


def _longest_allowed(
    recipe: TrainingRecipe, examples: Sequence[Mapping[str, Any]], base_model_dir: str | Path
) -> int:
    """Tokens. The recipe's limit, or the longest row for 'data'; never more than the positions that
    the base model was made for."""
    from transformers import AutoConfig

    longest = max(
        (example["prompt_tokens"] + example["completion_tokens"] for example in examples), default=0
    )
    limit = longest if recipe.max_length == "data" else recipe.max_length
    try:
        config = AutoConfig.from_pretrained(str(base_model_dir))
    except (OSError, ValueError):  # a model without one is told when it is loaded
        return limit
    return min(limit, getattr(config.get_text_config(), "max_position_embeddings", None) or limit)


def _build_trainer(
    examples: Sequence[Mapping[str, Any]],
    recipe: TrainingRecipe,
    base_model_dir: str | Path,
    tokenizer: Any,
    checkpoints: Path,
    device: str,
    callback: TrainerCallback,
) -> SFTTrainer:
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl.trainer.sft_trainer import SFTTrainer

    args = _sft_config(
        recipe, checkpoints, device
    )  # starts the process group, which loading for fsdp2 asks for its rank
    if recipe.parallelism == "fsdp2":
        from accelerate.utils import enable_fsdp_ram_efficient_loading

        # the first process of a node reads the weights, the others none
        enable_fsdp_ram_efficient_loading()
    model = load_causal_model(
        base_model_dir, dtype=torch.bfloat16 if recipe.bf16 else torch.float32
    )
    require_projections(model, recipe)
    rows = Dataset.from_list(
        [{side: example[side] for side in ("prompt", "completion")} for example in examples]
    )
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=_lora_config(recipe),
        callbacks=[callback],
    )
    trainer.remove_callback(
        PrinterCallback
    )  # it prints every log entry to stdout where progress bars are off
    return trainer


def _held_out_examples(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, render_prompt: RenderPrompt, max_length: int
) -> list[dict[str, Any]]:
    """Held-out rows as examples; those that could not be trained on either are left out."""
    if not rows:
        return []
    examples = to_prompt_completion(rows, tokenizer, render_prompt)
    try:
        return select_examples(examples, tokenizer, max_length=max_length, overlong="drop")[0]
    except UsageError:  # none is left
        return []


def _use_accelerations(
    trainer: SFTTrainer,
    recipe: TrainingRecipe,
    examples: Sequence[Mapping[str, Any]],
    max_length: int,
    tokenizer: Any,
) -> dict[str, float]:
    """What the recipe switches on, put into a trainer that is built and whose rows are checked.
    Returns what an optimiser step holds."""
    lengths = [example["prompt_tokens"] + example["completion_tokens"] for example in examples]
    budget = max_length if recipe.packing else max(lengths) * recipe.batch_size
    if recipe.acceleration == "on":
        from tasks.training.acceleration import accelerate

        acceleration = accelerate(
            cast("nn.Module", trainer.model),
            tokens=budget,
            seed=recipe.seed,
            rank=trainer.args.process_index,
        )
        trainer.add_callback(acceleration.callback())
    if not recipe.packing:
        return {
            "rows_mean": float(recipe.rows_per_step),
            "tokens_mean": recipe.rows_per_step * sum(lengths) / len(lengths),
        }
    from tasks.training.batching import plan_epochs
    from tasks.training.packing import use_lines

    plans = plan_epochs(
        lengths, token_budget=budget, epochs=recipe.num_epochs, seed=recipe.seed, multiple=PADDED_TO
    )
    use_lines(
        trainer,
        plans,
        token_budget=budget,
        multiple=PADDED_TO,
        pad_token=tokenizer.pad_token_id or 0,
    )
    return plans[0].effective_batch(recipe.gradient_accumulation) | {
        "padding_waste": plans[0].padding_waste
    }


def _lora_config(recipe: TrainingRecipe) -> LoraConfig:
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=list(recipe.target_modules),
        bias="none",
    )


def _sft_config(recipe: TrainingRecipe, checkpoints: Path, device: str) -> SFTConfig:
    from trl.trainer.sft_config import SFTConfig

    return SFTConfig(
        output_dir=str(checkpoints),
        num_train_epochs=recipe.num_epochs,
        per_device_train_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.passes_per_worker,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=recipe.lr_schedule,
        warmup_steps=recipe.warmup_share,  # below 1 it is a share of all steps
        optim="adamw_torch_fused",
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        bf16=bool(recipe.bf16),
        # rows above the recipe's max_length are already out: TRL must not truncate
        max_length=None,
        packing=False,
        completion_only_loss=True,
        # each completion token counts the same, on whichever worker it is
        average_tokens_across_devices=True,
        logging_steps=1,
        logging_nan_inf_filter=False,  # a loss that is no number shall be seen
        save_strategy="no",  # `checkpoints.watch` asks for them
        save_total_limit=KEPT,
        seed=recipe.seed,
        report_to="none",
        disable_tqdm=True,
        use_cpu=device == "cpu",
        dataloader_pin_memory=device == "cuda",
        **_sharding(recipe),
    )


def _sharding(recipe: TrainingRecipe) -> dict[str, Any]:
    if recipe.parallelism != "fsdp2":
        # each pass uses every trained parameter: looking for others takes time, and with
        # recomputation fails accelerated layers recompute by a plan of their own
        recomputed = bool(recipe.gradient_checkpointing) and recipe.acceleration == "off"
        return {"gradient_checkpointing": recomputed, "ddp_find_unused_parameters": False}
    return {
        # transformers' and not FSDP's own: below that one accelerate and PEFT restore no adapter
        # from a checkpoint, without a word
        "gradient_checkpointing": bool(recipe.gradient_checkpointing),
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": True,
            "activation_checkpointing": False,
            "cpu_ram_efficient_loading": (
                True
            ),  # one process of a node reads the weights, the others get their share from it
            "state_dict_type": (
                "SHARDED_STATE_DICT"
            ),  # each process writes its part of the adapter and of the optimiser
        },
    }


def _check_labels(
    trainer: SFTTrainer, examples: Sequence[Mapping[str, Any]], tokenizer: Any
) -> None:
    """TRL's own dataset must hold our tokens and labels. Raises UsageError where it does not.

    Guards against what silently ruins such a set: a template applied twice, a tokenizer that merges
    tokens across the end of the prompt or adds its own, truncation.
    """
    rows = cast("Sequence[Mapping[str, Any]]", trainer.train_dataset)
    for example, prepared in zip(examples, rows, strict=True):
        if len(prepared["input_ids"]) != example["prompt_tokens"] + example["completion_tokens"]:
            raise _label_error(example)
    for example, prepared in zip(examples[:CHECKED_ROWS], rows, strict=False):
        mask = label_mask(example, tokenizer)
        expected = [
            token if carries else -100
            for token, carries in zip(mask.input_ids, mask.carries_loss, strict=True)
        ]
        if prepared["input_ids"] != mask.input_ids or prepared["labels"] != expected:
            raise _label_error(example)


def _label_error(example: Mapping[str, Any]) -> UsageError:
    return UsageError(
        f"TRL prepared row {example['candidate_id']} otherwise than prompt + completion with loss"
        " on the completion",
        "the base model's tokenizer adds or merges tokens where the prompt ends: use another base"
        " model, or mend its chat template",
    )


def _epoch_losses(history: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Mean loss of the first and of the last epoch. An entry's `epoch` is how many are done after
    its step, so the first ends at 1."""
    first = [entry["loss"] for entry in history if entry["epoch"] <= 1]
    last = [entry["loss"] for entry in history if entry["epoch"] > history[-1]["epoch"] - 1]
    return sum(first) / len(first), sum(last) / len(last)
