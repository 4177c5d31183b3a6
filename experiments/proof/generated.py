"""Generated tasks: seeded PyTorch programs of one to five operators, for smoke tests and controlled
experiments.

Guarantees: the same arguments give the same tasks in every process, and fewer of them are the first
of more; no two tasks of a set have the same operators in the same order. Which side a program is on
depends on its operators alone, not on their order, sizes, numbers or the seed. A program is on the
train side only where every program with one operator more or less is, too: `tasks.decontamination`
finds nothing of one side in the other.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Literal, get_args

from experiments.proof.options import GeneratedOptions
from experiments.proof.program import FAMILIES, OPERATORS, Kind, Program, Step, family_of
from experiments.wrapped import read_options
from kernels_eval.errors import UsageError
from kernels_eval.records import KernelTask, stable_hash
from kernels_eval.tables import table_beside
from tasks.sources.config import TasksConfig
from tasks.sources.holdout import place_of

Sizes = Literal["cpp", "cuda"]
Side = Literal["all", "train", "heldout"]
LONGEST = 5
HELD_OUT = 0.05
SHARING = 3
"""Operators of the shortest program that decontamination takes for one with another operator."""
DRAWS = 2000
MOST_FAILURES = 12
"""A family is drawn, then programs until one is new, of that family and of the side; after so many
draws another family. After so many families there are no further programs."""
SHAPES = table_beside(__file__, "shapes.toml")
"""On `cpp` the reference takes 0.1 to 5 ms on a core."""
STAYS = frozenset({"scaled", "floored", "inputs", *get_args(Kind)})
"""What no later operator changes of what `_state_after` knows."""
_SAME = {
    **dict.fromkeys(("scale", "mul_scale", "mul_input"), "mul"),
    **dict.fromkeys(("shift", "add_input", "add_bias"), "add"),
}
"""Operators that decontamination calls by one name."""


def load_source(config: TasksConfig) -> list[KernelTask]:
    """The task source `generated`. Raises UsageError for settings that are none."""
    options = read_options(GeneratedOptions, config.options, "tasks.options")
    side = next((each for each in get_args(Side) if each == config.split), None)
    if side is None:
        raise UsageError(f"no generated task is of {config.split}", "--set tasks.split=train")
    return load(options.seed, options.count, side, options.sizes)


def load(seed: int, count: int, side: Side = "train", sizes: Sizes = "cpp") -> list[KernelTask]:
    """The first `count` tasks of a side. Raises UsageError where there are not so many."""
    drawn, found = random.Random(f"{seed}/{side}"), dict[tuple[str, ...], KernelTask]()
    failures = 0
    while len(found) < count:
        family = drawn.choice(FAMILIES)
        for _ in range(DRAWS):
            names = _draw(drawn, family)
            if names and names not in found and side in ("all", side_of(names)):
                found[names], failures = task_of(names, sizes, seed), 0
                break
        else:
            failures += 1
        if failures == MOST_FAILURES:
            raise UsageError(
                f"{len(found)} of {count} generated {side} tasks were found under seed {seed}",
                "lower tasks.options.count",
            )
    return list(found.values())


@cache
def side_of(names: tuple[str, ...]) -> Literal["train", "heldout", "neither"]:
    """The side of a program with these operators. Those that share most of their operators with a
    held-out one are on neither."""
    own = sorted(_SAME.get(name, name) for name in names)
    if _held_out(tuple(own)):
        return "heldout"
    others = list[list[str]]()
    if len(own) >= SHARING:
        others = [sorted([*own, name]) for name in {_SAME.get(name, name) for name in OPERATORS}]
    if len(own) > SHARING:
        others += [own[:index] + own[index + 1 :] for index in range(len(own))]
    return "neither" if any(_held_out(tuple(other)) for other in others) else "train"


@cache
def _held_out(names: tuple[str, ...]) -> bool:
    return place_of(" ".join(names), 0) < HELD_OUT


def _draw(drawn: random.Random, family: str) -> tuple[str, ...]:
    """Operators of a program of this family, half of them pointwise; none where the draw fails."""
    names, state = tuple[str, ...](), frozenset[str]()
    length = drawn.randint(1, LONGEST)
    while len(names) < length:
        pointwise, *others = _fitting(state, family)
        kind = drawn.choice(others) if others and drawn.random() < 0.5 else pointwise
        name = drawn.choice(kind)
        if name in names:
            return ()
        names, state = (*names, name), _state_after(state, name)
    return names if family_of(names) == family else ()


def _state_after(state: frozenset[str], name: str) -> frozenset[str]:
    """What is known of the values, and which kinds of operators were used."""
    own = OPERATORS[name]
    kept = state if "all" in own.keeps else state & {*own.keeps, *STAYS}
    used = {"inputs"} if own.reads_input else {own.kind} - {"pointwise"}
    return kept | own.gives | used


@cache
def _fitting(state: frozenset[str], family: str) -> list[list[str]]:
    """What may come next, by kind. Of operators that are not pointwise, a program has one of each
    kind; a reduction is followed by pointwise ones without other operands."""
    found = dict[str, list[str]](pointwise=[])
    for name, own in OPERATORS.items():
        operand = own.parameter is not None or own.reads_input
        after_reduction = "reduction" in state and (own.kind != "pointwise" or operand)
        again = own.kind in state or (own.reads_input and "inputs" in state)
        other = FAMILIES.index(own.family) > FAMILIES.index(family)
        if not (after_reduction or again or other or own.never_on & state):
            found.setdefault(own.kind, []).append(name)
    return list(found.values())


def task_of(names: tuple[str, ...], sizes: Sizes, seed: int) -> KernelTask:
    """The task with these operators. Sizes and numbers depend on the seed and the operators
    alone."""
    drawn = random.Random(f"{seed}/{' '.join(names)}")
    rows, columns = map(drawn.choice, SHAPES[sizes]["product" if "linear" in names else "other"])
    steps = tuple(Step(name, drawn.choice(OPERATORS[name].values or (None,))) for name in names)
    program = Program(rows=rows, columns=columns, steps=steps)
    code = program.render()
    return KernelTask(
        task_id=f"generated/{stable_hash(code)[:16]}",
        name="_".join(names),
        code=code,
        source="generated",
        level=len(names),
        family=program.family,
    )
