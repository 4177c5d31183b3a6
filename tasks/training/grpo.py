"""Reinforcement of a LoRA adapter with TRL's GRPOTrainer (Shao et al. 2024, arXiv:2402.03300,
section 4.1).

KL divergence is against the given adapter; answers without a reward (machine or task fault) leave
their group; a second call resumes. Slow to import.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from kernels_eval.errors import UsageError
from kernels_eval.records import Reason, Status, Verdict
from kernels_eval.rewards import RewardRecipe, reward, reward_parts
from tasks.models import (
    attention_of_any_length,
    chat_text,
    load_causal_model,
    load_tokenizer,
    opening_of,
    quiet_progress,
    written_text,
)
from tasks.training import checkpoints
from tasks.training.recipe import ReinforceRecipe
from tasks.training.trainer_settings import machine_settings


class Judged(NamedTuple):
    """The verdict (None: the machine failed) and the reasoning by which an answer is rewarded, and
    what it is told in a second turn, if anything."""

    verdict: Verdict | None
    reasoning: str
    told: str = ""


Judge = Callable[[Sequence[str], Sequence[str]], Sequence[Judged]]
"""(task ids, answers) -> a `Judged` for each, in order."""
OnLog = Callable[[dict[str, Any]], None]
WARMUP_STEPS = 3
"""Optimiser steps of linear warm-up; then the learning rate is constant."""
MAX_GRAD_NORM = 0.2
"""Gradients are clipped to this norm."""
UNBOUNDED = 1 << 30
CHECKPOINT_STEPS = 10
"""Optimiser steps between checkpoints."""
TOLD_TOKENS = 3_000
"""Room for what a failed answer is told, as each `Judged.told` is below so many characters."""
ANSWER = "answer"
"""Stands for an answer where a chat template is taken apart."""


def reinforce(
    prompts: Mapping[str, str],
    recipe: ReinforceRecipe,
    base_model_dir: str | Path,
    adapter_dir: Path,
    out_dir: Path,
    judge: Judge,
    on_log: OnLog | None = None,
) -> tuple[Path, list[dict[str, Any]]]:
    """Train the adapter on tasks (task_id -> user's prompt). Returns the new adapter's directory
    (`out_dir/adapter`) and the log: TRL's numbers and `measures` of each optimiser step.

    Raises UsageError for unusable models and settings, and what `judge` raises: calling again
    resumes.
    """
    tokenizer = load_tokenizer(base_model_dir)
    gpu = torch.cuda.is_available()
    base = load_causal_model(base_model_dir, dtype=torch.bfloat16 if gpu else torch.float32)
    args = grpo_config(recipe, out_dir / "checkpoints", gpu=gpu)
    longest = _prompt_tokens(prompts, tokenizer, base.config)
    args.max_completion_length = min(recipe.max_tokens, window_of(base.config) - longest)
    turn = args.max_completion_length + TOLD_TOKENS
    room = min(window_of(base.config), longest + recipe.turns * turn - TOLD_TOKENS)
    args.vllm_max_model_length = room
    judged_tokens = TokenJudge(judge, tokenizer)
    rollout = None
    if recipe.turns > 1:
        task_of = {prompt: name for name, prompt in prompts.items()}
        rollout = two_turns(judged_tokens, task_of, room - args.max_completion_length)
    chats = [
        {"prompt": [{"role": "user", "content": prompt}], "task_id": name}
        for name, prompt in prompts.items()
    ]
    log = StepLog(on_log)
    with quiet_progress(), warnings.catch_warnings():
        # names that transformers 6 changes
        warnings.filterwarnings("ignore", message=".*is deprecated and will")
        warnings.filterwarnings("ignore", message=".*'rollout_func', which is an experimental")
        logging.getLogger(GRPOTrainer.__module__).addFilter(_not_counted)
        trainer = GRPOTrainer(
            model=PeftModel.from_pretrained(base, str(adapter_dir), is_trainable=True),
            reward_funcs=_reward_function(judged_tokens, recipe.rewarded),
            rollout_func=rollout,
            args=args,
            train_dataset=Dataset.from_list(chats),
            processing_class=tokenizer,
            callbacks=[SkipNonFinite(), log, checkpoints.MarkWhole()],
        )
        trainer.remove_callback(PrinterCallback)  # it prints every log entry to stdout
        checkpoint = checkpoints.newest_checkpoint(out_dir / "checkpoints")
        with attention_of_any_length():
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        policy: Any = trainer.accelerator.unwrap_model(trainer.model)
        if "ref" in policy.peft_config:  # the adapter as it was
            policy.delete_adapter("ref")
        saved = checkpoints.save_adapter(trainer, out_dir / "adapter")
    return saved, [entry for entry in trainer.state.log_history if "loss" in entry]


def grpo_config(recipe: ReinforceRecipe, out_dir: Path, *, gpu: bool) -> GRPOConfig:
    """TRL's settings of the recipe. Raises UsageError where vLLM is requested and not installed."""
    if recipe.vllm != "none" and importlib.util.find_spec("vllm") is None:
        raise UsageError(
            f"reinforcement.vllm is {recipe.vllm} and vLLM is not installed beside TRL",
            "install concur with `trl[vllm]` into an environment of its own, or set"
            " reinforcement.vllm to none",
        )
    elsewhere = "://" in recipe.vllm
    return GRPOConfig(
        output_dir=str(out_dir),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.answers_per_step // recipe.batch_size,
        num_generations=recipe.samples_per_task,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=WARMUP_STEPS,
        optim="adamw_torch_fused",
        max_grad_norm=MAX_GRAD_NORM,
        beta=recipe.beta,
        # answers are drawn from the very policy that learns
        disable_dropout=True,
        temperature=recipe.temperature,
        max_completion_length=recipe.max_tokens,
        use_vllm=recipe.vllm != "none",
        vllm_mode="server" if elsewhere else "colocate",
        vllm_server_base_url=recipe.vllm if elsewhere else None,
        bf16=gpu,
        gradient_checkpointing=False,
        logging_steps=1,
        save_steps=CHECKPOINT_STEPS,
        save_total_limit=checkpoints.KEPT,
        seed=recipe.seed,
        **machine_settings(gpu=gpu),
    )


def _prompt_tokens(
    prompts: Mapping[str, str], tokenizer: PreTrainedTokenizerBase, config: Any
) -> int:
    chats = [chat_text(tokenizer, prompt) for prompt in prompts.values()]
    longest = max(map(len, tokenizer(chats, add_special_tokens=False)["input_ids"]))
    if longest >= window_of(config):
        raise UsageError(
            f"a prompt of {longest} tokens fills the base model's window of {window_of(config)}",
            "reinforce a model with a larger one, or leave that task out",
        )
    return longest


def window_of(config: Any) -> int:
    return getattr(config.get_text_config(), "max_position_embeddings", None) or UNBOUNDED


class TokenJudge:
    """Judges sampled tokens. `seconds`: what that took since it was last set to 0."""

    def __init__(self, judge: Judge, tokenizer: PreTrainedTokenizerBase) -> None:
        self.judge, self.tokenizer = judge, tokenizer
        self.opening = opening_of(tokenizer)
        self.seconds = 0.0

    def __call__(self, task_ids: Sequence[str], sampled: Sequence[list[int]]) -> list[Judged]:
        began_s = time.monotonic()
        answers = []
        for ids in sampled:
            opening = "" if self.tokenizer.eos_token_id in ids else self.opening
            answers.append(opening + written_text(self.tokenizer, ids))
        judged = list(self.judge(task_ids, answers))
        self.seconds += time.monotonic() - began_s
        return judged


def two_turns(
    judge: TokenJudge, task_of: Mapping[str, str], longest: int
) -> Callable[[list[Any], Any], dict[str, list[Any]]]:
    """TRL's rollout function in which a finished answer is followed up by what it is told, unless
    that would exceed `longest` tokens; what it is told is not learned."""
    tokenizer = judge.tokenizer

    def rollout(chats: list[Any], trainer: Any) -> dict[str, list[Any]]:
        asked = trainer._tokenize_prompts(chats)[0]
        sampled, logprobs = trainer._generate_single_turn(asked, None, {}, trainer.num_generations)
        task_ids = [task_of[chat[0]["content"]] for chat in chats]
        judged = judge(task_ids, sampled)
        told = {
            place: reply
            for place, ids in enumerate(sampled)
            if (reply := _reply(judged[place].told, ids, tokenizer))
            and len(asked[place]) + len(ids) + len(reply) <= longest
        }
        masks = [[1] * len(ids) for ids in sampled]
        if told:
            so_far = [[*asked[place], *sampled[place], *told[place]] for place in told]
            second, seconds = trainer._generate_single_turn(so_far, None, {}, 1)
            again = judge([task_ids[place] for place in told], second)
            for number, (place, reply) in enumerate(told.items()):
                sampled[place] = [*sampled[place], *reply, *second[number]]
                masks[place] += [0] * len(reply) + [1] * len(second[number])
                judged[place] = again[number]
                if logprobs is not None:
                    logprobs[place] = [*logprobs[place], *[0.0] * len(reply), *seconds[number]]
        return {
            "prompt_ids": asked,
            "completion_ids": sampled,
            "logprobs": logprobs,
            "env_mask": masks,
            "judged": judged,
            "told": [place in told for place in range(len(chats))],
        }

    return rollout


def _reply(told: str, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens from the end of a finished answer to the beginning of the next; none to follow up."""
    if not told or list(ids[-1:]) != [tokenizer.eos_token_id]:
        return []
    turns = [("user", "x"), ("assistant", ANSWER), ("user", told)]
    chat = [{"role": role, "content": text} for role, text in turns]
    text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    after = text.partition(ANSWER)[2].removeprefix(str(tokenizer.eos_token))
    return list(tokenizer(after, add_special_tokens=False)["input_ids"])


def _reward_function(judge: TokenJudge, recipe: RewardRecipe) -> Callable[..., list[float | None]]:
    def verdict_reward(
        completion_ids: list[list[int]],
        task_id: list[str],
        log_metric: Callable[[str, float], None],
        judged: list[Judged] | None = None,
        told: list[bool] | None = None,
        **_: object,
    ) -> list[float | None]:
        judged = judged or judge(task_id, completion_ids)
        reasoning = [each.reasoning for each in judged]
        lengths = map(len, judge.tokenizer(reasoning, add_special_tokens=False)["input_ids"])
        measured = measures([each.verdict for each in judged], recipe)
        measured["reasoning_tokens"] = fmean(lengths)
        measured["judged_s"], judge.seconds = judge.seconds, 0.0
        if told is not None:
            measured["followed_up"] = fmean(told)
        for name, value in measured.items():
            log_metric(name, value)
        return [reward(each.verdict, recipe) for each in judged]

    return verdict_reward


def measures(verdicts: Sequence[Verdict | None], recipe: RewardRecipe) -> dict[str, float]:
    """Mean of each part of the reward, shares of statuses and of reasons among the rejected (to
    show learned cheating), and geometric mean speedup of correct kernels."""
    known, count = [verdict for verdict in verdicts if verdict], len(verdicts)
    statuses = Counter(verdict.status for verdict in known)
    reasons = Counter(verdict.reason for verdict in known)
    parts = [each for verdict in known if (each := reward_parts(verdict, recipe)) is not None]
    found = {f"status/{status.value}": statuses[status] / count for status in Status}
    for reason in Reason:
        if reason.status is Status.REJECTED:
            found[f"rejected/{reason.value}"] = reasons[reason] / count
    for name in dict.fromkeys(name for each in parts for name in each):
        found[f"reward/{name}"] = fmean(each.get(name, 0.0) for each in parts)
    found["without_reward"] = 1 - len(parts) / count
    if speedups := [math.log(verdict.speedup) for verdict in known if verdict.speedup > 0]:
        found["speedup_of_correct"] = math.exp(fmean(speedups))
    return found


class StepLog(TrainerCallback):
    """Reports each optimiser step as it ends."""

    def __init__(self, tell: OnLog | None) -> None:
        self.tell = tell

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        entry = state.log_history[-1]
        if self.tell and "loss" in entry:  # not the summary at the end
            self.tell(entry)


class SkipNonFinite(TrainerCallback):
    """Drops an optimiser step with a non-finite gradient, which would make every later logit NaN.
    `count`: drops in this process."""

    count = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        learned = [each for each in kwargs["model"].parameters() if each.grad is not None]
        if not all(bool(torch.isfinite(each.grad).all()) for each in learned):
            self.count += 1
            for each in learned:
                each.grad = None  # the optimiser passes over it

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.log_history[-1]["skipped_updates"] = float(self.count)


def _not_counted(record: logging.LogRecord) -> bool:
    """Filter TRL's warning of an answer without reward, which quotes its whole prompt."""
    return "All reward functions returned None" not in str(record.msg)
