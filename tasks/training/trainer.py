"""LoRA training of a base model on curated rows with TRL's SFTTrainer and PEFT, in this process or
as one of several that train together.

Guarantees: held-out tasks are never trained on; loss on the whole completion (reasoning, answer,
end token) and nowhere else, checked against what TRL really prepared before the first step; a
second call in the same `out_dir` with the same rows and recipe resumes from the newest whole
checkpoint and, on a CPU, ends with the same losses and the same bytes of the adapter as a run that
was never interrupted, wherever it was killed; every number that the recipe names is what TRL and
PEFT get. Does not guarantee bit-equal adapters on a GPU or for another number of workers, nor that
a better loss means better kernels: the benchmark says that. `launch` starts the processes,
`checkpoints` keeps what a run resumes from, `faults` explains errors.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, ConfigDict

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
from tasks.training.formatting import (
    Dropped,
    label_mask,
    select_examples,
    to_prompt_completion,
    tokens_of,
)
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
    """What one training run did. Losses are mean cross-entropy per completion token, nats.

    Attributes:
        history: one entry per optimiser step: step, epoch, loss, learning_rate, grad_norm,
            num_tokens (seen so far)
        loss_first: mean loss over the steps of the first epoch
        loss_last: mean loss over the steps of the last epoch: the same rows as the first, so the
            two compare
        tokens: tokens seen, prompts included, padding not, over all epochs
        seconds: wall time of this call alone; a resumed run reports only its own share
        rows: rows trained on
        max_length: the longest row that was allowed, tokens
        workers: processes that trained together
        held_out: loss on held-out tasks, before the first step and each epoch
        stopped_early: the held-out loss had not fallen for as many epochs as the recipe waits
        telemetry: `step` and telemetry.COLUMNS of each step of this machine
        batches: rows and real tokens of an optimiser step, and padding_waste, of the first epoch
        resumed_from_step: 0 where training started from the beginning
    """

    model_config = ConfigDict(frozen=True)

    adapter_dir: Path
    history: tuple[dict[str, float], ...]
    loss_first: float
    loss_last: float
    steps: int
    tokens: int
    seconds: float
    rows: int
    max_length: int = 0
    workers: int = 1
    held_out: tuple[evaluation.HeldOutLoss, ...] = ()
    held_out_rows: int = 0
    held_out_tasks: int = 0
    stopped_early: bool = False
    telemetry: tuple[dict[str, float | None], ...] = ()
    batches: dict[str, float] = {}
    resumed_from_step: int = 0
    dropped: tuple[Dropped, ...] = ()


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
    run = Run(recipe, base_model_dir, Path(out_dir), device, tokenizer, examples, max_length)
    identity = RunIdentity.of(recipe, base_model_dir, examples)
    checkpoint = newest_checkpoint(run.checkpoints, identity)
    patience = recipe.evaluation.patience_epochs
    try:
        with quiet_progress(), warnings.catch_warnings():
            # transformers renames the option; TRL and PEFT still read the old name, which holds
            # until transformers 6
            warnings.filterwarnings(
                "ignore", message=".*gradient_checkpointing.* is deprecated", category=FutureWarning
            )
            trainer = run.build(watch(identity, recipe.checkpoint_every_steps, on_log))
            run.check_labels(trainer)
            batches = run.use_accelerations(trainer)
            telemetry.attach(trainer)
            evaluation.attach(trainer, held_out, tokenizer, patience_epochs=patience)
            checkpoint = agreed(checkpoint)
            if checkpoint and evaluation.stopped_at(checkpoint, patience):
                # it had stopped there, and only its adapter was not saved
                trainer.args.max_steps = checkpoint_step(checkpoint)
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            adapter_dir = save_adapter(trainer, run.out_dir / "adapter")
    except EvalError:
        raise
    except Exception as error:
        raise explain(error, recipe, examples, device, run.out_dir) from error
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
        stopped_early=evaluation.stopped(losses, patience),
        telemetry=tuple({"step": entry["step"], **telemetry.columns_of(entry)} for entry in steps),
        batches=batches,
        resumed_from_step=checkpoint_step(checkpoint),
        dropped=tuple(dropped),
    )


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

    longest = max(map(tokens_of, examples), default=0)
    limit = longest if recipe.max_length == "data" else recipe.max_length
    try:
        config = AutoConfig.from_pretrained(str(base_model_dir))
    except (OSError, ValueError):  # a model without one is reported when it is loaded
        return limit
    return min(limit, getattr(config.get_text_config(), "max_position_embeddings", None) or limit)


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


@dataclass(frozen=True)
class Run:
    """One run: what the recipe says, resolved for this machine, and the rows it trains on."""

    recipe: TrainingRecipe
    base_model_dir: str | Path
    out_dir: Path
    device: str
    tokenizer: Any
    examples: Sequence[Mapping[str, Any]]
    max_length: int

    @property
    def checkpoints(self) -> Path:
        return self.out_dir / "checkpoints"

    def build(self, callback: TrainerCallback) -> SFTTrainer:
        """TRL's trainer with the base model, a new adapter and the rows."""
        import torch
        from datasets import Dataset
        from transformers import PrinterCallback
        from trl.trainer.sft_trainer import SFTTrainer

        # starts the process group, which loading for fsdp2 asks for its rank
        args = _sft_config(self.recipe, self.checkpoints, self.device)
        if self.recipe.parallelism == "fsdp2":
            from accelerate.utils import enable_fsdp_ram_efficient_loading

            # the first process of a node reads the weights, the others none
            enable_fsdp_ram_efficient_loading()
        dtype = torch.bfloat16 if self.recipe.bf16 else torch.float32
        model = load_causal_model(self.base_model_dir, dtype=dtype)
        require_projections(model, self.recipe)
        sides = ("prompt", "completion")
        trainer = SFTTrainer(
            model=model,
            args=args,
            train_dataset=Dataset.from_list(
                [{side: example[side] for side in sides} for example in self.examples]
            ),
            processing_class=self.tokenizer,
            peft_config=_lora_config(self.recipe),
            callbacks=[callback],
        )
        # it prints every log entry to stdout where progress bars are off
        trainer.remove_callback(PrinterCallback)
        return trainer

    def check_labels(self, trainer: SFTTrainer) -> None:
        """TRL's own dataset must hold our tokens and labels. Raises UsageError where it does not.

        Guards against what silently ruins such a set: a template applied twice, a tokenizer that
        merges tokens across the end of the prompt or adds its own, truncation.
        """
        rows = cast("Sequence[Mapping[str, Any]]", trainer.train_dataset)
        for number, (example, row) in enumerate(zip(self.examples, rows, strict=True)):
            same = len(row["input_ids"]) == tokens_of(example)
            if same and number < CHECKED_ROWS:
                mask = label_mask(example, self.tokenizer)
                same = (row["input_ids"], row["labels"]) == (mask.input_ids, mask.labels)
            if not same:
                raise UsageError(
                    f"TRL prepared row {example['candidate_id']} otherwise than prompt + completion"
                    " with loss on the completion",
                    "the base model's tokenizer adds or merges tokens where the prompt ends: use"
                    " another base model, or fix its chat template",
                )

    def use_accelerations(self, trainer: SFTTrainer) -> dict[str, float]:
        """Put what the recipe switches on into a trainer that is built and whose rows are checked.
        Returns what an optimiser step holds."""
        recipe, lengths = self.recipe, [tokens_of(example) for example in self.examples]
        budget = self.max_length if recipe.packing else max(lengths) * recipe.batch_size
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
            rows = recipe.rows_per_step
            return {"rows_mean": float(rows), "tokens_mean": rows * sum(lengths) / len(lengths)}
        from tasks.training.batching import plan_epochs
        from tasks.training.packing import use_lines

        width = {"token_budget": budget, "multiple": PADDED_TO}
        plans = plan_epochs(lengths, epochs=recipe.num_epochs, seed=recipe.seed, **width)
        use_lines(trainer, plans, pad_token=self.tokenizer.pad_token_id or 0, **width)
        held = plans[0].effective_batch(recipe.gradient_accumulation)
        return held | {"padding_waste": plans[0].padding_waste}


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
        # from a checkpoint, silently
        "gradient_checkpointing": bool(recipe.gradient_checkpointing),
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


def _epoch_losses(history: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Mean loss of the first and of the last epoch. An entry's `epoch` is how many are done after
    its step, so the first ends at 1."""
    first = [entry["loss"] for entry in history if entry["epoch"] <= 1]
    last = [entry["loss"] for entry in history if entry["epoch"] > history[-1]["epoch"] - 1]
    return sum(first) / len(first), sum(last) / len(last)
