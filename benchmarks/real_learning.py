"""Real weights that learn from real candidates: the line's own trainer on a small pretrained model,
with the loss on tasks it never saw.

    python -m benchmarks.real_learning prepare --gguf SmolLM2-135M-Instruct.gguf --responses
    qwq32b_candidates.parquet \ --tasks kernelbench.parquet --out DIR python -m
    benchmarks.real_learning run --data DIR --out RUN --max-length 8192

`prepare` makes the base model of a GGUF file (dequantised, bfloat16, with its own tokenizer and
chat template) and the rows: responses whose recorded verdict is `correct`, taken apart by the
line's parser, with the prompt that the line renders for their task. `run` trains on one GPU or on
the CPU, once per --variant, and writes results.json and page.md: how many rows there are and which
are too long, the loss on held-out tasks before the first step and after each epoch, texts of base
and tuned model, and whether merged weights agree.

The tasks are KernelBench's own: an adapter of this run must not be scored on KernelBench.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kernels_eval.errors import EvalError

# the paper's recipe, and one with steps that a model of 135M parameters and some twenty steps an
# epoch can show something with
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "steep": {"learning_rate": 1e-3, "num_epochs": 6},
    "steep_plain": {"learning_rate": 1e-3, "num_epochs": 6, "acceleration": "off"},
    # for a CPU, where a row takes a minute: every row is a step, and none of the few is spent
    # warming up
    "few": {
        "learning_rate": 2e-3,
        "num_epochs": 2,
        "gradient_accumulation": 1,
        "warmup_share": 0.0,
    },
}
DEFAULT_VARIANTS = ("paper", "steep")
ROWS, BASE = "rows.parquet", "base"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    prepared = commands.add_parser("prepare")
    prepared.add_argument("--gguf", required=True, type=Path, help="the base model's file")
    prepared.add_argument("--responses", required=True, help="recorded responses, Parquet")
    prepared.add_argument("--tasks", required=True, help="their KernelBench tasks, Parquet")
    prepared.add_argument("--out", required=True, type=Path)
    ran = commands.add_parser("run")
    ran.add_argument("--data", required=True, type=Path, help="what prepare wrote")
    ran.add_argument("--out", required=True, type=Path)
    ran.add_argument(
        "--device",
        choices=["auto", "cpu"],
        default="auto",
        help="auto: the one GPU that is visible, else the CPU",
    )
    ran.add_argument(
        "--max-length",
        type=int,
        default=8192,
        help="tokens of prompt and completion; longer rows are listed and left out",
    )
    ran.add_argument("--held-out-tasks", type=int, default=15)
    ran.add_argument(
        "--limit-rows",
        type=int,
        default=None,
        help="train on the shortest so many rows, for a rehearsal",
    )
    ran.add_argument(
        "--limit-held-out", type=int, default=None, help="and evaluate on the shortest so many"
    )
    ran.add_argument("--epochs", type=int, default=None, help="in place of the variant's")
    ran.add_argument(
        "--variant",
        action="append",
        choices=sorted(VARIANTS),
        help="repeat for several  [default: paper, steep]",
    )
    ran.add_argument(
        "--samples", type=int, default=2, help="held-out tasks that base and tuned model answer"
    )
    ran.add_argument("--sample-tokens", type=int, default=200)
    measured = commands.add_parser(
        "measure", help="loss of base model and adapter on further tasks: forward passes only"
    )
    measured.add_argument("--data", required=True, type=Path)
    measured.add_argument("--adapter", required=True, type=Path)
    measured.add_argument(
        "--without", required=True, help="tasks that were trained on, with commas between"
    )
    measured.add_argument(
        "--tasks",
        type=int,
        default=5,
        help="the shortest row of so many other tasks, shortest first",
    )
    given = parser.parse_args()
    try:
        return {"prepare": prepare, "run": run, "measure": measure}[given.command](given)
    except EvalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


# -- prepare ---------------------------------------------------------------------------------------


def prepare(given: argparse.Namespace) -> int:
    given.out.mkdir(parents=True, exist_ok=True)
    base = dequantised(given.gguf, given.out / BASE)
    frame = correct_rows(given.responses, given.tasks, base)
    frame.write_parquet(given.out / ROWS)
    print(f"{frame.height} rows of {frame['task_id'].n_unique()} tasks, base model {base}")
    return 0


def dequantised(gguf: Path, directory: Path) -> Path:
    """The model of a GGUF file as a directory that everything loads: bfloat16 safetensors and the
    tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if (directory / "config.json").is_file():
        return directory
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory)
    return directory


