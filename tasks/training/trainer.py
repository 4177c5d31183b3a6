"""LoRA training on curated rows with TRL's SFTTrainer and PEFT, in one or several processes.

Guarantees: held-out tasks are never trained on; loss on the completion only; a second call with the
same `out_dir`, rows and recipe resumes, bit-equal on a CPU. Slow to import.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainerState
from transformers.trainer_utils import IntervalStrategy
from trl.trainer.sft_trainer import SFTTrainer

from kernels_eval.errors import EvalError
from kernels_eval.profile import roofline
from tasks.models import (
    attention_of_any_length,
    load_causal_model,
    load_tokenizer,
    quiet_progress,
    renamed_option,
)
from tasks.training import checkpoints, telemetry
from tasks.training.acceleration.training import Accelerated, accelerate_training
from tasks.training.evaluation import split_by_task
from tasks.training.faults import explain, require_projections
from tasks.training.formatting import IGNORED, Example, Rows, examples_of, select_examples
from tasks.training.preparation import (
    held_out_examples,
    longest_allowed,
    training_device,
    with_parallelism,
)
from tasks.training.recipe import TrainingRecipe
from tasks.training.result import LEARNED, TrainingResult, training_log
from tasks.training.trainer_settings import lora_config, sft_config

OnLog = Callable[[dict[str, float]], None]


def train(
    rows: Rows,
    recipe: TrainingRecipe,
    base_model_dir: str | Path,
    out_dir: Path,
    on_log: OnLog | None = None,
) -> TrainingResult:
    """Train an adapter on rows of `tasks.tables.CURATED` with their `prompt`, into
    `out_dir/adapter`; `out_dir/checkpoints` is for these rows and this recipe alone.

    Each worker calls this. In the first, `on_log` gets a dict per optimiser step. Raises UsageError
    for unusable rows or models and too small a device, EvalError for other failures: calling again
    resumes.
    """
    started, out_dir = time.monotonic(), Path(out_dir)
    device = training_device(recipe)
    recipe = recipe.resolve(gpu=device == "cuda")
    tokenizer = load_tokenizer(base_model_dir)
    training, kept_out = split_by_task(rows, recipe.held_out)
    examples = examples_of(training, tokenizer)
    max_length = longest_allowed(recipe, examples, base_model_dir)
    examples, dropped = select_examples(examples, tokenizer, max_length)
    held_out = held_out_examples(kept_out, tokenizer, max_length)
    recipe, decided = with_parallelism(recipe, base_model_dir, max_length)
    try:
        with quiet_progress(), renamed_option():
            trainer = LoraTrainer(
                recipe, base_model_dir, out_dir, tokenizer, examples, held_out, on_log
            )
            accelerated = trainer.accelerate()
            checkpoint = checkpoints.agreed(checkpoints.newest_checkpoint(out_dir / "checkpoints"))
            # accelerated layers have attention of their own, without a mask
            attention = nullcontext() if recipe.acceleration == "on" else attention_of_any_length()
            with attention:
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            adapter_dir = checkpoints.save_adapter(trainer, out_dir / "adapter")
    except EvalError:
        raise
    except Exception as error:
        raise explain(error, recipe, examples, out_dir) from error
    log = training_log(trainer.state.log_history)
    steps = [row for row in log if row["step"]]
    return TrainingResult(
        adapter_dir=adapter_dir,
        log=tuple(log),
        # an entry's `epoch` is how many are done after its step, so the first ends at 1
        loss_first=fmean(row["loss"] for row in steps if row["epoch"] <= 1),
        loss_last=fmean(row["loss"] for row in steps if row["epoch"] > steps[-1]["epoch"] - 1),
        steps=trainer.state.global_step,
        tokens=int(steps[-1]["num_tokens"]),
        seconds=time.monotonic() - started,
        rows=len(examples),
        max_length=max_length,
        workers=recipe.workers,
        held_out_rows=len(held_out),
        held_out_tasks=len({row["task_id"] for row in kept_out}),
        batches=accelerated.batches,
        decided=decided | accelerated.decided,
        resumed_from_step=checkpoints.checkpoint_step(checkpoint),
        dropped=tuple(dropped),
    )


class LoraTrainer(SFTTrainer):
    """TRL's trainer with the recipe's settings and rows. Held-out rows are evaluated singly, so
    that they fit, without effect on the random state."""

    def __init__(
        self,
        recipe: TrainingRecipe,
        base_model_dir: str | Path,
        out_dir: Path,
        tokenizer: PreTrainedTokenizerBase,
        examples: Sequence[Example],
        held_out: Sequence[Example] = (),
        on_log: OnLog | None = None,
    ) -> None:
        # starts the process group, which loading for fsdp2 asks for its rank
        args = sft_config(recipe, out_dir / "checkpoints")
        if recipe.sharded:
            from accelerate.utils import enable_fsdp_ram_efficient_loading

            # the first process of a node reads the weights, the others none
            enable_fsdp_ram_efficient_loading()
        dtype = torch.bfloat16 if args.bf16 else torch.float32
        model = load_causal_model(base_model_dir, dtype=dtype)
        require_projections(model, recipe)
        super().__init__(
            model=model,
            args=args,
            train_dataset=_dataset(examples),
            processing_class=tokenizer,
            peft_config=lora_config(recipe),
            callbacks=[checkpoints.MarkWhole()],
        )
        # it prints every log entry to stdout where progress bars are off
        self.remove_callback(PrinterCallback)
        self.recipe, self.on_log = recipe, on_log
        self.lengths = [example.tokens for example in examples]
        self.tokens_with_loss = sum(example.completion_tokens for example in examples)
        loss_share = self.tokens_with_loss / sum(self.lengths)
        self.flops = telemetry.TrainingFlops.of(self.model, loss_share)
        self.flops_per_token = sum(map(self.flops.row, self.lengths)) / sum(self.lengths)
        self.began_s: float | None = None  # None: with the next pass
        self.tokens_before = 0.0
        self.tokens_seen = 0
        # a balanced step's loss is divided by what a mean step holds, not by what it holds itself
        self.tokens_per_step: float | None = None
        self.step_weight = 1.0
        if held_out:
            # transformers averages the losses of batches: weighed so, their mean is the mean over
            # tokens
            self.weight_per_token = len(held_out) / sum(each.completion_tokens for each in held_out)
            self.eval_dataset = _dataset(held_out)
            self.args.eval_strategy = IntervalStrategy.EPOCH

    def accelerate(self) -> Accelerated:
        accelerated = accelerate_training(
            self,
            self.lengths,
            self.flops.row,
            layers=self.recipe.acceleration == "on",
            balanced=self.recipe.row_order == "balanced",
        )
        if accelerated.step_share:
            self.tokens_per_step = self.tokens_with_loss * accelerated.step_share
        return accelerated

    def get_batch_samples(self, iterator: Any, count: int, device: Any) -> tuple[list[Any], Any]:
        untyped: Any = super()
        batches, tokens = untyped.get_batch_samples(map(self._once, iterator), count, device)
        held = torch.tensor(sum(map(_tokens_in, batches)), device=device)
        self.tokens_seen += int(self.accelerator.gather(held).sum())
        if self.tokens_per_step:
            self.step_weight = float(tokens) / self.tokens_per_step
            tokens = torch.full_like(tokens, self.tokens_per_step, dtype=torch.float32)
        return batches, tokens

    def _once(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Remove loss from rows that accelerate repeats to fill an epoch's last pass."""
        if self.accelerator.gradient_state.end_of_dataloader:
            args, rows = self.args, len(cast("Rows", self.train_dataset))
            split = args.per_device_train_batch_size, args.world_size, args.process_index
            batch["labels"][last_batch(rows, *split) :] = IGNORED
        return batch

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.args.eval_on_start = self.eval_dataset is not None and not resume_from_checkpoint
        if resume_from_checkpoint:
            state = TrainerState.load_from_json(f"{resume_from_checkpoint}/trainer_state.json")
            steps = [row for row in training_log(state.log_history) if row["loss"]]
            self.tokens_before = steps[-1]["num_tokens"]
            self.tokens_seen = int(self.tokens_before)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.began_s is None:
            self.began_s = time.perf_counter()
        untyped: Any = super()
        return untyped.training_step(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs["loss"] /= self.step_weight  # the mean over the step's own tokens
        super().log(logs, start_time)
        entry: dict[str, Any] = self.state.log_history[-1]
        if "loss" not in entry:  # an evaluation, or the summary at the end
            return
        now, tokens = time.perf_counter(), float(self.tokens_seen)
        speed = (tokens - self.tokens_before) / (now - (self.began_s or 0.0))
        peak = roofline.peak_flops(telemetry.device_name())
        used = telemetry.mfu(speed * self.flops_per_token, peak, self.args.world_size)
        # TRL leaves out workers in an epoch's last step, and counts from zero in each process
        entry |= {"num_tokens": tokens, "tokens_per_s": speed, "mfu": used}
        entry["memory_gb"] = telemetry.memory_gb()
        self.began_s, self.tokens_before = now, tokens
        if self.on_log and self.is_world_process_zero():
            self.on_log({name: entry[name] for name in LEARNED})

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        tokens = (inputs["labels"][..., 1:] != IGNORED).sum()
        loss, *rest = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return loss * tokens.to(loss.device) * self.weight_per_token, *rest

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        # a data loader draws a seed from the generator that dropout draws from
        with torch.random.fork_rng():
            found = super().evaluate(*args, **kwargs)
        self.began_s = None
        return found

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # an epoch's end is saved anyway: after what is evaluated then, which a resumed run must not
        # miss
        amid = not float(self.state.epoch or 0).is_integer()
        if amid and self.state.global_step % self.recipe.checkpoint_every_steps == 0:
            self.control.should_save = True
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        untyped: Any = super()
        untyped._save_checkpoint(*args, **kwargs)
        self.began_s = None


def _dataset(examples: Sequence[Example]) -> Dataset:
    return Dataset.from_dict(
        {
            "input_ids": [list(each.input_ids) for each in examples],
            "labels": [each.labels for each in examples],
        }
    )


def _tokens_in(batch: Mapping[str, torch.Tensor]) -> int:
    with_loss = (batch["labels"] != IGNORED).any(1, keepdim=True)
    return int((batch["attention_mask"] * with_loss).sum())


def last_batch(rows: int, size: int, workers: int, worker: int) -> int:
    """How many of `rows` are a worker's in an epoch's last pass, with batches of `size` dealt one
    to a worker; the rest repeats rows."""
    left = (rows - 1) % (size * workers) + 1
    return min(size, max(0, left - size * worker))
