"""Contrastive prompts: earlier kernels of a task stand in its prompt with their speedups, and the
generator is asked to compare them before it writes a faster one.

Source: Li et al., "CUDA-L1: Improving CUDA Optimization via Contrastive Reinforcement Learning",
arXiv:2507.14111, section 2.4: kernels are sorted into buckets by speedup, distinct buckets are
drawn with a softmax of their mean speedups, and one kernel is shown of each, two in the paper. Read
in summaries by others: the width of a bucket (here half a doubling) and the temperature (1) are
ours, and so is the wording.

Guarantees: the same file, task and seed give the same prompt, character for character; it begins
with the task's own prompt. A kernel is quoted as in a follow-up: in a fence that nothing inside can
close, without control characters and marks of a chat template. A task without earlier kernels keeps
its prompt. Does not check that a kernel is correct: give those that the verifier found to be.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import polars as pl
from pydantic import PositiveFloat, PositiveInt

from kernels_eval.errors import UsageError
from kernels_eval.grouping import grouped
from kernels_eval.records import Record
from tasks.synthesis.earlier import Kernel, with_earlier_kernels

CONTRAST_VERSION = 1
"""Raised with every change of the wording or the selection."""
COLUMNS = pl.Schema({"task_id": pl.String, "code": pl.String, "speedup": pl.Float64})


class ContrastOptions(Record):
    """`synthesis.options` of the sampler `contrast`."""

    sampler: str
    """who is asked, with all other settings of `synthesis`: openai, vllm, transformers"""
    kernels: str
    """a .parquet or .jsonl file of correct kernels: task_id, code, speedup"""
    shown: PositiveInt = 2
    """kernels in a prompt, each from another range of speedups"""
    temperature: PositiveFloat = 1.0
    """lower: the fastest ranges are drawn more often"""
    seed: int = 0
    """another one shows others"""


def read_kernels(path: str) -> Mapping[str, list[Kernel]]:
    """The earlier kernels of each task, from a Parquet or JSON lines file with the columns
    `COLUMNS`; rows without a code or a speedup above 0 are left out. Raises UsageError."""
    read = pl.read_parquet if Path(path).suffix == ".parquet" else pl.read_ndjson
    try:
        rows = read(Path(path)).select(*COLUMNS).cast(COLUMNS)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UsageError(
            f"{path}, the earlier kernels, cannot be read: {error}",
            f"give a .parquet or .jsonl file with the columns {', '.join(COLUMNS)}",
        ) from error
    return grouped(
        (task_id, Kernel(speedup, code))
        for task_id, code, speedup in rows.unique(maintain_order=True).iter_rows()
        if code and speedup and 0 < speedup < math.inf
    )


def contrast_prompt(prompt: str, kernels: Sequence[Kernel], options: ContrastOptions) -> str:
    """The prompt with `options.shown` of the kernels, the slowest first; as it is without any."""
    shown = sorted(chosen(kernels, options, prompt))
    return with_earlier_kernels(prompt, shown) if shown else prompt


def chosen(kernels: Sequence[Kernel], options: ContrastOptions, salt: str) -> list[Kernel]:
    """One kernel of each of `options.shown` buckets; fewer where there are fewer buckets."""
    draw = random.Random(f"{options.seed} {salt}")
    buckets = grouped((math.floor(2 * math.log2(each.speedup)), each) for each in kernels)
    means = {key: mean(each.speedup for each in bucket) for key, bucket in buckets.items()}
    found = []
    for _ in range(min(options.shown, len(buckets))):
        best = max(means.values())  # exp of differences alone: no overflow
        weights = [math.exp((value - best) / options.temperature) for value in means.values()]
        (key,) = draw.choices(list(means), weights)
        del means[key]
        found.append(draw.choice(buckets[key]))
    return found
