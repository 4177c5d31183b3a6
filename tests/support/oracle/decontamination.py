"""Tasks that the benchmark knows, tasks that repeat another, and kernels that repeat another."""

from __future__ import annotations

from typing import Any

import polars as pl

from tests.support.oracle.inputs import Inputs, digest


def tasks_of(source: str, location: str | None) -> pl.DataFrame:
    """Adapter: the tasks of a source with the graphs of their references."""
    from tasks.sources.config import TasksConfig
    from tasks.sources.stage import load_tasks
    from tasks.workload.stage import annotate

    split = "all" if source == "bundled" else "train"
    config = TasksConfig.model_validate({"source": source, "location": location, "split": split})
    frame = pl.DataFrame([task.model_dump() for task in load_tasks(config)])
    return annotate(frame)


def known_to(tasks: pl.DataFrame, benchmark: pl.DataFrame) -> dict[str, str]:
    """Adapter: the benchmark task that a training task equals, by training task."""
    from tasks.decontamination.config import DecontaminationConfig
    from tasks.decontamination.decontamination import decontaminate

    removed = decontaminate(tasks, benchmark, DecontaminationConfig()).removed
    return dict(removed.select("task_id", "benchmark_task_id").iter_rows())


def repeated(tasks: pl.DataFrame) -> dict[str, str]:
    """Adapter: the task that stays, by the task that repeats it."""
    from tasks.decontamination.config import DeduplicationConfig
    from tasks.decontamination.deduplication import deduplicate_tasks

    removed = deduplicate_tasks(tasks, DeduplicationConfig()).removed
    return dict(removed.select("id", "equals").iter_rows())


def repeated_kernels(samples: pl.DataFrame) -> dict[str, str]:
    """Adapter: the candidate that stays, by the candidate whose kernel repeats it."""
    from tasks.decontamination.config import DeduplicationConfig
    from tasks.decontamination.deduplication import deduplicate_samples

    removed = deduplicate_samples(samples, DeduplicationConfig()).removed
    return dict(removed.select("id", "equals").iter_rows())


def section(inputs: Inputs) -> Any:
    kernelbench = tasks_of("kernelbench", str(inputs.path("kernelbench")))
    kernelbook = tasks_of("kernelbook", str(inputs.path("kernelbook_sample")))
    bundled = tasks_of("bundled", None)
    return {
        "kernelbook in kernelbench": known_to(kernelbook, kernelbench),
        "bundled in kernelbench": known_to(bundled, kernelbench),
        "kernelbench level 1 in levels 2 and 3": known_to(
            kernelbench.filter(level=1), kernelbench.filter(pl.col("level") > 1)
        ),
        "repeated in kernelbench": repeated(kernelbench),
        "repeated kernels": repeated_kernels(_kernels(inputs)),
    }


def _kernels(inputs: Inputs) -> pl.DataFrame:
    """Recorded kernels, of each task one once more under another comment."""
    answers = inputs.table("qwq32b_candidates").filter(pl.col("level") == 1)
    rows = []
    for answer in answers.iter_rows(named=True):
        task = f"{answer['level']}/{answer['problem_id']}"
        name, code = f"{task}/{answer['sample_id']}", answer["extracted_code"]
        rows.append({"candidate_id": digest(name), "task_id": task, "code": code})
        if code and answer["sample_id"] == 0:
            again = f"# another comment\n{code}\n"
            rows.append({"candidate_id": digest(f"{name} again"), "task_id": task, "code": again})
    return pl.DataFrame(rows)
