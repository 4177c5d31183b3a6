"""Training examples: the rendered prompt and completion of curated rows, and which tokens carry
loss, with the small model's tokenizer."""

from __future__ import annotations

import tempfile
from typing import Any

from tests.support.oracle.inputs import Inputs, digest

ROWS = 60


def tokenizer(directory: str) -> Any:
    """Adapter: the small model's tokenizer, built of the bundled texts."""
    from tasks.models import load_tokenizer
    from tasks.sources import bundled
    from tasks.sources.small_model import SmallModelConfig, build_small_model

    shape = SmallModelConfig(
        vocab_size=2000, hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=64
    )
    return load_tokenizer(build_small_model(directory, bundled.texts(), shape))


def examples(rows: list[dict[str, Any]], tokens: Any) -> list[dict[str, Any]]:
    """Adapter: candidate_id, prompt, completion, input_ids, carries_loss by row."""
    from tasks.training.formatting import IGNORED, examples_of

    return [
        {
            "candidate_id": example.candidate_id,
            "prompt": example.prompt,
            "completion": example.completion,
            "input_ids": list(example.input_ids),
            "carries_loss": [label != IGNORED for label in example.labels],
        }
        for example in examples_of(rows, tokens)
    ]


def section(inputs: Inputs) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        found = examples(_rows(inputs), tokenizer(directory))
    return {
        example["candidate_id"]: {
            "prompt": digest(example["prompt"]),
            "completion": digest(example["completion"]),
            "tokens": len(example["input_ids"]),
            "input_ids": digest(str(example["input_ids"])),
            "with loss": sum(example["carries_loss"]),
            "carries_loss": digest(str([bool(each) for each in example["carries_loss"]])),
        }
        for example in found
    }


def _rows(inputs: Inputs) -> list[dict[str, Any]]:
    rows = []
    answers = inputs.table("qwq32b_candidates").head(ROWS)
    for number, answer in enumerate(answers.iter_rows(named=True)):
        thought, _, rest = answer["response"].partition("</think>")
        rows.append(
            {
                "candidate_id": f"c{number}",
                "task_id": f"{answer['level']}/{answer['problem_id']}",
                "prompt": f"Write a kernel for task {answer['problem_id']}.\n",
                "reasoning": thought,
                "answer": rest,
                "finish_reason": "length" if number % 7 == 0 else "stop",
            }
        )
    return rows