def correct_rows(responses: str, tasks: str, base: Path):
    """Rows of the curated schema, as far as training and this page read it. All correct ones: the
    paper's criteria ask for a speedup, and the records hold no time of the reference."""
    import polars as pl

    from tasks.sources.config import TasksConfig
    from tasks.sources.small_model import count_tokens
    from tasks.sources.stage import load_tasks
    from tasks.synthesis.parsing import parse_response

    known = {
        task.task_id: task for task in load_tasks(TasksConfig(source="kernelbench", location=tasks))
    }
    rows, unusable = [], Counter()
    for row in (
        pl.read_parquet(responses)
        .filter(pl.col("recorded_correct"))
        .sort("level", "problem_id", "sample_id")
        .iter_rows(named=True)
    ):
        task = known[f"kernelbench/L{row['level']}/{row['problem_id']}"]
        parsed = parse_response(row["response"])
        if parsed.code is None:
            unusable[parsed.parse_reason] += 1
            continue
        rows.append(
            {
                "candidate_id": f"{task.task_id}#{row['sample_id']}",
                "task_id": task.task_id,
                "task_name": task.name,
                "task_code": task.code,
                "entry_point": task.entry_point,
                "language": "cuda",
                "generator": row["model"],
                "reasoning": parsed.reasoning,
                "answer": parsed.answer,
                "code": parsed.code,
            }
        )
    print(f"recorded as correct but without code for the parser: {dict(unusable)}")
    tokens = count_tokens(base, [row["reasoning"] for row in rows])
    return pl.DataFrame(rows).with_columns(pl.Series("reasoning_tokens", tokens, dtype=pl.Int64))


# -- run -------------------------------------------------------------------------------------------


def run(given: argparse.Namespace) -> int:
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import polars as pl

    from tasks.sources.small_model import load_tokenizer
    from tasks.training.evaluation import EvaluationConfig, split_by_task
    from tasks.training.formatting import select_examples, to_prompt_completion

    given.out.mkdir(parents=True, exist_ok=True)
    base, rows = given.data / BASE, list(pl.read_parquet(given.data / ROWS).iter_rows(named=True))
    tokenizer = load_tokenizer(base)
    rows = [row | {"prompt": prompt_of(row)} for row in rows]
    examples = to_prompt_completion(rows, tokenizer)
    lengths = {
        example["candidate_id"]: example["prompt_tokens"] + example["completion_tokens"]
        for example in examples
    }
    kept, dropped = select_examples(
        examples, tokenizer, max_length=given.max_length, overlong="drop"
    )
    fit = {example["candidate_id"] for example in kept}
    split = split_by_task(
        [row for row in rows if row["candidate_id"] in fit],
        EvaluationConfig(tasks=given.held_out_tasks),
    )
    training, held_out = (
        shortest(side, lengths, limit)
        for side, limit in zip(split, (given.limit_rows, given.limit_held_out), strict=True)
    )
    results: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "max_length": given.max_length,
        "rows": {"correct": len(rows), "tasks": len({row["task_id"] for row in rows})},
        "lengths": quantiles(list(lengths.values())),
        "dropped": [item.model_dump() for item in dropped],
        "training": {"rows": len(training), "tasks": len({row["task_id"] for row in training})},
        "held_out": {"rows": len(held_out), "tasks": sorted({row["task_id"] for row in held_out})},
        "runs": {},
    }
    print(
        json.dumps(
            {name: value for name, value in results.items() if name not in ("dropped", "runs")},
            indent=1,
        ),
        flush=True,
    )
    by_id = {example["candidate_id"]: example for example in kept}
    first = {row["task_id"]: row for row in reversed(held_out)}  # one row of each task
    shown = [
        (task_id, row["task_name"], by_id[row["candidate_id"]])
        for task_id, row in sorted(first.items())
    ][: given.samples]
    for variant in given.variant or DEFAULT_VARIANTS:
        results["runs"][variant] = one_run(
            given,
            variant,
            base,
            training,
            held_out,
            shown,
        )
        (given.out / "results.json").write_text(json.dumps(results, indent=1))
    results["before"] = texts(base, None, shown, given.sample_tokens)
    (given.out / "results.json").write_text(json.dumps(results, indent=1))
    (given.out / "page.md").write_text(page(results))
    print(page(results))
    return 0


