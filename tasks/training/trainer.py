"""LoRA training of a base model on curated rows: TRL's SFTTrainer and PEFT, in this process or as a Ray task.

Guarantees: loss on the whole completion (reasoning, answer, end token) and nowhere else, checked against what TRL really prepared before
the first step; a checkpoint per epoch, and a second call in the same `out_dir` with the same rows and recipe continues from the newest
complete one and ends with the same adapter; the adapter directory is there whole or not at all. One device, one process: on a machine
with several GPUs use `train_on_ray`, which takes one. Does not guarantee bit-equal adapters on a GPU, nor that a better loss means
better kernels: the benchmark says that.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from kernels_eval.errors import EvalError, UsageError
from kernels_eval.records import stable_hash
from tasks.sources.small_model import load_causal_model, load_tokenizer, quiet_progress
from tasks.training.formatting import Dropped, label_mask, select_examples, to_prompt_completion
from tasks.training.recipe import TrainingRecipe

if TYPE_CHECKING:
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

COMPLETE = "complete.json"
HISTORY_FIELDS = ("step", "epoch", "loss", "learning_rate", "grad_norm", "num_tokens")
CHECKED_ROWS = 8

RenderPrompt = Callable[[Mapping[str, Any]], str]
OnLog = Callable[[dict[str, float]], None]


class TrainingResult(BaseModel):
    """What one training run did. Losses are mean cross-entropy per completion token, nats."""

    model_config = ConfigDict(frozen=True)

    adapter_dir: Path
    history: tuple[dict[str, float], ...] = Field(
        description="one entry per optimiser step: step, epoch, loss, learning_rate, grad_norm, num_tokens (seen so far)"
    )
    loss_first: float = Field(description="mean loss over the steps of the first epoch")
    loss_last: float = Field(description="mean loss over the steps of the last epoch: the same rows as the first, so the two compare")
    steps: int
    tokens: int = Field(description="tokens seen, prompts included, padding not, over all epochs")
    seconds: float = Field(description="wall time of this call alone; a resumed run reports only its own share")
    rows: int = Field(description="rows trained on")
    resumed_from_step: int = Field(default=0, description="0 where training started from the beginning")
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
    """Train an adapter on rows of `tasks.schemas.CURATED` and save it to `out_dir/adapter`; checkpoints go to `out_dir/checkpoints`.

    `on_log` gets one dict per optimiser step as it happens. Raises UsageError for rows or models that cannot be used and for a device
    that is too small (with the numbers), EvalError for anything that breaks while training: calling again resumes.
    """
    started = time.monotonic()
    out_dir = Path(out_dir)
    device = _single_device()
    recipe = recipe.resolve(gpu=device == "cuda")
    tokenizer = load_tokenizer(base_model_dir)
    examples = to_prompt_completion(rows, tokenizer, render_prompt)
    examples, dropped = select_examples(examples, tokenizer, max_length=recipe.max_length, overlong=recipe.overlong)
    key = _run_key(examples, recipe)
    watch = _watch(key, on_log)
    try:
        with quiet_progress(), warnings.catch_warnings():
            # transformers renames the option; TRL and PEFT still read the old name, which holds until transformers 6
            warnings.filterwarnings("ignore", message=".*gradient_checkpointing.* is deprecated", category=FutureWarning)
            checkpoint = _newest_checkpoint(out_dir / "checkpoints", key)
            trainer = _build_trainer(examples, recipe, base_model_dir, tokenizer, out_dir / "checkpoints", device, watch)
            _check_labels(trainer, examples, tokenizer)
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            adapter_dir = _save_adapter(trainer, out_dir / "adapter")
    except EvalError:
        raise
    except Exception as error:
        raise _explain(error, recipe, examples, device, out_dir) from error
    history = tuple({name: entry[name] for name in HISTORY_FIELDS} for entry in trainer.state.log_history if "loss" in entry)
    first, last = _epoch_losses(history)
    return TrainingResult(
        adapter_dir=adapter_dir,
        history=history,
        loss_first=first,
        loss_last=last,
        steps=trainer.state.global_step,
        tokens=int(history[-1]["num_tokens"]),
        seconds=time.monotonic() - started,
        rows=len(examples),
        resumed_from_step=int(checkpoint.name.removeprefix("checkpoint-")) if checkpoint else 0,
        dropped=tuple(dropped),
    )


def train_on_ray(
    rows: Sequence[Mapping[str, Any]],
    recipe: TrainingRecipe,
    base_model_dir: str | Path,
    out_dir: Path,
    render_prompt: RenderPrompt,
    on_log: OnLog | None = None,
) -> TrainingResult:
    """`train` as one Ray task: on one GPU where the cluster has one, else on one CPU core. Logs reach `on_log` in the caller's thread as
    they happen.

    A plain task and not Ray Train's TorchTrainer: with one worker the latter adds a controller, a placement group and a process group,
    17 to 22 s measured against 2 s, and no ability. Starts a local Ray where none is connected. `base_model_dir` and `out_dir` must mean
    the same on the node that runs the task. Raises what `train` raises, and EvalError where the worker process dies.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError

    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    # prompts are rendered here: the caller's function need not exist on the worker
    prompts = {row["candidate_id"]: render_prompt(row) for row in rows}
    gpus = 1 if ray.cluster_resources().get("GPU", 0) >= 1 else 0
    task = ray.remote(num_cpus=1, num_gpus=gpus, num_returns="streaming", max_retries=0)(_train_events)
    base = Path(base_model_dir).expanduser()
    # a worker has a working directory of its own, so paths go absolute; a hub id stays as it is
    base_here = str(base.absolute()) if base.exists() else str(base_model_dir)
    events = task.remote([dict(row) for row in rows], recipe, base_here, str(Path(out_dir).absolute()), prompts)
    try:
        for reference in events:
            kind, value = ray.get(reference)
            if kind == "result":
                return value
            if on_log is not None:
                on_log(value)
    except RayTaskError as error:
        if isinstance(error.cause, EvalError):
            raise error.cause from None
        raise EvalError(f"training failed on its Ray worker: {error.cause!r}", "run it again: it resumes from the last epoch") from error
    except RayError as error:
        raise EvalError(
            f"the Ray worker that trained is gone: {type(error).__name__}",
            "often the machine ran out of memory: free some or lower batch_size; run it again and it resumes from the last epoch",
        ) from error
    except BaseException:
        ray.cancel(events, force=True)  # an interrupted caller must not leave a training run behind
        raise
    raise EvalError("the Ray worker that trained ended without a result", "run it again: it resumes from the last epoch")


