"""A sampler without a model: it writes answers to generated tasks, with planted faults, styles and
lengths of reasoning.

Guarantees: an answer depends on the configuration, the task's program, the language, the sample
index and the seed alone; the program is read from the task's source. It knows no verdict: whether
an answer is right is for the verifier to say. Sampling parameters other than seed and max_tokens
mean nothing here.

Reasoning of the scripted teacher: sentences on a program and a plan, as long as is asked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import NormalDist

from experiments.proof.kernels import TABLE
from experiments.proof.modules import WRITERS, faults_of, module_of
from experiments.proof.options import Fault, Style, TeacherOptions
from experiments.proof.program import Program, parse
from experiments.wrapped import read_options
from kernels_eval.errors import UsageError
from kernels_eval.records import Json, Language, stable_hash
from kernels_eval.tables import table_beside
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.prompts import block
from tasks.synthesis.sampler import Request, Requests, Response, Sampler, tokenizer_of
from tasks.thoughts import THINK_CLOSE

TEACHER_VERSION = 2
"""Raised with every change of what it writes."""
NORMAL = NormalDist()
MEAN_OPERATORS = 3


class ScriptedSampler(Sampler):
    """The scripted teacher. Tokens are counted, and answers cut at max_tokens, where there is a
    tokenizer."""

    generator = "scripted"

    answers_follow_ups = False

    def __init__(self, options: TeacherOptions, tokenizer: str | Path | None = None) -> None:
        super().__init__(tokenizer)
        self._config = options

    @classmethod
    def from_config(
        cls, config: SynthesisConfig, root: str, adapter: Path | None = None
    ) -> ScriptedSampler:
        options = read_options(TeacherOptions, config.options, "synthesis.options")
        return cls(options, tokenizer_of(config, root))

    @classmethod
    def data_version(cls, config: SynthesisConfig) -> str:
        return stable_hash([TEACHER_VERSION, config.options])

    def sample(self, requests: Requests) -> Iterator[Response]:
        """One response per request, in their order; one to a follow-up does not depend on what is
        followed up. Raises UsageError for a task that was not generated, and for a language
        without a script."""
        for request in requests:
            text = self._text(request)
            counts = self.count_tokens([text])
            finish = "stop"
            while counts and counts[0] > request.sampling.max_tokens:
                text = text[: len(text) * request.sampling.max_tokens // counts[0]]
                counts, finish = self.count_tokens([text]), "length"
            yield Response(
                request_key=request.request_key,
                text=text,
                completion_tokens=counts[0] if counts else None,
                finish_reason=finish,
            )

    def _text(self, request: Request) -> str:
        program, config = _program(request), self._config
        draw = Random(
            f"{request.task.code}/{request.language}/{request.sample_index}/{request.sampling.seed}"
        )
        quality, speed, other = (NORMAL.inv_cdf(max(draw.random(), 1e-9)) for _ in range(3))
        style = _style(config, NORMAL.cdf(speed))
        fault = _fault(config, program, NORMAL.cdf(quality), draw)
        with_quality, with_speed = config.length_vs_correctness, config.length_vs_speed
        alone = math.sqrt(max(0.0, 1 - with_quality**2 - with_speed**2))
        place = with_quality * quality + with_speed * speed + alone * other
        length = config.reasoning_tokens * math.exp(config.spread * place)
        reasoning = reasoning_of(program, request.language, style, length, config.repetition, draw)
        if fault == "no_code" and draw.random() < 0.5:
            return f"{reasoning}\n{THINK_CLOSE}\n\nThe module computes the steps in one pass.\n"
        module = module_of(program, request.language, style, fault)
        return f"{reasoning}\n{THINK_CLOSE}\n\n{block(module)}\n"


def _program(request: Request) -> Program:
    program = parse(request.task.code)
    if program is None:
        raise UsageError(
            f"the scripted teacher answers generated tasks alone, and {request.task.task_id} was"
            " not generated",
            "set tasks.source=generated, or synthesis.sampler to a model",
        )
    if request.language not in WRITERS:
        raise UsageError(
            f"the scripted teacher has no {request.language} answers",
            f"set language to {' or '.join(WRITERS)}",
        )
    return program


def _style(config: TeacherOptions, place: float) -> Style:
    """The style at a place in [0, 1], slow ones first."""
    styles: tuple[Style, ...] = ("naive", "tiled", "fused", "vectorised")
    weights = [config.styles.get(style, 0.0) for style in styles]
    left = place * sum(weights)
    for style, weight in zip(styles, weights, strict=True):
        if left < weight:
            return style
        left -= weight
    return max(styles, key=lambda style: (config.styles.get(style, 0) > 0, styles.index(style)))


def _fault(config: TeacherOptions, program: Program, place: float, draw: Random) -> Fault | None:
    """The fault of an answer at a place in [0, 1], wrong ones first; None for one that is meant to
    be right."""
    wrong = config.wrong + config.wrong_per_operator * (len(program.steps) - MEAN_OPERATORS)
    possible = [fault for fault in faults_of(program) if config.faults.get(fault)]
    if place >= wrong or not possible:
        return None
    return draw.choices(possible, [config.faults[fault] for fault in possible])[0]


TEXTS: Json = table_beside(__file__)


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
    plan = (TEXTS.get(language) or TEXTS["plan"])[style]
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


def _facts(program: Program) -> Iterator[Json]:
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


def _checks(facts: list[Json], repetition: float, draw: Random) -> Iterator[str]:
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
