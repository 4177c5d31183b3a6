"""The trust boundary: runs untrusted kernels and verifies them. `evaluate(task, candidate)` gives
the Verdict of one candidate, `Pool` those of many.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels_eval.config import EvalConfig
    from kernels_eval.evaluator import Evaluator, evaluate
    from kernels_eval.pool.pool import Pool
    from kernels_eval.records import Candidate, KernelTask, Language, Verdict

__all__ = [
    "Candidate",
    "EvalConfig",
    "Evaluator",
    "KernelTask",
    "Language",
    "Pool",
    "Verdict",
    "evaluate",
]
_HOMES = {
    "EvalConfig": "config",
    "Evaluator": "evaluator",
    "Pool": "pool.pool",
    "evaluate": "evaluator",
}


# Imported when first used: `import kernels_eval` stays cheap for `concur --help`.
def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'kernels_eval' has no attribute {name!r}")
    return getattr(import_module(f"kernels_eval.{_HOMES.get(name, 'records')}"), name)