def _train_events(rows: list[dict[str, Any]], recipe: TrainingRecipe, base_model_dir: str, out_dir: str, prompts: dict[str, str]):
    """On the worker: ("log", entry) as training goes, then ("result", TrainingResult). A generator, so that Ray streams it."""
    from concurrent.futures import ThreadPoolExecutor
    from queue import SimpleQueue

    logs: SimpleQueue[dict[str, float] | None] = SimpleQueue()

    def run() -> TrainingResult:
        try:
            return train(rows, recipe, base_model_dir, Path(out_dir), lambda row: prompts[row["candidate_id"]], logs.put)
        finally:
            logs.put(None)

    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(run)
        while (entry := logs.get()) is not None:
            yield "log", entry
        yield "result", future.result()


def adapter_changes_output(base_model_dir: str | Path, adapter_dir: Path, prompt: str) -> float:
    """Largest absolute difference between the logits of the base model and of the same with the adapter, over all positions of `prompt`.

    Both are loaded from disk, in float32. 0 means that the adapter does nothing. Raises UsageError where either cannot be loaded.
    """
    import torch

    encoded = load_tokenizer(base_model_dir)(prompt, return_tensors="pt", add_special_tokens=False)
    with torch.inference_mode():
        logits = []
        for adapter in (None, adapter_dir):
            model = load_causal_model(base_model_dir, dtype=torch.float32, adapter=adapter)
            logits.append(model(**encoded).logits)
    return float((logits[0] - logits[1]).abs().max())


