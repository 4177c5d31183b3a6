"""The card of an adapter: README.md beside it, with the front matter that the hub reads.

Guarantees: every number is of the run that trained it; what is not known is left out, never
guessed; the front matter is YAML whatever names it holds; no path of the machine that trained it is
told. Does not guarantee that publishing is allowed: the licences of the base model and of the data
are the publisher's to check, and the card says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from tasks.files import atomic_write
from tasks.sources.hub import is_hub_id
from tasks.training.adapter import AdapterFacts, MergeCheck
from tasks.training.evaluation import HeldOutLoss

CARD = "README.md"
PAPER = "https://arxiv.org/abs/2510.07356"


class CardFacts(BaseModel):
    """What a card is written from. Losses are nats a completion token."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(
        min_length=1, description="what the adapter is called, also in the vLLM command line"
    )
    base_model: str = Field(description="as configured: a hub id or a directory")
    adapter: AdapterFacts
    recipe: dict[str, Any]
    sources: dict[str, str] = Field(
        default={}, description="where each value of the recipe comes from"
    )
    curated_fingerprint: str
    strategy: str | None = None
    rows: int = Field(description="rows trained on")
    held_out_tasks: int = 0
    dropped: dict[str, int] = Field(default={}, description="rows not trained on, by reason")
    steps: int
    tokens: int
    seconds: float
    loss_first: float = Field(description="mean of the first epoch")
    loss_last: float = Field(description="mean of the last epoch")
    held_out: tuple[HeldOutLoss, ...] = ()
    merged: MergeCheck | None = None
    tools: dict[str, str] = {}


def sources_of(recipe: BaseModel) -> dict[str, str]:
    """Where each value of a recipe comes from: the descriptions of its fields, which tell of the
    defaults. Of another value it says so."""
    told = {}
    for name, field in type(recipe).model_fields.items():
        other = getattr(recipe, name) != field.get_default(call_default_factory=True)
        told[name] = (
            f"set for this run, the default is {_value(field.default)}; " if other else ""
        ) + (field.description or "")
    return told


def write_card(directory: Path, facts: CardFacts) -> Path:
    """Write README.md into an adapter's directory, in place of PEFT's empty form. Returns its
    path."""
    return atomic_write(directory / CARD, card(facts))


def card(facts: CardFacts) -> str:
    """The whole README.md."""
    import yaml

    front: dict[str, Any] = {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["lora", "concur", "gpu-kernels"],
    }
    if _on_the_hub(facts.base_model):
        front["base_model"] = facts.base_model
    text = yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
    return f"---\n{text}---\n\n" + "\n\n".join(_sections(facts)) + "\n"


def _sections(facts: CardFacts) -> Iterator[str]:
    base = _told(facts.base_model)
    yield f"# {_cell(facts.name)}"
    yield (
        f"A LoRA adapter of rank {facts.adapter.rank} for {_code(base)}, trained by concur on"
        " reasoning traces and GPU kernels that were verified to be correct and fast. The method"
        f" is that of [ConCuR]({PAPER})."
    )
    yield "## Load it"
    yield (
        "vLLM, by name:\n\n```sh\n"
        f"vllm serve {base} --enable-lora --max-lora-rank {facts.adapter.rank} --lora-modules"
        f" {_shell(facts.name)}=DIRECTORY\n```\n\n"
        f"and ask for the model {_code(facts.name)}. PEFT:\n\n```python\n"
        "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
        f'model = AutoModelForCausalLM.from_pretrained({base!r}, dtype="auto")\n'
        'model = PeftModel.from_pretrained(model, "DIRECTORY")\n```'
    )
    yield "## Losses"
    yield _losses(facts)
    yield "## Data"
    yield _data(facts)
    yield "## Recipe"
    yield _table(
        ("setting", "value", "where it comes from"),
        [
            (_code(name), _code(_value(value)), _cell(facts.sources.get(name, "")))
            for name, value in facts.recipe.items()
        ],
    )
    yield (
        f"{facts.adapter.modules} layers have a pair of matrices"
        f" ({', '.join(facts.adapter.target_modules)}), {facts.adapter.parameters:,} parameters in"
        f" all, {facts.adapter.size_bytes / 1e6:.1f} MB."
    )
    if facts.merged:
        yield "## Merged weights"
        yield _merged(facts.merged)
    yield "## Licence"
    yield (
        "An adapter is of use only with its base model. Whether and under which terms it may be"
        f" published, and used, depends on the licence of {_code(base)} and of the data: check both"
        " before you publish this. This card does not answer it."
    )
    if facts.tools:
        yield (
            "Made with "
            + ", ".join(f"{name} {version}" for name, version in sorted(facts.tools.items()))
            + "."
        )


def _losses(facts: CardFacts) -> str:
    text = (
        "Mean cross-entropy a completion token (reasoning, answer, end token), nats. Training:"
        f" {facts.loss_first:.4f} over the first epoch, {facts.loss_last:.4f} over the last."
    )
    if not facts.held_out:
        return f"{text} No tasks were held out."
    rows = [(str(entry.step), f"{entry.epoch:g}", f"{entry.loss:.4f}") for entry in facts.held_out]
    tasks = f"{facts.held_out_tasks} task{'s' if facts.held_out_tasks != 1 else ''}"
    return f"{text} On {tasks} that training never saw:\n\n" + _table(
        ("after step", "epoch", "held-out loss"), rows
    )


def _data(facts: CardFacts) -> str:
    strategy = f", chosen by the strategy {_code(facts.strategy)}" if facts.strategy else ""
    text = (
        f"{facts.rows:,} rows of the curated snapshot {_code(facts.curated_fingerprint)}{strategy}."
        f" {facts.steps:,} optimiser steps over {facts.tokens:,} tokens, prompts included, in"
        f" {facts.seconds:,.0f} s."
    )
    if facts.dropped:
        reasons = ", ".join(
            f"{count:,} {reason}" for reason, count in sorted(facts.dropped.items())
        )
        text += f" Rows not trained on: {reasons}. No row was truncated."
    return text


def _merged(check: MergeCheck) -> str:
    return (
        f"Merged in {check.dtype}. Over {check.positions:,} token positions the adapter changes a"
        f" logit by {check.effect_rms:.3g} (root mean square), and merging changes it again by"
        f" {check.difference_rms:.3g}, {check.relative_difference:.2%} of that (at most"
        f" {check.tolerance:.2%} is accepted); at most {check.difference_max:.3g} for one logit."
        f" The likeliest token is the same at {check.same_top_token:.2%} of positions; KL"
        f" {check.kl_nats:.2g} nats a position."
    )


def _on_the_hub(base_model: str) -> bool:
    return is_hub_id(base_model) and not Path(base_model).exists()


def _told(base_model: str) -> str:
    """A hub id as it is; of a directory its name alone."""
    return base_model if _on_the_hub(base_model) else Path(base_model).name or base_model


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _code(text: str) -> str:
    """Inline code; a name cannot end it or a table's cell."""
    return f"`{' '.join(text.split()).replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def _shell(text: str) -> str:
    import shlex

    return shlex.quote(text)
