"""A base model for the proof: a small Qwen2, pretrained on what the scripted teacher wrote.

    python -m experiments.proof.student write --out DATA
    python -m experiments.proof.student pretrain --data DATA --out .concur/models/student

`write` makes the corpus: answers of the teacher to generated tasks of the train side, right and
wrong ones as they come, as the chat that training and sampling use. It also learns the tokenizer of
them. The programs are drawn under another seed than those of the profile `proof`, from the same
operators. `pretrain` trains on all tokens of the corpus; on one GPU it takes minutes. Stopped by
`--limit-s`, by Ctrl-C or by a kill, the same command resumes from the last checkpoint; the model is
at `--out` when all steps are done.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels_eval.records import Language, SamplingParams
from tasks.models import load_tokenizer
from tasks.sources.config import TasksConfig
from tasks.sources.small_model import SmallModelConfig, build_small_model
from tasks.sources.stage import load_tasks
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.parsing import parse_response
from tasks.synthesis.prompts import render
from tasks.synthesis.sampler import Request
from tasks.synthesis.samplers import make_sampler
from tasks.training.formatting import examples_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

TOKENS, UNTRAINED, CHECKPOINTS = "tokens.npy", "untrained", "checkpoints"
SEED = 1_000_003
"""Of the corpus's programs and answers; the profile has others."""
SHAPE = SmallModelConfig(
    vocab_size=4096,
    hidden_size=512,
    layers=10,
    heads=8,
    kv_heads=4,
    intermediate_size=1408,
    max_positions=4096,
)
"""33 million weights."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write")
    write.add_argument("--out", type=Path, required=True)
    write.add_argument("--tasks", type=int, default=4000, help="programs")
    write.add_argument("--samples", type=int, default=10, help="answers per program")
    write.add_argument("--language", choices=["cpp", "cuda"], default="cpp")
    write.add_argument("--teacher", default="{}", help="settings of the teacher, JSON")
    train = commands.add_parser("pretrain")
    train.add_argument("--data", type=Path, required=True, help="what `write` made")
    train.add_argument("--out", type=Path, required=True, help="where the model is written")
    train.add_argument("--epochs", type=float, default=3.0)
    train.add_argument("--context", type=int, default=2048, help="tokens of a row")
    train.add_argument("--rows", type=int, default=32, help="rows per optimiser step")
    train.add_argument("--learning-rate", type=float, default=1e-3)
    train.add_argument("--seed", type=int, default=SEED, help="order of the rows")
    train.add_argument(
        "--layers", type=int, help="another model of so many layers, with weights of its own seed"
    )
    train.add_argument("--limit-s", type=float, help="stop with a checkpoint after so many seconds")
    options = parser.parse_args()
    return write_corpus(options) if options.command == "write" else pretrain(options)


# -- the corpus ------------------------------------------------------------------------------------


def write_corpus(options: argparse.Namespace) -> int:
    """Write DATA/untrained (a model with random weights and the tokenizer) and DATA/tokens.npy, the
    token ids of all chats one after the other."""
    rows = list(answers(options))
    texts = [row[name] for row in rows[:20_000] for name in ("prompt", "reasoning", "answer")]
    untrained = build_small_model(options.out / UNTRAINED, texts, SHAPE)
    tokenizer = load_tokenizer(untrained)
    parts = (rows[start : start + 1000] for start in range(0, len(rows), 1000))
    tokens = np.concatenate([encoded(part, tokenizer) for part in parts])
    np.save(options.out / TOKENS, tokens)
    print(
        f"{len(rows):,} answers, {len(tokens):,} tokens ({len(tokens) / len(rows):.0f} each), at"
        f" {options.out}"
    )
    return 0


def answers(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Prompt, reasoning and answer of what the teacher wrote, whatever it is worth."""
    language, settings = Language(options.language), json.loads(options.teacher)
    tasks = load_tasks(
        TasksConfig(
            source="generated",
            split="train",
            options={"seed": SEED, "count": options.tasks, "sizes": options.language},
        )
    )
    sampler = make_sampler(
        SynthesisConfig.model_validate({"sampler": "scripted", "options": settings}),
        "",
    )
    prompts = {task.task_id: render(task, language) for task in tasks}
    requests = [
        Request(
            request_key=f"{task.task_id} {index}",
            task=task,
            language=language,
            prompt=prompts[task.task_id],
            sample_index=index,
            sampling=SamplingParams(),
        )
        for task in tasks
        for index in range(options.samples)
    ]
    asked = {request.request_key: request for request in requests}
    for response in sampler.sample(requests):
        parsed = parse_response(response.text)
        yield {
            "candidate_id": response.request_key,
            "prompt": asked[response.request_key].prompt,
            "reasoning": parsed.reasoning,
            "answer": parsed.answer,
            "finish_reason": response.finish_reason,
        }


