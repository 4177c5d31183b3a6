"""The model card of an adapter: README.md with the hub's front matter. Numbers are the run's,
unknown ones omitted; no local path."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from tasks.files import atomic_write
from tasks.sources.hub import is_hub_id
from tasks.training.adapter import AdapterFacts
from tasks.training.recipe import FIXED, FixedSettings, TrainingRecipe
from tasks.training.result import TrainingResult

CARD = "README.md"
TEMPLATE = Path(__file__).with_name("card.md.jinja")


def sources_of(recipe: TrainingRecipe | FixedSettings) -> dict[str, str]:
    """Source of each recipe value: its field's description, or a note that it is not the
    default."""
    sources = {}
    for name, option in type(recipe).model_fields.items():
        default = option.get_default(call_default_factory=True)
        changed = getattr(recipe, name) != default
        sources[name] = f"set for this run, the default is {_value(default)}; " if changed else ""
        sources[name] += " ".join((option.description or "").split())
    return sources


def write_card(result: TrainingResult, *args: Any, **facts: Any) -> Path:
    """Write README.md into an adapter's directory, replacing PEFT's template, and return its path.
    Arguments are those of `card`."""
    return atomic_write(result.adapter_dir / CARD, card(result, *args, **facts))


def card(
    result: TrainingResult,
    recipe: TrainingRecipe,
    adapter: AdapterFacts,
    *,
    name: str,
    base_model: str,
    curated: str,
    strategy: str | None = None,
    tools: Mapping[str, str] = {},
) -> str:
    """Text of README.md. `base_model` is a hub id or a directory; `curated` the fingerprint of the
    training set; `tools` are versions by name."""
    on_hub = is_hub_id(base_model) and not Path(base_model).exists()
    losses = [
        EvalResult(
            task_type="text-generation",
            dataset_type="concur",
            dataset_name="held-out tasks",
            metric_type="loss",
            metric_value=round(entry["loss"], 4),
        )
        for entry in result.held_out[-1:]
    ]
    data = ModelCardData(
        library_name="peft",
        pipeline_tag="text-generation",
        tags=["lora", "concur", "gpu-kernels"],
        base_model=base_model if on_hub else None,
        model_name=_cell(name) if losses else None,
        eval_results=losses or None,
    )
    # of a directory its name alone
    base = base_model if on_hub else Path(base_model).name or base_model
    values = recipe.model_dump(mode="json") | {"base_model": base} | FIXED.model_dump(mode="json")
    sources = sources_of(recipe) | sources_of(FIXED)
    dropped = Counter(row.reason for row in result.dropped)
    made = ModelCard.from_template(
        data,
        template_str=TEMPLATE.read_text(encoding="utf-8"),
        result=result,
        adapter=adapter,
        name=name,
        curated=curated,
        strategy=strategy,
        base=base,
        dropped=", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items())),
        recipe=[(key, _value(value), sources[key]) for key, value in values.items()],
        tools=", ".join(f"{name} {version}" for name, version in sorted(tools.items())),
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
    return f"`{' '.join(text.split()).replace('`', chr(39)).replace('|', chr(92) + '|')}`"