def one_run(
    given: argparse.Namespace,
    variant: str,
    base: Path,
    training: list,
    held_out: list,
    shown: list,
) -> dict[str, Any]:
    """Train one variant from the base model on; what came of it, as plain data."""
    from tasks.training.adapter import check_adapter, merge_adapter
    from tasks.training.card import write_card
    from tasks.training.evaluation import EvaluationConfig
    from tasks.training.recipe import TrainingRecipe
    from tasks.training.trainer import train

    # the same tasks as in `run`: they are those with the smallest hashes of all
    evaluation = EvaluationConfig(tasks=len({row["task_id"] for row in held_out}))
    changes = {
        "base_model": str(base),
        "max_length": given.max_length,
        "evaluation": evaluation,
        **VARIANTS[variant],
    }
    if given.epochs:
        changes["num_epochs"] = given.epochs
    recipe = TrainingRecipe(**changes)
    print(f"variant {variant}: {VARIANTS[variant] or 'the recipe as it is'}", flush=True)
    out, started = given.out / variant, time.monotonic()

    def show(entry: dict[str, float]) -> None:
        print(
            f"{time.monotonic() - started:7.1f} s  step {entry['step']:.0f}  loss"
            f" {entry['loss']:.4f}",
            flush=True,
        )

    result = train([*training, *held_out], recipe, base, out, show)
    for entry in result.held_out:
        print(
            f"held out, after step {entry['step']} (epoch {entry['epoch']:g}): {entry['loss']:.4f}",
            flush=True,
        )
    facts = check_adapter(result.adapter_dir)
    probes = [example["completion"] for _, _, example in shown]  # prompts begin alike
    merged = {}
    for dtype in ("float32", "bfloat16"):
        try:
            merged[dtype] = merge_adapter(
                base,
                result.adapter_dir,
                out / f"merged-{dtype}",
                probes,
                dtype=dtype,
                tolerance=1.0,
            ).model_dump()
        except EvalError as error:
            merged[dtype] = {"refused": str(error)}
    told = recipe.model_dump(mode="json") | {"base_model": "SmolLM2-135M-Instruct"}
    write_card(
        result,
        recipe,
        facts,
        name=f"learned-{variant}",
        base_model="SmolLM2-135M-Instruct",
        curated="recorded",
    )
    for directory in (
        "merged-float32",
        "merged-bfloat16",
        "checkpoints",
    ):  # large, and their figures are told
        shutil.rmtree(out / directory, ignore_errors=True)
    return {
        "recipe": told,
        "steps": result.steps,
        "tokens": result.tokens,
        "seconds": result.seconds,
        "loss_first": result.loss_first,
        "loss_last": result.loss_last,
        "history": list(result.history),
        "held_out": result.held_out,
        "adapter": facts.model_dump() | {"base_model": "SmolLM2-135M-Instruct"},
        "merged": merged,
        "after": texts(base, result.adapter_dir, shown, given.sample_tokens),
    }


def measure(given: argparse.Namespace) -> int:
    """A line per row: its loss under the base model and with the adapter, float32; and over all
    their completion tokens."""
    import polars as pl
    import torch

    from tasks.sources.small_model import load_causal_model, load_tokenizer
    from tasks.training.formatting import label_mask, select_examples, to_prompt_completion

    base, known = given.data / BASE, set(given.without.split(","))
    tokenizer = load_tokenizer(base)
    rows = [
        row
        for row in pl.read_parquet(given.data / ROWS).iter_rows(named=True)
        if row["task_id"] not in known
    ]
    examples, _ = select_examples(
        to_prompt_completion([row | {"prompt": prompt_of(row)} for row in rows], tokenizer),
        tokenizer,
        max_length=8192,
        overlong="drop",
    )
    of_task: dict[str, Any] = {}
    for example in sorted(
        examples, key=lambda example: example["prompt_tokens"] + example["completion_tokens"]
    ):
        of_task.setdefault(example["candidate_id"].partition("#")[0], example)
    models = [
        load_causal_model(base, dtype=torch.float32, adapter=adapter)
        for adapter in (None, given.adapter)
    ]
    sums, tokens = [0.0, 0.0], 0
    for example in list(of_task.values())[: given.tasks]:
        ids, carries = label_mask(example, tokenizer)
        count, losses = sum(carries), []
        for model in models:
            with (
                torch.inference_mode()
            ):  # the output projection is as large as the rest: only where there is loss
                logits = model(
                    input_ids=torch.tensor([ids[:-1]]), use_cache=False, logits_to_keep=count
                ).logits[0]
                losses.append(
                    float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[-count:])))
                )
        sums, tokens = (
            [total + loss * count for total, loss in zip(sums, losses, strict=True)],
            tokens + count,
        )
        print(
            f"| {example['candidate_id']} | {count:,} | {losses[0]:.4f} | {losses[1]:.4f} |",
            flush=True,
        )
    print(f"| all | {tokens:,} | {sums[0] / tokens:.4f} | {sums[1] / tokens:.4f} |")
    return 0


def prompt_of(row: Any) -> str:
    from kernels_eval.records import KernelTask, Language
    from tasks.synthesis.prompts import render

    task = KernelTask(
        task_id=row["task_id"],
        name=row["task_name"],
        code=row["task_code"],
        entry_point=row["entry_point"],
    )
    return render(task, Language(row["language"]))


def shortest(rows: list, lengths: dict[str, int], limit: int | None) -> list:
    if limit is None:
        return rows
    chosen = {
        row["candidate_id"]
        for row in sorted(rows, key=lambda row: lengths[row["candidate_id"]])[:limit]
    }
    return [row for row in rows if row["candidate_id"] in chosen]