def encoded(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> NDArray[np.uint16]:
    """The token ids of chats, one after the other."""
    examples = examples_of(rows, tokenizer)
    chats = [example.prompt + example.completion for example in examples]
    ids = tokenizer(chats, add_special_tokens=False, verbose=False)["input_ids"]
    return np.concatenate([np.asarray(each, dtype=np.uint16) for each in ids])


# -- pretraining -----------------------------------------------------------------------------------


def pretrain(options: argparse.Namespace) -> int:
    """Train on rows of `--context` tokens, cut from the corpus regardless of where chats end."""
    import torch
    from transformers import Trainer, TrainingArguments
    from transformers import trainer_utils as untyped

    if options.out.is_dir():
        print(f"{options.out} is there already")
        return 0
    tokens = np.load(options.data / TOKENS, mmap_mode="r")
    tokenizer = load_tokenizer(options.data / UNTRAINED)
    model = untrained_model(options.data / UNTRAINED, options.layers, options.seed)
    gpu = torch.cuda.is_available()
    checkpoints = options.data / f"{CHECKPOINTS}-{options.out.name}"
    trainer_utils: Any = untyped
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        per_device_train_batch_size=options.rows,
        num_train_epochs=options.epochs,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.02,  # below 1 it is a share of all steps
        weight_decay=0.1,
        adam_beta2=0.95,
        bf16=gpu,
        torch_compile=gpu,
        use_cpu=not gpu,
        save_steps=500,
        save_total_limit=1,
        logging_steps=100,
        report_to=[],
        disable_tqdm=True,
        seed=options.seed,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows_of(tokens, options.context),
        callbacks=[] if options.limit_s is None else [time_limit(options.limit_s)],
    )
    checkpoints.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    trainer.train(resume_from_checkpoint=trainer_utils.get_last_checkpoint(str(checkpoints)))
    state = trainer.state
    done = state.global_step >= state.max_steps
    print(
        f"step {state.global_step} of {state.max_steps}, {time.monotonic() - began:.0f} s,"
        f" {'done' if done else 'rerun to resume'}"
    )
    if done:
        model.to(torch.bfloat16 if gpu else torch.float32).save_pretrained(options.out)
        tokenizer.save_pretrained(options.out)
    return 0


def untrained_model(folder: Path, layers: int | None, seed: int) -> Any:
    """The model that `write` made, or another of so many layers with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    if layers is None:
        return AutoModelForCausalLM.from_pretrained(folder)
    config = AutoConfig.from_pretrained(
        folder, num_hidden_layers=layers, layer_types=["full_attention"] * layers
    )
    set_seed(seed)
    return AutoModelForCausalLM.from_config(config)


def rows_of(tokens: NDArray[np.uint16], context: int) -> Any:
    """A dataset of rows of `context` token ids, which are their own labels."""
    import torch

    class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return len(tokens) // context

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            row = np.asarray(tokens[index * context : (index + 1) * context], dtype=np.int64)
            ids = torch.from_numpy(row)
            return {"input_ids": ids, "labels": ids}

    return Rows()


def time_limit(limit_s: float) -> Any:
    """A callback that saves a checkpoint and stops after so many seconds."""
    from transformers import TrainerCallback

    began = time.monotonic()

    class TimeLimit(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if time.monotonic() - began > limit_s:
                control.should_save = control.should_training_stop = True

    return TimeLimit()


if __name__ == "__main__":
    raise SystemExit(main())