# -- one run ------------------------------------------------------------------------------------------------------------------------


def _single_device() -> str:
    """ "cuda" or "cpu". Several visible GPUs are refused: transformers would spread each batch over them with nn.DataParallel."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    if torch.cuda.device_count() > 1:
        raise UsageError(
            f"{torch.cuda.device_count()} GPUs are visible and training uses one",
            "call train_on_ray, or set CUDA_VISIBLE_DEVICES to one GPU",
        )
    return "cuda"


def _run_key(examples: Sequence[Mapping[str, Any]], recipe: TrainingRecipe) -> str:
    """Identity of a run: checkpoints of another recipe or other rows are never resumed from."""
    return stable_hash([recipe.model_dump(mode="json"), [[example["prompt"], example["completion"]] for example in examples]])


def _build_trainer(
    examples: Sequence[Mapping[str, Any]],
    recipe: TrainingRecipe,
    base_model_dir: str | Path,
    tokenizer: Any,
    checkpoints: Path,
    device: str,
    watch: TrainerCallback,
) -> SFTTrainer:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback
    from trl import SFTTrainer

    model = load_causal_model(base_model_dir, dtype=torch.bfloat16 if recipe.bf16 else torch.float32)
    trainer = SFTTrainer(
        model=model,
        args=_sft_config(recipe, checkpoints, device),
        train_dataset=Dataset.from_list([{side: example[side] for side in ("prompt", "completion")} for example in examples]),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            task_type="CAUSAL_LM",
            r=recipe.lora_rank,
            lora_alpha=recipe.lora_alpha,
            lora_dropout=recipe.lora_dropout,
            target_modules=list(recipe.target_modules),
            bias="none",
        ),
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)  # it prints every log entry to stdout where progress bars are off
    return trainer


def _sft_config(recipe: TrainingRecipe, checkpoints: Path, device: str) -> SFTConfig:
    from trl import SFTConfig

    return SFTConfig(
        output_dir=str(checkpoints),
        num_train_epochs=recipe.num_epochs,
        per_device_train_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.gradient_accumulation,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=recipe.lr_schedule,
        warmup_steps=recipe.warmup_share,  # below 1 it is a share of all steps
        bf16=bool(recipe.bf16),
        gradient_checkpointing=bool(recipe.gradient_checkpointing),
        max_length=None,  # rows above the recipe's max_length are already out: TRL must not truncate
        packing=False,
        completion_only_loss=True,
        logging_steps=1,
        save_strategy="epoch",
        save_total_limit=2,  # two, so that a complete one is there while the next is being written
        seed=recipe.seed,
        report_to="none",
        disable_tqdm=True,
        use_cpu=device == "cpu",
        dataloader_pin_memory=device == "cuda",
    )


def _check_labels(trainer: SFTTrainer, examples: Sequence[Mapping[str, Any]], tokenizer: Any) -> None:
    """TRL's own dataset must hold our tokens and labels. Raises UsageError where it does not.

    Guards against what silently ruins such a set: a template applied twice, a tokenizer that merges tokens across the end of the prompt
    or adds its own, truncation.
    """
    for example, prepared in zip(examples, trainer.train_dataset, strict=True):
        if len(prepared["input_ids"]) != example["prompt_tokens"] + example["completion_tokens"]:
            raise _label_error(example)
    for example, prepared in zip(examples[:CHECKED_ROWS], trainer.train_dataset, strict=False):
        mask = label_mask(example, tokenizer)
        expected = [token if carries else -100 for token, carries in zip(mask.input_ids, mask.carries_loss, strict=True)]
        if prepared["input_ids"] != mask.input_ids or prepared["labels"] != expected:
            raise _label_error(example)


def _label_error(example: Mapping[str, Any]) -> UsageError:
    return UsageError(
        f"TRL prepared row {example['candidate_id']} otherwise than prompt + completion with loss on the completion",
        "the base model's tokenizer adds or merges tokens where the prompt ends: use another base model, or mend its chat template",
    )


def _watch(key: str, on_log: OnLog | None) -> TrainerCallback:
    """Hands each log entry on, keeps the token count whole across a resume, and marks checkpoints complete."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        tokens_before = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # TRL counts tokens from zero in each process; what came before stands in the restored history
            self.tokens_before = next((entry["num_tokens"] for entry in reversed(state.log_history) if "loss" in entry), 0)

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            entry = state.log_history[-1]
            if "loss" not in entry:  # the summary at the end
                return
            entry["num_tokens"] += self.tokens_before
            if on_log is not None:
                on_log({name: entry[name] for name in HISTORY_FIELDS})

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # transformers writes a checkpoint file by file: only this marker, after all of them, says that it is whole
            marker = Path(args.output_dir, f"checkpoint-{state.global_step}", COMPLETE)
            temporary = marker.with_suffix(".tmp")
            temporary.write_text(json.dumps({"key": key}), encoding="utf-8")
            os.replace(temporary, marker)

    return Watch()


