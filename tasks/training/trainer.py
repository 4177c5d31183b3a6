"""LoRA training of a base model on curated rows with TRL's SFTTrainer and PEFT, in this process or
as one of several that train together.

Guarantees: held-out tasks are never trained on; loss on the whole completion (reasoning, answer,
end token) and nowhere else, checked against what TRL really prepared before the first step; a
second call in the same `out_dir` with the same rows and recipe resumes from the newest whole
checkpoint and, on a CPU, ends with the same losses and the same bytes of the adapter as a run that
was never interrupted, wherever it was killed; every number that the recipe names is what TRL and
PEFT get. Does not guarantee bit-equal adapters on a GPU or for another number of workers, nor that
a better loss means better kernels: the benchmark says that. `launch` starts the processes,
`preparation` decides what comes before the model, `checkpoints` keeps what a run resumes from,
`faults` explains errors. Importing it takes seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import psutil
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainerState
from transformers.trainer_utils import IntervalStrategy
from trl.trainer.sft_trainer import SFTTrainer

from kernels_eval.errors import EvalError, UsageError
from kernels_eval.profile import roofline
from tasks.sources.small_model import (
    load_causal_model,
    load_tokenizer,
    quiet_progress,
    renamed_option,
)
from tasks.training import checkpoints, telemetry
from tasks.training.acceleration import (
    Acceleration,
    accelerate_trainer,
    exchange_in_float32,
)
from tasks.training.batching import busy_share, last_batch
from tasks.training.evaluation import split_by_task, stopped
from tasks.training.faults import explain, require_projections
from tasks.training.formatting import (
    IGNORED,
    Rows,
    label_mask,
    select_examples,
    to_prompt_completion,
    tokens_of,
)
from tasks.training.preparation import (
    held_out_examples,
    longest_allowed,
    training_device,
    with_parallelism,
)
from tasks.training.recipe import TrainingRecipe
from tasks.training.result import HELD_OUT, LEARNED, TrainingResult, training_log
from tasks.training.trainer_settings import lora_config, sft_config

CHECKED_ROWS = 8
PADDED_TO = 128
"""A packed line's length is a multiple of so many tokens: lines of like length share compiled
code."""

OnLog = Callable[[dict[str, float]], None]


def train(
    rows: Rows,
    recipe: TrainingRecipe,
    base_model_dir: str | Path,
    out_dir: Path,
    on_log: OnLog | None = None,
) -> TrainingResult:
    """Train an adapter on rows of `tasks.tables.CURATED`, each with its `prompt`, and save it to
    `out_dir/adapter`; checkpoints go to `out_dir/checkpoints`.

    For a recipe with several workers each of them calls this, started by `launch.train_on_ray` (or
    torchrun). `on_log` gets one dict per optimiser step as it happens, in the first of them. Raises
    UsageError for rows or models that cannot be used, for checkpoints of another run and for a
    device that is too small (with the numbers), EvalError for anything that breaks while training:
    calling again resumes.
    """
    started, out_dir = time.monotonic(), Path(out_dir)
    device = training_device(recipe)
    recipe = recipe.resolve(gpu=device == "cuda")
    tokenizer = load_tokenizer(base_model_dir)
    training, kept_out = split_by_task(rows, recipe.evaluation)
    examples = to_prompt_completion(training, tokenizer)
    max_length = longest_allowed(recipe, examples, base_model_dir)
    examples, dropped = select_examples(
        examples, tokenizer, max_length=max_length, overlong=recipe.overlong
    )
    held_out = held_out_examples(kept_out, tokenizer, max_length)
    recipe, decided = with_parallelism(recipe, base_model_dir, max_length)
    identity = checkpoints.RunIdentity.of(recipe, base_model_dir, examples)
    checkpoint = checkpoints.newest_checkpoint(out_dir / "checkpoints", identity)
    try:
        with quiet_progress(), renamed_option():
            trainer = LoraTrainer(
                recipe, base_model_dir, out_dir, tokenizer, examples, held_out, on_log
            )
            trainer.check_labels()
            batches = trainer.use_accelerations(max_length)
            checkpoint = checkpoints.agreed(checkpoint)
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            adapter_dir = checkpoints.save_adapter(trainer, out_dir / "adapter")
    except EvalError:
        raise
    except Exception as error:
        raise explain(error, recipe, examples, device, out_dir) from error
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
        stopped_early=stopped(held_out_losses(log), recipe.evaluation.patience_epochs),
        batches=batches,
        decided=decided | trainer.decided,
        resumed_from_step=checkpoints.checkpoint_step(checkpoint),
        dropped=tuple(dropped),
    )


def held_out_losses(log: Rows) -> list[float]:
    """The losses on held-out tasks in rows of a training log, in order."""
    return [row[HELD_OUT] for row in log if row[HELD_OUT] is not None]


class LoraTrainer(SFTTrainer):
    """TRL's trainer with what the recipe says and the rows to train on (examples of `formatting`).

    Its log holds what each step took; time is that of the steps alone. Held-out rows are evaluated
    one at a time (they are few, and one row surely fits where training fits) before the first step
    and after each epoch, each completion token counting once; this leaves no trace in training: the
    random numbers after it are those that would have come without it. A resumed run measures what
    its checkpoint lacks, and nothing twice. With patience it stops where `stopped` says so (one
    step later where it was killed between the epoch's end and its evaluation); the adapter is that
    of the last step, not of the best one. Checkpoints are marked when they are whole.
    """

    def __init__(
        self,
        recipe: TrainingRecipe,
        base_model_dir: str | Path,
        out_dir: Path,
        tokenizer: PreTrainedTokenizerBase,
        examples: Rows,
        held_out: Rows = (),
        on_log: OnLog | None = None,
    ) -> None:
        # starts the process group, which loading for fsdp2 asks for its rank
        args = sft_config(recipe, out_dir / "checkpoints")
        if recipe.parallelism == "fsdp2":
            from accelerate.utils import enable_fsdp_ram_efficient_loading

            # the first process of a node reads the weights, the others none
            enable_fsdp_ram_efficient_loading()
        dtype = torch.bfloat16 if recipe.bf16 else torch.float32
        model = load_causal_model(base_model_dir, dtype=dtype)
        require_projections(model, recipe)
        texts = [{side: row[side] for side in ("prompt", "completion")} for row in examples]
        super().__init__(
            model=model,
            args=args,
            train_dataset=Dataset.from_list(texts),
            processing_class=tokenizer,
            peft_config=lora_config(recipe),
        )
        if recipe.parallelism == "fsdp2":
            exchange_in_float32(self)
        # it prints every log entry to stdout where progress bars are off
        self.remove_callback(PrinterCallback)
        self.recipe, self.examples, self.on_log = recipe, examples, on_log
        self.identity = checkpoints.RunIdentity.of(recipe, base_model_dir, examples)
        lengths = [tokens_of(example) for example in examples]
        self.tokens_with_loss = sum(example["completion_tokens"] for example in examples)
        self.flops = telemetry.TrainingFlops.of(self.model, self.tokens_with_loss / sum(lengths))
        self.flops_per_token = sum(map(self.flops.row, lengths)) / sum(lengths)
        self.began_s: float | None = None  # None: with the next pass
        self.tokens_before = 0.0
        self.tokens_seen = 0
        # a balanced step's loss is divided by what a mean step holds, not by what it holds itself
        self.tokens_per_step: float | None = None
        self.step_weight = 1.0
        self.decided: dict[str, str] = {}
        masks = [label_mask(example, tokenizer) for example in held_out]
        # transformers averages the losses of batches: weighed so, their mean is the mean over
        # tokens. The first token of a row is predicted from nothing, so it never counts
        self.weight_per_token = len(masks) / max(1, sum(sum(m.carries_loss[1:]) for m in masks))
        if masks:
            rows = [{"input_ids": mask.input_ids, "labels": mask.labels} for mask in masks]
            self.eval_dataset = Dataset.from_list(rows)
            self.args.eval_strategy = IntervalStrategy.EPOCH

    def check_labels(self) -> None:
        """TRL's own dataset must hold our tokens and labels. Raises UsageError where it does not.

        Guards against what silently ruins such a set: a template applied twice, a tokenizer that
        merges tokens across the end of the prompt or adds its own, truncation.
        """
        rows = cast("Rows", self.train_dataset)
        for number, (example, row) in enumerate(zip(self.examples, rows, strict=True)):
            same = len(row["input_ids"]) == tokens_of(example)
            if same and number < CHECKED_ROWS:
                mask = label_mask(example, cast("PreTrainedTokenizerBase", self.processing_class))
                same = (row["input_ids"], row["labels"]) == (mask.input_ids, mask.labels)
            if not same:
                raise UsageError(
                    f"TRL prepared row {example['candidate_id']} otherwise than prompt + completion"
                    " with loss on the completion",
                    "the base model's tokenizer adds or merges tokens where the prompt ends: use"
                    " another base model, or fix its chat template",
                )

    def use_accelerations(self, max_length: int) -> dict[str, float]:
        """Use what the recipe switches on, once the rows are checked. Returns what an optimiser
        step holds, and of planned steps the `busy_share` of the first epoch, counted."""
        recipe, lengths = self.recipe, [tokens_of(example) for example in self.examples]
        budget = max_length if recipe.packing else max(lengths) * recipe.batch_size
        if recipe.acceleration == "on":
            sharded = recipe.parallelism == "fsdp2"
            accelerate_trainer(
                self, tokens=budget, seed=recipe.seed, sharded=sharded, made=self._note
            )
        balanced = recipe.row_order == "balanced"
        if not recipe.packing and not balanced:
            rows = recipe.rows_per_step
            return {"rows_mean": float(rows), "tokens_mean": rows * fmean(lengths)}
        return self._pack(lengths, budget) if recipe.packing else self._balance(lengths)

    def _pack(self, lengths: Sequence[int], budget: int) -> dict[str, float]:
        """Take lines of rows, for balanced ones in steps of like cost."""
        from tasks.training.batching import balanced_lines, effective_batch, plan_epochs
        from tasks.training.packing import use_lines

        recipe, lines = self.recipe, self.recipe.gradient_accumulation

        def cost(line: Sequence[int]) -> float:
            return sum(self.flops.row(lengths[row]) for row in line)

        plans = plan_epochs(
            lengths, token_budget=budget, epochs=recipe.num_epochs, seed=recipe.seed
        )
        if recipe.row_order == "balanced":
            plans = balanced_lines(plans, cost, lines_per_step=lines, seed=recipe.seed)
            self.tokens_per_step = self.tokens_with_loss * min(1, lines / len(plans[0]))
        pad_token = cast("PreTrainedTokenizerBase", self.processing_class).pad_token_id or 0
        use_lines(self, plans, token_budget=budget, multiple=PADDED_TO, pad_token=pad_token)
        told = effective_batch(plans[0], lengths, lines, budget=budget, multiple=PADDED_TO)
        return told | {"busy_share": busy_share(list(map(cost, plans[0])), recipe.workers)}

    def _note(self, made: Acceleration) -> None:
        self.decided |= {"recomputation": made.plan.describe(), "attention": made.attention_name}

    def _balance(self, lengths: Sequence[int]) -> dict[str, float]:
        """Take rows in steps of like length."""
        from tasks.training.batching import balanced_epochs
        from tasks.training.packing import use_plans

        recipe, rows = self.recipe, self.recipe.rows_per_step
        plans = balanced_epochs(
            lengths, rows_per_step=rows, epochs=recipe.num_epochs, seed=recipe.seed
        )
        use_plans(self, plans)
        self.tokens_per_step = self.tokens_with_loss * min(1, rows / len(lengths))
        costs = [self.flops.row(lengths[row]) for line in plans[0] for row in line]
        return {
            "rows_mean": float(rows),
            "tokens_mean": rows * fmean(lengths),
            "busy_share": busy_share(costs, recipe.workers * recipe.batch_size),
        }

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
        """Take the loss from what a worker's last batch of an epoch repeats: accelerate fills the
        last pass with the epoch's first rows."""
        if self.accelerator.gradient_state.end_of_dataloader:
            args, rows = self.args, len(cast("Rows", self.train_dataset))
            split = args.per_device_train_batch_size, args.world_size, args.process_index
            batch["labels"][last_batch(rows, *split) :] = IGNORED
        return batch

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        state = TrainerState()
        if resume_from_checkpoint:
            state = TrainerState.load_from_json(f"{resume_from_checkpoint}/trainer_state.json")
        log = training_log(state.log_history)
        if resume_from_checkpoint and self._stopped(log):
            # it had stopped there, and only its adapter was not saved
            self.args.max_steps = state.global_step
        # before the first step, and where a checkpoint was written after an epoch's last step and
        # before its evaluation
        measured = {row["step"] for row in log if row[HELD_OUT] is not None}
        at_end = float(state.epoch or 0).is_integer() and state.global_step not in measured
        self.args.eval_on_start = at_end and self.eval_dataset is not None
        seen = next((row["num_tokens"] for row in reversed(log) if row["loss"]), 0)
        self.tokens_before, self.tokens_seen = seen, int(seen)
        psutil.cpu_percent()  # the first call only begins the interval
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
        entry |= {"num_tokens": tokens, "tokens_per_s": speed, "mfu": used, **telemetry.readings()}
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
        if self.state.global_step and self._stopped(training_log(self.state.log_history)):
            self.control.should_training_stop = True
        return found

    def _stopped(self, log: Sequence[Mapping[str, Any]]) -> bool:
        return stopped(held_out_losses(log), self.recipe.evaluation.patience_epochs)

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
        # transformers writes a checkpoint file by file, and every process its own part: only this
        # marker, after all of them, says that it is whole
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            folder = Path(self.args.output_dir or "", f"checkpoint-{self.state.global_step}")
            checkpoints.mark(folder, self.identity)
        self.began_s = None


def _tokens_in(batch: Mapping[str, torch.Tensor]) -> int:
    """Of the rows with loss, prompts included; a packed line counts as it is computed."""
    with_loss = (batch["labels"] != IGNORED).any(1, keepdim=True)
    held = batch.get("attention_mask", torch.ones_like(batch["labels"]))
    return int((held * with_loss).sum())
