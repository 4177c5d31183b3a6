"""Steps of reinforcement on one machine: TRL's GRPO with answers by vLLM, or by the trainer itself.

    python -m benchmarks.reinforcement --shape qwen-0.5b --vllm colocate --steps 4 --out DIR
    python -m benchmarks.reinforcement --shape small --vllm none --steps 2 --out DIR   # on a CPU

Calls `tasks.training.grpo.reinforce` as `concur reinforce` does, with a model of random weights
made in --out, a new adapter of rank 32, and prompts of the bundled tasks. No kernel is verified: an
answer is called correct where its first letter is in the first half of the alphabet. Of each step
it tells seconds, reward, and where vLLM writes the answers the ratio of the trainer's probabilities
to vLLM's, which TRL corrects by. Says nothing about learning kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving import SHAPES, model_directory
from kernels_eval.errors import EvalError
from kernels_eval.records import Language, Verdict
from tasks.sources import bundled
from tasks.synthesis.prompts import render
from tasks.training.recipe import PROJECTIONS, ReinforceRecipe

TASKS, SAMPLES = 4, 8
TOLD = ("step", "seconds", "reward", "frac_reward_zero_std", "grad_norm")
RATIO = "sampling/"
"""What TRL says of vLLM's probabilities begins so."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--vllm", default="none", help="none, colocate, or a server's address")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        rows = steps(arguments)
    except EvalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for row in rows:
        print(json.dumps(row))
    return 0


def steps(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a step; written to --out."""
    from tasks.training.grpo import reinforce

    out = arguments.out
    tasks = bundled.load("train")[:TASKS]
    prompts = {task.task_id: render(task, Language.CUDA) for task in tasks}
    base = model_directory(out / "model", arguments.shape, list(prompts.values()))
    adapter = with_weights(base, out / "adapter")
    recipe = ReinforceRecipe(
        reward="kevin",
        steps=arguments.steps,
        tasks_per_step=TASKS,
        samples_per_task=SAMPLES,
        batch_size=SAMPLES,
        max_tokens=arguments.max_tokens,
        vllm=arguments.vllm,
    )
    rows: list[dict[str, Any]] = []
    began = time.monotonic()

    def note(entry: dict[str, Any]) -> None:
        nonlocal began
        now = time.monotonic()
        kept = {name: value for name, value in entry.items() if name in TOLD or RATIO in name}
        rows.append({"seconds": round(now - began, 2), **kept})
        began = now
        (out / "steps.json").write_text(json.dumps(rows, indent=1))

    reinforce(prompts, recipe, base, adapter, out / "run", judge, note)
    return rows


def with_weights(directory: Path, adapter_dir: Path) -> Path:
    """Write random weights beside a model's config.json, and a new adapter of it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    with torch.device("cuda" if gpu else "cpu"):
        config = AutoConfig.from_pretrained(directory)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if gpu else None)
    model.save_pretrained(directory)
    lora = LoraConfig(r=32, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM")
    get_peft_model(model, lora).save_pretrained(adapter_dir)
    return adapter_dir


def judge(task_ids: Sequence[str], answers: Sequence[str]) -> list[Any]:
    """Verdicts by the first letter of each answer."""
    from tasks.training.grpo import Judged

    judged = []
    for number, (task_id, answer) in enumerate(zip(task_ids, answers, strict=True)):
        letter = next((each for each in answer.lower() if each.isascii() and each.isalpha()), "z")
        good = letter < "n"
        verdict = Verdict(
            candidate_id=str(number),
            task_id=task_id,
            language=Language.CUDA,
            status="correct" if good else "incorrect",
            reason="ok" if good else "wrong_output",
        )
        judged.append(Judged(verdict, ""))
    return judged


if __name__ == "__main__":
    sys.exit(main())
