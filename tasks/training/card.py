"""The card of an adapter: README.md beside it, with the front matter that the hub reads.

Guarantees: every number is of the run that trained it; what is not known is left out, never
guessed; the front matter is YAML whatever names it holds; no path of the machine that trained it is
written. Does not guarantee that publishing is allowed: the licences of the base model and of the
data are the publisher's to check, and the card says so.
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from tasks.files import atomic_write
from tasks.sources.hub import is_hub_id
from tasks.training.adapter import AdapterFacts
from tasks.training.recipe import TrainingRecipe
from tasks.training.trainer import TrainingResult

CARD = "README.md"
TEMPLATE = Path(__file__).with_name("card.md.jinja")


@dataclass(frozen=True)
class CardFacts:
    """What a card is written from.

    Attributes:
        name: what the adapter is called, also in the vLLM command line
        base_model: as configured: a hub id or a directory
        curated: fingerprint of the training set
        tools: version by name
    """

    name: str
    base_model: str
    adapter: AdapterFacts
    recipe: TrainingRecipe
    result: TrainingResult
    curated: str
    strategy: str | None = None
    tools: dict[str, str] = field(default_factory=dict)


def sources_of(recipe: TrainingRecipe) -> dict[str, str]:
    """Where each value of a recipe comes from: the descriptions of its fields, which are about the
    defaults. Of another value it says so."""
    sources = {}
    for name, option in type(recipe).model_fields.items():
        default = option.get_default(call_default_factory=True)
        changed = getattr(recipe, name) != default
        sources[name] = f"set for this run, the default is {_value(default)}; " if changed else ""
        sources[name] += option.description or ""
    return sources


def write_card(directory: Path, facts: CardFacts) -> Path:
    """Write README.md into an adapter's directory, in place of PEFT's empty form. Returns its
    path."""
    return atomic_write(directory / CARD, card(facts))


def card(facts: CardFacts) -> str:
    """The whole README.md."""
    on_hub = is_hub_id(facts.base_model) and not Path(facts.base_model).exists()
    losses = [
        EvalResult(
            task_type="text-generation",
            dataset_type="concur",
            dataset_name="held-out tasks",
            metric_type="loss",
            metric_value=round(entry.loss, 4),
        )
        for entry in facts.result.held_out[-1:]
    ]
    data = ModelCardData(
        library_name="peft",
        pipeline_tag="text-generation",
        tags=["lora", "concur", "gpu-kernels"],
        base_model=facts.base_model if on_hub else None,
        model_name=_cell(facts.name) if losses else None,
        eval_results=losses or None,
    )
    # of a directory its name alone
    base = facts.base_model if on_hub else Path(facts.base_model).name or facts.base_model
    values = facts.recipe.model_dump(mode="json") | {"base_model": base}
    sources = sources_of(facts.recipe)
    dropped = Counter(row.reason for row in facts.result.dropped)
    made = ModelCard.from_template(
        data,
        template_str=TEMPLATE.read_text(encoding="utf-8"),
        facts=facts,
        result=facts.result,
        base=base,
        dropped=", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items())),
        recipe=[(name, _value(value), sources[name]) for name, value in values.items()],
        tools=", ".join(f"{name} {version}" for name, version in sorted(facts.tools.items())),
        cell=_cell,
        code=_code,
        quote=shlex.quote,
    )
    return str(made)


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _code(text: str) -> str:
    """Inline code; a name cannot end it or a table's cell."""
    return f"`{' '.join(text.split()).replace('`', chr(39)).replace('|', chr(92) + '|')}`"