def _newest_checkpoint(checkpoints: Path, key: str) -> Path | None:
    """The newest complete checkpoint of this very run. The others in the directory cannot be used again and are removed."""
    usable = {}
    for directory in checkpoints.glob("checkpoint-*"):
        try:
            whole = json.loads((directory / COMPLETE).read_text(encoding="utf-8"))["key"] == key
        except (OSError, ValueError, KeyError):
            whole = False
        if whole:
            usable[int(directory.name.removeprefix("checkpoint-"))] = directory
        else:
            shutil.rmtree(directory)
    return usable[max(usable)] if usable else None


def _save_adapter(trainer: SFTTrainer, adapter_dir: Path) -> Path:
    temporary = adapter_dir.with_name(f".{adapter_dir.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    trainer.model.save_pretrained(temporary)
    shutil.rmtree(adapter_dir, ignore_errors=True)  # an earlier run's; a directory cannot be renamed onto a full one
    os.replace(temporary, adapter_dir)
    return adapter_dir


def _epoch_losses(history: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Mean loss of the first and of the last epoch. An entry's `epoch` is how many are done after its step, so the first ends at 1."""
    first = [entry["loss"] for entry in history if entry["epoch"] <= 1]
    last = [entry["loss"] for entry in history if entry["epoch"] > history[-1]["epoch"] - 1]
    return sum(first) / len(first), sum(last) / len(last)


# -- faults -------------------------------------------------------------------------------------------------------------------------


def _explain(error: Exception, recipe: TrainingRecipe, examples: Sequence[Mapping[str, Any]], device: str, out_dir: Path) -> EvalError:
    if _is_out_of_memory(error):
        return _out_of_memory(recipe, examples, device)
    first_line = (str(error).splitlines() or [""])[0]
    return EvalError(
        f"training failed: {type(error).__name__}: {first_line}",
        f"mend the cause and run it again: it resumes from {out_dir / 'checkpoints'}",
    )


def _is_out_of_memory(error: Exception) -> bool:
    import torch

    # the CPU allocator raises a plain RuntimeError: its words are all there is to go by
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def _out_of_memory(recipe: TrainingRecipe, examples: Sequence[Mapping[str, Any]], device: str) -> UsageError:
    longest = max(example["prompt_tokens"] + example["completion_tokens"] for example in examples)
    return UsageError(
        f"out of memory while training {recipe.base_model} on {_memory_of(device)}: "
        f"batch_size {recipe.batch_size} x up to {longest} tokens, "
        f"gradient checkpointing {'on' if recipe.gradient_checkpointing else 'off'}, {'bfloat16' if recipe.bf16 else 'float32'}",
        f"three ways out: batch_size 1 with gradient_accumulation {recipe.rows_per_step} (the same step); gradient_checkpointing true; "
        f"max_length below {longest}, which drops the longest rows",
    )


def _memory_of(device: str) -> str:
    if device == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(0)
        return f"{properties.name} with {properties.total_memory / 2**30:.0f} GiB"
    return f"the CPU with {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
