"""verifiers 0.4 (`verifiers.v1`): a taskset of kernels, with a reward.

A fault of machine or task raises: the trace records an error without a reward.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf

from kernels_eval.errors import UsageError
from kernels_eval.service.adapters.scoring import shared_scorer


class KernelData(vf.TaskData):
    row: dict[str, object]
    """what names the task for the verifier"""


class KernelTaskConfig(vf.TaskConfig):
    recipe: str = "concur"
    url: str | None = None


class KernelTask(vf.Task[KernelData, vf.State, KernelTaskConfig]):
    """Write a kernel: the last reply is judged."""

    @vf.reward
    async def kernel(self, trace: vf.Trace) -> float:
        scorer = shared_scorer(self.config.recipe, self.config.url)
        score = await scorer.score(self.data.row, trace.last_reply)
        earned = score.earned()
        trace.record_metrics(score.facts)
        return earned


class KernelTasksetConfig(vf.TasksetConfig):
    path: Path = Path("tasks.jsonl")
    """one JSON object a line: `prompt`, and the fields that name a task"""
    task: KernelTaskConfig = KernelTaskConfig()


class KernelTaskset(vf.Taskset[KernelTask, KernelTasksetConfig]):
    """The tasks of a file."""

    def load(self) -> Iterator[KernelTask]:
        with self.config.path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = dict(json.loads(line))
                    data = KernelData(prompt=row.pop("prompt"), id=row.get("task_id"), row=row)
                except (ValueError, LookupError, TypeError) as error:
                    where = f"{self.config.path}, line {number}: {error!r}"
                    raise UsageError(where, "each line is an object with a prompt") from error
                yield KernelTask(data, self.config.task)
