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
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.grouping import grouped
from tasks.synthesis.prompts import block
from tasks.synthesis.refine import MOST_CODE, bounded

if TYPE_CHECKING:
    from tasks.synthesis.config import ContrastConfig

CONTRAST_VERSION = 1
"""Raised with every change of the wording or the selection."""
COLUMNS = pl.Schema({"task_id": pl.String, "code": pl.String, "speedup": pl.Float64})
CONTRAST = """\
{prompt}
Here are earlier modules for this program, all of them right, with their speedup over the original:

{kernels}

First compare them: say which is faster, and why. Then write a module that is faster than each of \
them. Everything above still holds; answer with the complete module in a single code block.
"""


class Kernel(NamedTuple):
    """An earlier kernel; `speedup` is above 0."""

    speedup: float
    code: str


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


def contrast_prompts(prompts: Mapping[str, str], config: ContrastConfig) -> dict[str, str]:
    """Prompts by task_id, each as `contrast_prompt` makes it. Raises UsageError."""
    kernels = read_kernels(config.kernels)
    return {
        task_id: contrast_prompt(prompt, kernels.get(task_id, ()), config)
        for task_id, prompt in prompts.items()
    }


def contrast_prompt(prompt: str, kernels: Sequence[Kernel], config: ContrastConfig) -> str:
    """The prompt with `config.shown` of the kernels, the slowest first; as it is without any."""
    shown = sorted(chosen(kernels, config, prompt))
    return compared(prompt, shown) if shown else prompt


def compared(prompt: str, shown: Sequence[Kernel]) -> str:
    """The prompt with all of these kernels, in their order."""
    told = "\n\n".join(
        f"Speedup {each.speedup:.3g}:\n\n{block(bounded(each.code, MOST_CODE, paths=True))}"
        for each in shown
    )
    return CONTRAST.format(prompt=prompt, kernels=told)


def chosen(kernels: Sequence[Kernel], config: ContrastConfig, salt: str) -> list[Kernel]:
    """One kernel of each of `config.shown` buckets; fewer where there are fewer buckets."""
    draw = random.Random(f"{config.seed} {salt}")
    buckets = grouped((math.floor(2 * math.log2(each.speedup)), each) for each in kernels)
    means = {key: mean(each.speedup for each in bucket) for key, bucket in buckets.items()}
    found = []
    for _ in range(min(config.shown, len(buckets))):
        best = max(means.values())  # exp of differences alone: no overflow
        weights = [math.exp((value - best) / config.temperature) for value in means.values()]
        (key,) = draw.choices(list(means), weights)
        del means[key]
        found.append(draw.choice(buckets[key]))
    return found
