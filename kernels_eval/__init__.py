"""The trust boundary: runs kernels that nobody trusts and says what they are worth.

`kernels_eval.evaluate(task, candidate)` gives the Verdict of one candidate, `kernels_eval.Pool`
those of many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels_eval.cluster.pool import Pool as Pool
    from kernels_eval.config import EvalConfig as EvalConfig
    from kernels_eval.evaluator import Evaluator as Evaluator
    from kernels_eval.evaluator import evaluate as evaluate
    from kernels_eval.records import Candidate as Candidate
    from kernels_eval.records import KernelTask as KernelTask
    from kernels_eval.records import Language as Language
    from kernels_eval.records import Verdict as Verdict

_HOMES = {
    "evaluate": "evaluator",
    "Evaluator": "evaluator",
    "Pool": "pool",
    "EvalConfig": "config",
    "Candidate": "records",
    "KernelTask": "records",
    "Language": "records",
    "Verdict": "records",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kernels_eval' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"kernels_eval.{_HOMES[name]}"), name)
