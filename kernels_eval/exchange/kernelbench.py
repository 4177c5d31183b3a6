"""Results of KernelBench's run folders (ScalingIntelligence/KernelBench, commit 423217d,
`scripts/eval_from_generations.py`): `eval_results.json`, samples by problem. What our verdict adds
is in `metadata`; rows of other harnesses have a status, and no reason."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from kernels_eval.records import Row, Status, Verdict

RESULTS, CONFIG = "eval_results.json", "generation_config.yaml"
SAMPLE = "level_{level}_problem_{problem}_sample_{sample}_kernel.py"
TASK_ID = re.compile(r"kernelbench/L(?P<level>\d+)/(?P<problem>\d+)")
_NOT_COMPILED = (Status.COMPILE_ERROR, Status.NO_CODE)


def entry_of(verdict: Verdict, sample: int) -> dict[str, object]:
    """A verdict as an entry of `eval_results.json`; times in milliseconds."""
    timing = verdict.timing
    stats = {"median": timing.candidate_ms, "num_trials": timing.pairs} if timing else {}
    return {
        "sample_id": sample,
        "compiled": verdict.status not in _NOT_COMPILED,
        "correctness": verdict.correct_custom,
        "metadata": {
            "hardware": verdict.device,
            "device": verdict.device,
            "concur_status": verdict.status.value,
            "concur_reason": verdict.reason.value,
            "concur_detail": verdict.detail,
        },
        "runtime": timing.candidate_ms if timing else -1.0,
        "runtime_stats": stats,
        "ref_runtime": timing.reference_ms if timing else -1.0,
    }


def verdict_rows(results: Mapping[str, object], level: int) -> Iterator[dict[str, object]]:
    """Rows of `eval_results.json`, as tables of verdicts have them. Raises ValueError for another
    form.
    """
    for problem, held in results.items():
        for entry in held if isinstance(held, list) else [held]:
            if not problem.isdecimal() or not isinstance(entry, dict) or "compiled" not in entry:
                raise ValueError(f"problem {problem[:40]!r} has no list of samples")
            sample, told = int(entry.get("sample_id", 0)), entry.get("metadata") or {}
            own, reference = (float(entry.get(name) or 0) for name in ("runtime", "ref_runtime"))
            timed = 0 < own < math.inf and 0 < reference < math.inf  # neither -1 nor NaN
            yield {
                "candidate_id": SAMPLE.format(level=level, problem=problem, sample=sample)[:-3],
                "task_id": f"kernelbench/L{level}/{problem}",
                "sample_index": sample,
                "status": _status(entry, told).value,
                "reason": told.get("concur_reason"),
                "outputs_match": bool(entry.get("correctness")) or None,
                "device": str(told.get("hardware") or ""),
                "timing": {
                    "reference_ms": reference if timed else None,
                    "candidate_ms": own if timed else None,
                    "speedup": reference / own if timed else None,
                },
            }


def _status(entry: Row, told: Row) -> Status:
    if told.get("concur_status") in set(Status):
        return Status(told["concur_status"])
    if not entry["compiled"]:
        return Status.COMPILE_ERROR
    if entry.get("correctness"):
        return Status.CORRECT
    return Status.RUNTIME_ERROR if "runtime_error" in told else Status.INCORRECT
