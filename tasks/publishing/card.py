"""The card of a published set: README.md with the front matter that the hub and `datasets` read.

Guarantees: every number is of the files beside it or of a manifest; the front matter is YAML
whatever names it holds; what comes from data is escaped. Does not escape the sections that a caller
brings (observations, decontamination): they are the text of our own reports. The words are in
`card.md.jinja`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from kernels_eval.records import Json, Row
from tasks.publishing.columns import COLUMNS
from tasks.publishing.config import UNKNOWN, PublishOptions
from tasks.publishing.lineage import VERIFICATION, settings
from tasks.publishing.shards import Shard
from tasks.publishing.statistics import Statistics, Workloads
from tasks.publishing.templates import render
from tasks.reporting.text import cell

SIZES = {
    1_000: "n<1K",
    10_000: "1K<n<10K",
    100_000: "10K<n<100K",
    1_000_000: "100K<n<1M",
    10_000_000: "1M<n<10M",
}
"""The hub's names for numbers of rows below a limit."""


@dataclass(frozen=True)
class Card:
    """Everything a card says. `facts` and `statistics` by configuration, the default one first;
    `figures` are paths inside the folder."""

    options: PublishOptions
    tag: str
    shards: Sequence[Shard]
    columns: Sequence[str]
    statistics: Mapping[str, Statistics]
    facts: Mapping[str, Row]
    workloads: Workloads | None = None
    observations: str | None = None
    decontamination: str | None = None
    figures: Sequence[str] = ()

    @property
    def citation(self) -> str:
        """BibTeX of this refresh of the set."""
        title = "".join(each for each in _line(self.options.name) if each not in "{}\\%$#&~^")
        key = "".join(each for each in title.lower() if each.isascii() and each.isalnum())
        return self.options.citation or (
            f"@misc{{{key or 'kernels'},\n"
            f"  title        = {{{title}}},\n"
            f"  howpublished = {{made with concur, revision {self.tag}}},\n"
            f"  year         = {{{self.tag.removeprefix('refresh-')[:4]}}}\n}}"
        )

    def splits(self) -> Iterator[tuple[str, str, list[Shard]]]:
        """The files of each configuration and split."""
        for config, split in dict.fromkeys((shard.config, shard.split) for shard in self.shards):
            key = (config, split)
            yield *key, [shard for shard in self.shards if (shard.config, shard.split) == key]


def card(context: Card) -> str:
    """The whole README.md."""
    from huggingface_hub import DatasetCard

    default = next(iter(context.statistics))
    numbers, facts = context.statistics[default], context.facts[default]
    observations = _nested(context.observations)
    text = render(
        "card.md.jinja",
        card=context,
        numbers=numbers,
        facts=facts,
        front_matter=_front_matter(context, list(numbers.counts["language"])),
        settings={stage: _settings(stage, found) for stage, found in facts.items()},
        meanings=COLUMNS,
        observations=observations,
        figures=[path for path in context.figures if path not in observations],
        decontamination=_nested(context.decontamination),
        unknown=UNKNOWN,
    )
    return f"{DatasetCard(text)}\n"


def _front_matter(context: Card, languages: Sequence[str]) -> str:
    from huggingface_hub import DatasetCardData

    configs: dict[str, Json] = {}
    for config, split, files in context.splits():
        entry = configs.setdefault(config, {"config_name": config})
        if len(configs) == 1:
            entry["default"] = True
        path = PurePosixPath(files[0].path).parent / f"{split}-*.parquet"
        entry.setdefault("data_files", []).append({"split": split, "path": str(path)})
    rows = sum(shard.rows for shard in context.shards)
    return DatasetCardData(
        pretty_name=_line(context.options.name),
        license=context.options.license,
        language=["en"],
        task_categories=["text-generation"],
        size_categories=[next((SIZES[limit] for limit in SIZES if rows < limit), "10M<n<100M")],
        tags=["concur", "code", "gpu-kernels", "reasoning", *languages],
        configs=list(configs.values()),
    ).to_yaml()


def _settings(stage: str, facts: object) -> str:
    """A stage's settings in a cell."""
    if not isinstance(facts, Mapping):
        return ""
    config = facts.get("config", {})
    if stage == VERIFICATION:  # forty numbers
        config = {"protocol": f"see facts.{stage} in publication.json"}
    others = {name: facts[name] for name in facts if name not in ("fingerprint", "rows", "config")}
    shown = (
        (name, ", ".join(map(str, item)) if isinstance(item, list | tuple) else item)
        for name, item in settings({**config, **others})
        if item != ""
    )
    return "; ".join(f"{cell(name)} {cell(item, 400)}" for name, item in shown)


def _nested(text: str | None) -> str:
    """A section of another document: its headings go below ours, code blocks stay as they are."""
    lines, fence = [], ""
    for line in (text or "").strip().splitlines():
        mark = line.lstrip()[:3]
        if mark in ("```", "~~~") and (not fence or fence == mark):
            fence = "" if fence else mark
        lines.append(f"##{line}" if line.startswith("#") and not fence else line)
    return "\n".join(lines)


def _line(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text).strip()
