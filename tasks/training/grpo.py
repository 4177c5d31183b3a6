"""Reinforcement of a LoRA adapter by the verifier, with TRL's GRPOTrainer (group relative policy
optimisation: Shao et al. 2024, arXiv:2402.03300, section 4.1).

Guarantees: training begins with the adapter that it is given, and the KL divergence is against it;
an answer is judged as soon as it is written, while the others are still being written (on a GPU
that kernels are timed on: afterwards, for nothing may run beside a timed kernel); an answer without
a reward (a fault of the machine or of the task) is left out of its group; a second call in the same
`out_dir` with the same tasks, recipe and adapter resumes from the newest whole checkpoint. Does not
guarantee the same adapter twice: a timed kernel's speedup is never the same. Importing it takes
seconds.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean
from threading import Event
from typing import Any, NamedTuple, TypeVar

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from kernels_eval.pool.pool import arriving
from kernels_eval.records import Reason, Status, Verdict
from kernels_eval.rewards import reward, reward_parts
from tasks.files import file_sha256
from tasks.sources.small_model import (
    attention_of_any_length,
    chat_text,
    load_causal_model,
    load_tokenizer,
    quiet_progress,
)
from tasks.training import checkpoints
from tasks.training.recipe import ReinforceRecipe
from tasks.training.trainer_settings import machine_settings

T = TypeVar("T")
KEPT_OF_TRL = ("loss", "grad_norm", "learning_rate", "reward", "reward_std", "kl", "entropy")


class Asked(NamedTuple):
    """One answer wanted, the `place`th of a step: to the chat `prompt` (token ids) of a task, drawn
    under `seed`."""

    place: int
    task_id: str
    prompt: list[int]
    seed: int


class Answer(NamedTuple):
    """One answer of the policy: its text and its token ids, and how many are reasoning."""

    asked: Asked
    text: str
    tokens: list[int]
    reasoning_tokens: int = 0


class Environment(NamedTuple):
    """How answers are written and judged. `write` takes the policy, its tokenizer and what is asked
    for, and yields answers as they end; `judge` takes them as they come (None: none has, so far),
    and yields the place and verdict of each, in any order. `apart`: judging waits until all answers
    are written."""

    write: Callable[[Any, PreTrainedTokenizerBase, Sequence[Asked]], Iterator[Answer]]
    judge: Callable[[Iterable[Answer | None]], Iterator[tuple[int, Verdict]]]
    apart: bool = False


def reinforce(
    prompts: Mapping[str, str],
    recipe: ReinforceRecipe,
    base_model_dir: str | Path,
    adapter_dir: Path,
    out_dir: Path,
    environment: Environment,
    on_log: Callable[[dict[str, float]], None] | None = None,
) -> tuple[Path, list[dict[str, float]]]:
    """Train the adapter on tasks (task_id -> user's prompt). Returns the directory of the new
    adapter (`out_dir/adapter`) and the log, one row per optimiser step (`Step.row`).

    Raises UsageError for models and checkpoints that cannot be used; what `environment` raises ends
    the run, which resumes when it is called again.
    """
    tokenizer = load_tokenizer(base_model_dir)
    adapter = file_sha256(adapter_dir / "adapter_model.safetensors")
    identity = checkpoints.RunIdentity.of(
        recipe,
        base_model_dir,
        [{"prompt": prompt, "completion": name} for name, prompt in sorted(prompts.items())],
    )
    identity = identity.model_copy(update={"base_model": f"{identity.base_model} {adapter[:12]}"})
    checkpoint = checkpoints.newest_checkpoint(out_dir / "checkpoints", identity)
    with quiet_progress(), warnings.catch_warnings():
        # `rollout_func`, and names that transformers 6 changes
        warnings.filterwarnings("ignore", message=".*(experimental feature|is deprecated and will)")
        logging.getLogger(GRPOTrainer.__module__).addFilter(_not_counted)
        trainer = RewardTrainer(
            prompts, recipe, base_model_dir, adapter_dir, out_dir, tokenizer, environment, on_log
        )
        trainer.identity = identity
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if "ref" in trainer.policy.peft_config:  # the adapter as it was
            trainer.policy.delete_adapter("ref")
        saved = checkpoints.save_adapter(trainer, out_dir / "adapter")
    history: list[dict[str, Any]] = trainer.state.log_history
    return saved, [entry["concur"] for entry in history if "concur" in entry]


class RewardTrainer(GRPOTrainer):
    """TRL's trainer whose answers come from an `Environment`. Its log holds a `Step` of each
    optimiser step."""

    identity: checkpoints.RunIdentity

    def __init__(
        self,
        prompts: Mapping[str, str],
        recipe: ReinforceRecipe,
        base_model_dir: str | Path,
        adapter_dir: Path,
        out_dir: Path,
        tokenizer: PreTrainedTokenizerBase,
        environment: Environment,
        on_log: Callable[[dict[str, float]], None] | None,
    ) -> None:
        gpu = torch.cuda.is_available()
        base = load_causal_model(base_model_dir, dtype=torch.bfloat16 if gpu else torch.float32)
        self.policy: Any = PeftModel.from_pretrained(base, str(adapter_dir), is_trainable=True)
        self.reader = tokenizer
        chats = {name: chat_text(tokenizer, prompt) for name, prompt in prompts.items()}
        self.recipe, self.environment, self.on_log = recipe, environment, on_log
        self.tasks = {chat: name for name, chat in chats.items()}
        self.chat_ids = {
            chat: tokenizer(chat, add_special_tokens=False)["input_ids"] for chat in self.tasks
        }
        self.written, self.began_s = Step({}, {}, recipe, 0.0, 0.0), time.monotonic()
        super().__init__(
            model=self.policy,
            reward_funcs=_given_reward,
            args=_grpo_config(recipe, out_dir / "checkpoints", gpu=gpu),
            train_dataset=Dataset.from_list([{"prompt": chat} for chat in self.tasks]),
            processing_class=tokenizer,
            rollout_func=lambda chats, _: self.answer(chats),
        )
        self.remove_callback(PrinterCallback)  # it prints every log entry to stdout
        self.skipped = SkipNonFinite()
        self.add_callback(self.skipped)

    def answer(self, chats: Sequence[str]) -> dict[str, Any]:
        """Answers to chats, and the reward of each, as TRL takes them from a `rollout_func`."""
        step = self.state.global_step
        seeds = (self.recipe.seed * 1_000_003 + step) * 65_536
        asked = [
            Asked(place, self.tasks[chat], self.chat_ids[chat], seeds + place)
            for place, chat in enumerate(chats)
        ]
        self.written = self._written(asked)
        answers = [self.written.answers[each.place] for each in asked]
        return {
            "prompt_ids": [answer.asked.prompt for answer in answers],
            "completion_ids": [answer.tokens for answer in answers],
            "logprobs": None,
            "reward": [self.written.reward(each.place) for each in asked],
        }

    def _written(self, asked: Sequence[Asked]) -> Step:
        began_s, answers = time.monotonic(), dict[int, Answer]()
        queue: SimpleQueue[Answer | None] = SimpleQueue()
        stopped = Event()

        def going(given: Iterable[T]) -> Iterator[T]:
            for each in given:
                if stopped.is_set():
                    raise CancelledError
                yield each

        def judged(feed: Iterable[Answer | None]) -> dict[int, Verdict]:
            return dict(going(self.environment.judge(going(feed))))

        apart = self.environment.apart
        with ThreadPoolExecutor(1) as thread:
            try:
                beside = None if apart else thread.submit(judged, arriving(queue))
                self.policy.eval()
                with self.accelerator.autocast():
                    for answer in self.environment.write(self.policy, self.reader, asked):
                        answers[answer.asked.place] = answer
                        queue.put(answer)
                self.policy.train()
                queue.put(None)
                sampled_s = time.monotonic()
                verdicts = beside.result() if beside else judged(answers.values())
            except BaseException:
                stopped.set()  # an interrupt must not wait for verdicts that nobody wants
                raise
        waited_s = time.monotonic() - sampled_s
        return Step(answers, verdicts, self.recipe, sampled_s - began_s, waited_s)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        untyped: Any = super()
        with attention_of_any_length():
            loss: torch.Tensor = untyped.training_step(*args, **kwargs)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        entry: dict[str, Any] = self.state.log_history[-1]
        if "loss" not in entry:  # the summary at the end
            return
        now_s = time.monotonic()
        learned = {n: float(entry[n]) for n in KEPT_OF_TRL if entry.get(n) is not None}
        row = {"step": entry["step"]} | learned | self.written.row(now_s - self.began_s)
        row["skipped_updates"] = float(self.skipped.count)
        entry["concur"], self.began_s = row, now_s
        if self.on_log:
            self.on_log(row)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        untyped: Any = super()
        untyped._save_checkpoint(*args, **kwargs)
        folder = Path(self.args.output_dir or "", f"checkpoint-{self.state.global_step}")
        checkpoints.mark(folder, self.identity)


class SkipNonFinite(TrainerCallback):
    """Drops an optimiser step whose gradient is not finite, as loss scalers do: one such step would
    make every later logit NaN. `count`: how many of this process."""

    count = 0

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        learned = [each for each in kwargs["model"].parameters() if each.grad is not None]
        if not all(bool(torch.isfinite(each.grad).all()) for each in learned):
            self.count += 1
            for each in learned:
                each.grad = None  # the optimiser passes over it


class Step(NamedTuple):
    """The answers that an optimiser step learned from, their verdicts, and the wall seconds of
    writing them and of waiting for verdicts after that."""

    answers: Mapping[int, Answer]
    verdicts: Mapping[int, Verdict]
    recipe: ReinforceRecipe
    sampling_s: float
    waited_s: float

    def reward(self, place: int) -> float | None:
        return reward(self.verdicts.get(place), self.recipe.reward)

    def row(self, step_s: float) -> dict[str, float]:
        """What a person follows: mean of each part of the reward, share of each status, share of
        each reason among the rejected (is the model learning to cheat?), geometric mean of the
        speedups of correct kernels, mean reasoning length in tokens, seconds, and the share of the
        step in which the policy's device waited for verdicts."""
        known, count = self.verdicts.values(), max(1, len(self.answers))
        statuses = Counter(verdict.status for verdict in known)
        reasons = Counter(v.reason for v in known if v.status is Status.REJECTED)
        parts = [reward_parts(verdict, self.recipe.reward) or {} for verdict in known]
        names = dict.fromkeys(name for each in parts for name in each)
        speedups = [math.log(v.speedup) for v in known if v.speedup > 0]
        lengths = [answer.reasoning_tokens for answer in self.answers.values()]
        return (
            {f"reward/{name}": fmean(p.get(name, 0.0) for p in parts) for name in names}
            | {f"status/{status.value}": statuses[status] / count for status in Status}
            | {f"rejected/{r.value}": reasons[r] / count for r in Reason if _rejects(r)}
            | {"without_reward": 1 - sum(map(bool, parts)) / count}
            | ({"speedup_of_correct": math.exp(fmean(speedups))} if speedups else {})
            | {"reasoning_tokens": fmean(lengths) if lengths else 0.0}
            | {"sampling_s": self.sampling_s, "waited_s": self.waited_s, "step_s": step_s}
            | {"idle_share": min(1.0, self.waited_s / step_s) if step_s else 0.0}
        )


def _rejects(reason: Reason) -> bool:
    return reason.status is Status.REJECTED


def _not_counted(record: logging.LogRecord) -> bool:
    """Not TRL's warning of an answer without a reward, with its whole prompt: the log counts these
    (`without_reward`)."""
    return "All reward functions returned None" not in str(record.msg)


def _given_reward(reward: list[float | None], **_: object) -> list[float | None]:
    """The reward that `RewardTrainer.answer` found, for TRL asks a function for it."""
    return reward


def _grpo_config(recipe: ReinforceRecipe, out_dir: Path, *, gpu: bool) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(out_dir),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.answers_per_step // recipe.batch_size,
        num_generations=recipe.samples_per_task,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=recipe.warmup_steps,
        optim="adamw_torch_fused",
        max_grad_norm=recipe.max_grad_norm,
        beta=recipe.beta,
        temperature=recipe.sampling.temperature,
        top_p=recipe.sampling.top_p,
        max_completion_length=recipe.sampling.max_tokens,
        bf16=gpu,
        gradient_checkpointing=False,
        logging_steps=1,
        save_steps=recipe.checkpoint_every_steps,
        save_total_limit=checkpoints.KEPT,
        seed=recipe.seed,
        **machine_settings(gpu=gpu),
    )