def texts(base: Path, adapter: Path | None, shown: list, tokens: int) -> list[dict[str, str]]:
    """What a model writes for the held-out prompts: greedy, so that nothing but the weights
    decides."""
    import torch

    from tasks.sources.small_model import load_causal_model, load_tokenizer

    gpu = torch.cuda.is_available()
    tokenizer = load_tokenizer(base)
    model = load_causal_model(
        base, dtype=torch.bfloat16 if gpu else torch.float32, adapter=adapter
    ).to("cuda" if gpu else "cpu")
    found = []
    for task_id, name, example in shown:
        encoded = tokenizer(example["prompt"], return_tensors="pt", add_special_tokens=False).to(
            model.device
        )
        with torch.inference_mode():
            out = model.generate(
                **encoded,
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.eos_token_id,
            )
        text = tokenizer.decode(out[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
        found.append({"task_id": task_id, "name": name, "text": text})
    return found


def machine() -> dict[str, Any]:
    import torch

    from tasks.store.snapshot import tool_versions

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "device": gpu or f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s)",
        "python": platform.python_version(),
    } | {
        name: version
        for name, version in tool_versions().items()
        if name in ("torch", "transformers", "trl", "peft")
    }


def quantiles(values: list[int]) -> dict[str, int]:
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return {
        "min": min(values),
        "5 %": round(cuts[0]),
        "50 %": round(cuts[9]),
        "95 %": round(cuts[18]),
        "max": max(values),
    }


# -- the page --------------------------------------------------------------------------------------


def page(results: dict[str, Any]) -> str:
    """results.json in words."""
    lines = [
        f"{results['rows']['correct']} responses that were recorded as correct, to"
        f" {results['rows']['tasks']} tasks. Tokens of prompt and completion: "
        + ", ".join(f"{name} {value:,}" for name, value in results["lengths"].items())
        + ".",
        (
            f"Limit {results['max_length']:,} tokens: {len(results['dropped'])} rows left out, none"
            f" truncated. Rows trained on: {results['training']['rows']}, of"
            f" {results['training']['tasks']} tasks. Rows held out: {results['held_out']['rows']},"
            f" of {len(results['held_out']['tasks'])} other tasks"
            f" ({', '.join(results['held_out']['tasks'])})."
        ),
        "Machine: "
        + ", ".join(f"{name} {value}" for name, value in results["machine"].items())
        + ".",
    ]
    for variant, entry in results["runs"].items():
        recipe = entry["recipe"]
        lines += [
            "",
            (
                f"## Variant {variant}: learning rate {recipe['learning_rate']:g},"
                f" {recipe['num_epochs']} epochs, rank {recipe['lora_rank']}"
            ),
            "",
            "| after step | epoch | held-out loss |",
            "| ---: | ---: | ---: |",
            *(
                f"| {loss['step']} | {loss['epoch']:g} | {loss['loss']:.4f} |"
                for loss in entry["held_out"]
            ),
            "",
            (
                f"Training loss {entry['loss_first']:.4f} over the first epoch,"
                f" {entry['loss_last']:.4f} over the last. {entry['steps']} steps,"
                f" {entry['tokens']:,} tokens, {entry['seconds']:.0f} s with loading and"
                " evaluation."
            ),
            "",
            (
                "| merged in | adapter changes a logit by | merging by | share | KL, nats | same"
                " likeliest token |"
            ),
            "| --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for dtype, check in entry["merged"].items():
            if "refused" in check:
                lines.append(f"| {dtype} | refused: {check['refused']} | | | | |")
                continue
            lines.append(
                f"| {dtype} | {check['effect_rms']:.3g} | {check['difference_rms']:.2g} |"
                f" {check['difference_rms'] / check['effect_rms']:.2%} | {check['kl_nats']:.1g} |"
                f" {check['same_top_token']:.2%} |"
            )
    lines += ["", "## Texts for held-out tasks, greedy, cut"]
    for index, before in enumerate(results.get("before", ())):
        answers = {"base": before["text"]} | {
            name: entry["after"][index]["text"] for name, entry in results["runs"].items()
        }
        lines += ["", f"### {before['task_id']} ({before['name']})"]
        for name, text in answers.items():
            lines += ["", f"{name}:", "", "````text", text.strip() or "(nothing)", "````"]
    lines += ["", "## Rows left out", ""]
    for reason, count in Counter(item["reason"] for item in results["dropped"]).items():
        named = [
            f"{item['candidate_id']} {item['tokens']:,}"
            for item in results["dropped"]
            if item["reason"] == reason
        ]
        lines += [f"{reason}, {count}, with their tokens: {'; '.join(named)}.", ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
