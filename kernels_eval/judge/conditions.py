"""Conditions of rows: which tasks they suit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from kernels_eval.config import ITERATIONS, LAYERS, LEAST_IN_A_ROW
from kernels_eval.judge.trial import Condition, TaskFindings
from kernels_eval.protocol import RARE_FORMS, Expectation


def one_answer(expected: Iterable[Expectation]) -> bool:
    return all(len(each.equals) == index for index, each in enumerate(expected))


PRODUCTS = re.compile(r"conv|matmul|mm$|einsum|linear$|attention|lstm|gru", re.IGNORECASE)
"""Operators of torch whose sums of products are an offset that long sums round with a bias."""


def has_weights(task: TaskFindings) -> bool:
    return bool(task.loaded.parameters or task.loaded.statistics)


def could_save_work(task: TaskFindings) -> bool:
    notes = task.loaded.plan.notes
    return any(note.structure or note.varied not in ("", "moved") for note in notes)


SENTINELS = re.compile(
    r"softmax|logsumexp|cross_entropy|attention|\.exp$|\.(a|arg)?(max|min)(imum)?$"
)
"""Operators of torch for which masked elements may be a large number or an infinity: what is right
for a row without others is a matter of taste."""


def reduces_masked(task: TaskFindings) -> bool:
    return any(map(SENTINELS.search, task.loaded.operators))


def has_sentinels(task: TaskFindings) -> bool:
    masks = any(note.is_mask for note in task.loaded.plan.notes)
    return masks and reduces_masked(task)


def takes_infinities(task: TaskFindings) -> bool:
    """Whether an infinity is an answer that honest kernels give, too, and no matter of taste."""
    return task.loaded.infinite and not has_sentinels(task)


EXACT_NEAR_ZERO = re.compile(
    r"\._*r?(add|sub|subtract|mul|multiply|div|divide|neg|negative|abs|square|pow|sqrt|rsqrt|reciprocal"
    r"|exp|exp2|sum|mean|prod|cumsum|cumprod|a?max|a?min|maximum|minimum|clamp\w*|relu|where|masked_fill"
    r"|gt|ge|lt|le|eq|ne|logical_\w+|matmul|mm|bmm|mv|dot|einsum|addmm|linear|roll|flip|cat|stack|gather"
    r"|index_select|norm)_*$"
)
"""Operators of torch by whose other forms a small answer is as precise as a large one: log(1 + x),
say, is none of them."""


def is_exact_near_zero(task: TaskFindings) -> bool:
    """Whether small answers have all digits, of tasks in fp32."""
    operators = task.loaded.operators
    return task.loaded.dtype == "float32" and all(map(EXACT_NEAR_ZERO.search, operators))


def takes_exp(task: TaskFindings) -> bool:
    return any(name.endswith((".exp", ".exp2")) for name in task.loaded.operators)


CLEARING = re.compile(r"nan|isfinite|isinf|\.f(max|min)$")
"""Operators of torch that ask for NaN, or drop it: others, `triu` say, drop it by chance."""


def has_rare_values(task: TaskFindings) -> bool:
    return any(note.rare in RARE_FORMS for note in task.loaded.plan.notes)


def takes_others(*, iterating: bool) -> Condition:
    """Whether some whole numbers may leave their range, of a task that iterates or does not."""
    return lambda task: task.loaded.plan.extends and iterates(task) is iterating


def takes_whole_range(*, iterating: bool) -> Condition:
    """The same of integers that few bits hold."""
    return lambda task: task.loaded.plan.narrow and iterates(task) is iterating


def has_settings(task: TaskFindings) -> bool:
    return any(note.rare == "setting" for note in task.loaded.plan.notes)


def takes_settings(name: str, task: TaskFindings) -> bool:
    """Whether there are other arguments of the constructor, and weights that these tell of."""
    return name in task.settings and task.config.weights == "seed"


def has_needless_order(task: TaskFindings) -> bool:
    return any(note.order for note in task.loaded.plan.notes)


def has_promises(task: TaskFindings) -> bool:
    return any(note.promised for note in task.loaded.plan.notes)


def forgets(task: TaskFindings) -> bool:
    """Whether steps by arguments may forget the first ones: those of tables and probabilities."""
    return any(
        note.rare == "one_hot" or note.into_itself is not None for note in task.loaded.plan.notes
    )


def iterates(task: TaskFindings) -> bool:
    """Whether a task applies one operator to what it gave more often than it has weights."""
    weights = [shape for shape in task.loaded.parameters if math.prod(shape) > 1]
    return task.loaded.depth >= max(ITERATIONS, 1 + len(weights))


def sums_products(task: TaskFindings) -> bool:
    return any(map(PRODUCTS.search, task.loaded.operators))


def has_layers(task: TaskFindings) -> bool:
    """Whether errors of products have passed through so many others that they look like chance."""
    return sum(map(bool, map(PRODUCTS.search, task.loaded.operators))) >= LAYERS


def has_one_answer(task: TaskFindings) -> bool:
    """Whether inputs are written out: a kernel could hold the answer."""
    fixed = task.own_answer_is_fixed and not task.inputs_vary
    return fixed and one_answer(task.expected.values())


def flags_non_finite(task: TaskFindings) -> bool:
    clears = any(map(CLEARING.search, task.loaded.operators))
    return task.inputs_vary and task.config.non_finite == "flag" and not clears


def requires_non_finite(task: TaskFindings) -> bool:
    takes = task.inputs_vary and task.config.non_finite != "off"
    return takes and not flags_non_finite(task)


def takes_long_row(task: TaskFindings) -> bool:
    return task.loaded.remembers and task.loaded.long_row > LEAST_IN_A_ROW


def takes_alike_calls(task: TaskFindings) -> bool:
    return task.loaded.remembers and task.loaded.calls_in_a_row >= LEAST_IN_A_ROW


def takes_calls(count: int) -> Condition:
    """Whether a model keeps something from call to call; running statistics are told once."""
    return lambda task: (
        task.loaded.calls_in_a_row >= count
        and (task.loaded.remembers or (task.level == "confirm" and count == LEAST_IN_A_ROW))
    )
