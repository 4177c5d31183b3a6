"""Reasoning of the scripted teacher: sentences on a program and a plan, as long as is asked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from kernels_eval.records import Language
from tasks.files import read_toml
from tasks.sources.generated.program import Program
from tasks.synthesis.scripted.config import Style
from tasks.synthesis.scripted.kernels import TABLE

TEXTS: dict[str, Any] = read_toml(Path(__file__).with_suffix(".toml"))


def reasoning_of(
    program: Program,
    language: Language,
    style: Style,
    length: float,
    repetition: float,
    draw: Random,
) -> str:
    """An opening, notes on the steps, the plan and checks, up to about `length` words and signs.

    Opening and plan are always there. `repetition` is the share of passages after the plan that
    repeat the one before it.
    """
    plan = TEXTS.get(language, TEXTS["plan"])[style]
    facts = list(_facts(program))
    opening = TEXTS["opening"].format(
        steps=", ".join(fact["step"] for fact in facts),
        rows=program.rows,
        columns=program.columns,
    )
    notes, rest = list[str](), length - sum(map(size, (opening, plan, TEXTS["ending"])))
    for fact in facts:
        note = TEXTS["note"].format(**fact)
        if (rest := rest - size(note)) >= 0:
            notes.append(note)
    checks = list[str]()
    for check in _checks(facts, repetition, draw):
        if (rest := rest - size(check)) < 0:
            break
        checks.append(check)
    paragraphs = [opening, *notes, plan, *checks, TEXTS["ending"]]
    return "\n".join(paragraphs)


def size(text: str) -> int:
    """Words and signs of a text."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def _facts(program: Program) -> Iterator[dict[str, Any]]:
    """What sentences say of each step."""
    for number, (step, width) in enumerate(
        zip(program.steps, program.widths, strict=False), start=1
    ):
        yield {
            "number": number,
            "step": step.name if step.value is None else f"{step.name} {step.value}",
            "say": TABLE[step.name]["say"].format(value=step.value),
            "width": width,
        }


def _checks(facts: list[dict[str, Any]], repetition: float, draw: Random) -> Iterator[str]:
    """Endless checks of the steps: new ones, and repeated ones where that is drawn or nothing new
    is left."""
    new = [text.format(**fact) for fact in facts for text in TEXTS["checks"].values()]
    draw.shuffle(new)
    fact = draw.choice(facts)
    while True:
        if new and draw.random() >= repetition:
            fact = draw.choice(facts)
            yield new.pop()
        else:
            yield TEXTS["again"].format(**fact)
