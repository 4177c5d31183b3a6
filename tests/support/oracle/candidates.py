"""Identities of candidates: what synthesis makes of recorded answers, in bundled and public
tasks."""

from __future__ import annotations

import tempfile
from typing import Any

import polars as pl

from tests.support.oracle.inputs import Inputs, digest

KEPT = ("task_id", "sample_index", "candidate_id", "prompt_hash", "code", "parse_reason")


def synthesised(root: str, tasks: dict[str, Any], synthesis: dict[str, Any], language: str) -> Any:
    """Adapter: rows of candidates, with the columns `KEPT`."""
    from kernels_eval.languages import registered
    from tasks.sources.config import TasksConfig
    from tasks.sources.stage import run as load
    from tasks.synthesis.config import SynthesisConfig
    from tasks.synthesis.stage import run

    ref = load(TasksConfig.model_validate(tasks), root)
    config = SynthesisConfig.model_validate(synthesis)
    return run(ref, config, registered()[language]).open().read(columns=list(KEPT))


def section(inputs: Inputs) -> Any:
    recorded = {"sampler": "recorded", "samples_per_task": 4}
    found = {}
    with tempfile.TemporaryDirectory() as root:
        frame = synthesised(root, {"source": "bundled", "split": "all"}, recorded, "cpp")
        found["bundled"] = _rows(frame)
    tasks = {"source": "kernelbench", "location": str(inputs.path("kernelbench"))}
    answers = recorded | {"responses": str(inputs.path("qwq32b_candidates"))}
    with tempfile.TemporaryDirectory() as root:
        found["QwQ-32B"] = _rows(synthesised(root, tasks, answers, "cuda"))
    return found


def _rows(frame: pl.DataFrame) -> dict[str, list[Any]]:
    found = {}
    for task, index, candidate, prompt, code, reason in frame.select(KEPT).iter_rows():
        found[f"{task} {index}"] = [candidate, digest(prompt), digest(code), reason]
    return found
