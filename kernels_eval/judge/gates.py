"""What an answer's errors mean for one task: gates of its precision, narrowed where an answer that
ignores the inputs would pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernels_eval.config import GATES, HARD_GATES
from kernels_eval.model.correctness import judge
from kernels_eval.protocol import Comparison
from kernels_eval.records import Reason


@dataclass
class TaskGates:
    """The gates of one task. `loosest` is the largest error that a gate may let pass."""

    loosest: float = math.inf

    def judge(
        self,
        comparison: Comparison,
        *,
        own_inputs: bool = True,
        hard: bool = False,
        far: bool = False,
    ) -> Reason:
        """What these errors mean on the task's own inputs, or on others; `hard` ones have wide
        gates, and where `far`, what is little beyond is no error.
        """
        if far:
            return judge(comparison, GATES, loosest=self.loosest, far=True)
        if not hard:
            return judge(comparison, GATES, own_inputs=own_inputs, loosest=self.loosest)
        tame = comparison.model_copy(update={"wrong_share": 0.0})
        return judge(tame, HARD_GATES, own_inputs=own_inputs)
