"""The card of a published set: README.md with the front matter that the hub and `datasets` read.

Guarantees: every number is of the files beside it or of a manifest; the front matter is YAML
whatever names it holds; what comes from data is escaped. Does not escape the sections that a caller
brings (observations, decontamination): they are the text of our own reports. The words are in
`card.md.jinja`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tasks.publishing.columns import COLUMNS
from tasks.publishing.config import UNKNOWN, PublishOptions
from tasks.publishing.lineage import CURATION, SYNTHESIS, TASKS, VERIFICATION
from tasks.publishing.shards import Shard
from tasks.publishing.statistics import Statistics, Workloads
from tasks.reporting.text import cell, fenced, table

TEMPLATE = Path(__file__).with_name("card.md.jinja")
MAX_VALUES = 20  # of one column, in its counts
SIZES = {
    1_000: "n<1K",
    10_000: "1K<n<10K",
    100_000: "10K<n<100K",
    1_000_000: "100K<n<1M",
    10_000_000: "1M<n<10M",
}
PAPER = """@article{kong2025concur,
  title   = {ConCuR: Conciseness Makes State-of-the-Art Kernel Generation},
  author  = {Kong, Lingcheng and Wei, Jiateng and Shen, Hanzhang and Wang, Huan},
  journal = {arXiv preprint arXiv:2510.07356},
  year    = {2025},
  url     = {https://arxiv.org/abs/2510.07356}
}"""
LANGUAGES = {"cuda": "CUDA", "triton": "Triton", "cpp": "C++"}
STAGES = {
    TASKS: "tasks",
    SYNTHESIS: "candidates written by a model, with reasoning",
    VERIFICATION: "verdicts: correctness and speedup of each",
    CURATION: "taken",
}
WORKLOADS = {
    "arithmetic_intensity": "arithmetic intensity (FLOPs a byte)",
    "flops": "floating-point operations of a call",
    "bytes_min": "bytes that a call must move",
}


@dataclass(frozen=True)
class Card:
    """Everything a card says. `facts` and `statistics` by configuration, the default one first;
    `figures` are paths inside the folder."""

    options: PublishOptions
    tag: str
    shards: Sequence[Shard]
    columns: Sequence[str]
    statistics: Mapping[str, Statistics]
    facts: Mapping[str, Mapping[str, Any]]
    workloads: Workloads | None = None
    observations: str | None = None
    decontamination: str | None = None
    figures: Sequence[str] = ()

    @property
    def citation(self) -> str:
        return self.options.citation or bibtex_of_set(self.options.name, self.tag)

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
    counts = numbers.counts
    tools = sorted((facts.get("tools") or {}).items())
    licences = counts["task_license"].items()
    loader = FileSystemLoader(TEMPLATE.parent)
    environment = Environment(loader=loader, undefined=StrictUndefined, autoescape=False)
    text = environment.get_template(TEMPLATE.name).render(
        card=context,
        numbers=numbers,
        facts=facts,
        front_matter=_front_matter(context, list(counts["language"])),
        written_in=" and ".join(LANGUAGES.get(name, cell(name)) for name in counts["language"]),
        stages=list(_stages(facts)),
        tools=", ".join(f"{cell(name)} {cell(version)}" for name, version in tools),
        sizes=list(_sizes(context)),
        columns=[_column(name) for name in context.columns],
        families=_families(context.workloads) if context.workloads else "",
        observations=_observations(context),
        decontamination=_nested(context.decontamination),
        licences=", ".join(f"{cell(name)} ({count:,} rows)" for name, count in licences),
        devices=" and ".join(cell(name) for name in counts["device"]),
        citation=context.citation,
        paper=PAPER,
        unknown=UNKNOWN,
        cell=cell,
        fenced=fenced,
        table=table,
        counts=_counts,
        quantiles=_quantiles,
        number="{:,}".format,
    )
    return f"{DatasetCard(text)}\n"


def size_category(rows: int) -> str:
    """The hub's name for a number of rows."""
    return next((name for limit, name in SIZES.items() if rows < limit), "10M<n<100M")


def bibtex_of_set(name: str, tag: str) -> str:
    """A BibTeX entry of one refresh of the set."""
    title = "".join(each for each in _line(name) if each not in "{}\\%$#&~^")
    key = "".join(each for each in title.lower() if each.isascii() and each.isalnum())
    fields = {
        "title": title,
        "howpublished": f"made with concur, revision {tag}",
        "year": tag.removeprefix("refresh-")[:4],
    }
    lines = [f"  {field:<12} = {{{value}}}" for field, value in fields.items()]
    return ",\n".join([f"@misc{{{key or 'kernels'}", *lines]) + "\n}"


def _front_matter(context: Card, languages: Sequence[str]) -> str:
    from huggingface_hub import DatasetCardData

    configs: dict[str, dict[str, Any]] = {}
    for config, split, files in context.splits():
        entry = configs.setdefault(config, {"config_name": config})
        if len(configs) == 1:
            entry["default"] = True
        path = PurePosixPath(files[0].path).parent / f"{split}-*.parquet"
        entry.setdefault("data_files", []).append({"split": split, "path": str(path)})
    return DatasetCardData(
        pretty_name=_line(context.options.name),
        license=context.options.license,
        language=["en"],
        task_categories=["text-generation"],
        size_categories=[size_category(sum(shard.rows for shard in context.shards))],
        tags=["concur", "code", "gpu-kernels", "reasoning", *languages],
        configs=list(configs.values()),
    ).to_yaml()


def _stages(facts: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Each stage with its rows, its settings and the fingerprint of its snapshot."""
    for stage, what in STAGES.items():
        if found := facts.get(stage):
            rows = "" if found.get("rows") is None else f"{found['rows']:,} "
            settings = {name: found[name] for name in found if name not in ("fingerprint", "rows")}
            if stage == VERIFICATION:  # forty numbers
                settings["config"] = {"protocol": f"see facts.{stage} in publication.json"}
            text = "; ".join(f"{cell(name)} {cell(value, 400)}" for name, value in _flat(settings))
            yield stage, rows + what, text, cell(found["fingerprint"])


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings that are set, by dotted name."""
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, prefix if name == "config" else f"{prefix}{name}.")
        elif item not in (None, "", [], ()):
            several = isinstance(item, list | tuple)
            yield f"{prefix}{name}", ", ".join(map(str, item)) if several else str(item)


def _sizes(context: Card) -> Iterator[tuple[str, ...]]:
    for config, split, shards in context.splits():
        rows, size = (
            sum(getattr(each, name) for each in shards) for name in ("rows", "size_bytes")
        )
        tasks = str(shards[0].tasks) if len(shards) == 1 else ""
        yield cell(config), split, f"{rows:,}", tasks, str(len(shards)), f"{size / 1e6:,.1f}"


def _column(name: str) -> tuple[str, str]:
    known = COLUMNS.get(name)
    return (f"`{name}`", known) if known else (cell(name), "as curation wrote it")


def _counts(found: Statistics) -> str:
    lines = []
    for name, counts in found.counts.items():
        shown = [f"{cell(value)} {count:,}" for value, count in counts.items()]
        if len(shown) > MAX_VALUES:
            shown[MAX_VALUES:] = [f"and {len(shown) - MAX_VALUES} more"]
        lines += [f"- {name}: {', '.join(shown)}"] if shown else []
    return "\n".join(lines)


def _quantiles(title: str, quantiles: Mapping[str, Mapping[str, float]]) -> str:
    shares = [f"{float(share):.0%}" for share in next(iter(quantiles.values()))]
    rows = [
        (WORKLOADS.get(name, name), *(f"{value:,.4g}" for value in values.values()))
        for name, values in quantiles.items()
    ]
    return table((title, *shares), rows)


def _families(found: Workloads) -> str:
    counted = max(1, found.counted)
    rows = [
        (cell(name), f"{count:,}", f"{count / counted:.0%}")
        for name, count in found.families.items()
    ]
    return table(("family", "tasks", "share"), rows)


def _observations(context: Card) -> str:
    text = _nested(context.observations)
    images = [path for path in context.figures if path not in text]
    shown = [f"![{cell(PurePosixPath(path).stem)}]({path})" for path in images]
    return "\n\n".join([*([text] if text else []), *shown])


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
