"""What sections read: recorded tables, a finished workspace, and judged tables made of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from kernels_eval.records import STATUS_OF

DIGITS = 12
COPIES = 8
"""Samples that are made of one recorded answer."""
VARIANTS = 4
"""Tasks that are made of one recorded task."""
FAMILIES = ("aten.mm", "aten.relu", "aten.add", "aten.native_layer_norm", "aten.convolution")


class NotGiven(Exception):
    """A section needs data that was not given."""


@dataclass(frozen=True)
class Inputs:
    """Places of the data."""

    data: Path | None
    root: Path | None

    def table(self, name: str) -> pl.DataFrame:
        """A recorded table by its name without ".parquet"."""
        return pl.read_parquet(self.path(name))

    def path(self, name: str) -> Path:
        if self.data is None:
            raise NotGiven("--data (or CONCUR_ORACLE_DATA) is not given")
        file = Path(self.data) / f"{name}.parquet"
        if not file.is_file():
            raise NotGiven(f"{file} is not there")
        return file

    def workspace(self) -> Path:
        if self.root is None:
            raise NotGiven("--root is not given")
        return Path(self.root)

    @cached_property
    def judged(self) -> pl.DataFrame:
        """Verdicts joined with their candidates: two models, `COPIES` samples of each recorded
        answer, outcomes as they were recorded, speedups and lengths made of them."""
        answers = self.table("qwq32b_candidates")
        rows = [
            judged_row(answer, copy)
            for answer in answers.iter_rows(named=True)
            for copy in range(COPIES)
        ]
        return pl.DataFrame(rows, schema_overrides=SCHEMA, infer_schema_length=None)


RATIO = pl.Struct(dict.fromkeys(("speedup", "speedup_lower", "speedup_upper"), pl.Float64))
SCHEMA = {
    "timing": RATIO,
    "correctness": pl.Struct(dict.fromkeys(("kernelbench_1e2", "kernelbench_1e4"), pl.Boolean)),
    "custom_kernels": pl.List(pl.String),
    "reference_operators": pl.List(pl.String),
    "completion_tokens": pl.Int64,
}


def judged_row(answer: Mapping[str, Any], copy: int) -> dict[str, Any]:
    """One sample of a recorded answer. Copies differ in length, speed and, some, in outcome."""
    level, problem = answer["level"], answer["problem_id"]
    task = f"kernelbench/L{level}/{problem}-{copy % VARIANTS}"
    name = f"{task}/{answer['sample_id']}/{copy}"
    reason = _reason(answer, name)
    correct = reason == "ok"
    matches = correct or reason == "no_custom_kernel"
    reasoning = len(answer["response"].partition("</think>")[0]) // 4
    reasoning = max(1, int(reasoning * (0.7 + 0.6 * _share(name, "length"))))
    truncated = reason == "truncated"
    return {
        "candidate_id": digest(name),
        "task_id": task,
        "model": "second" if _share(name, "model") < 0.4 else "first",
        "generator": "QwQ-32B",
        "level": level,
        "language": "cuda",
        "sample_index": answer["sample_id"] * COPIES + copy,
        "turn": 1,
        "status": STATUS_OF[reason].value,
        "reason": reason,
        "outputs_match": matches,
        "correctness": {"kernelbench_1e2": matches, "kernelbench_1e4": correct},
        "custom_kernels": ["kernel"] if correct or _share(name, "custom") < 0.5 else [],
        "timing": _timing(answer, name) if correct else None,
        "reference_operators": _operators(level, problem),
        "reasoning_tokens": reasoning,
        "completion_tokens": reasoning + len(answer["extracted_code"] or "") // 4,
        "max_tokens": 16_384,
        "finish_reason": "length" if truncated else "stop",
        "finish_guessed": False,
        "device": "a GPU",
        "detail": "",
        "log_tail": "",
    }


def _reason(answer: Mapping[str, Any], name: str) -> str:
    luck = _share(name, "outcome")
    if luck < 0.05:
        return "truncated"
    if luck < 0.08:
        return "no_custom_kernel"
    if luck < 0.2:
        return "wrong_output"
    if luck < 0.25:
        return "ok"
    if not answer["recorded_compiled"]:
        return "build_failed"
    return "ok" if answer["recorded_correct"] else "wrong_output"


def _timing(answer: Mapping[str, Any], name: str) -> dict[str, float] | None:
    if _share(name, "timed") < 0.02:
        return None
    task_ms = 1 + 20 * _share(name.rsplit("/", 2)[0], "reference")
    candidate_ms = (answer["recorded_runtime_ms"] or 0) or 10.0
    speedup = task_ms / candidate_ms * math.exp(_share(name, "speed") - 0.5)
    return {
        "speedup": speedup,
        "speedup_lower": speedup * 0.95,
        "speedup_upper": speedup * 1.05,
    }


def _operators(level: int, problem: int) -> list[str]:
    first = FAMILIES[problem % len(FAMILIES)]
    return [first] if level == 1 else [first, "aten.relu", "aten.add"]


def _share(name: str, purpose: str) -> float:
    """A number in [0, 1) that depends on its arguments alone."""
    text = f"{purpose} {name}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:6]) / 2**48


def digest(text: str | None) -> str | None:
    """A short hash of a long text."""
    if text is None:
        return None
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def plain(value: Any) -> Any:
    """JSON of a result: numbers rounded, sequences as lists."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, bool) or value is None or isinstance(value, (str, int)):
        return value
    number = float(value)
    return float(f"{number:.{DIGITS}g}") if math.isfinite(number) else str(number)
