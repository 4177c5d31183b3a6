"""The card of a published set: README.md with the front matter that the hub and `datasets` read.

Guarantees: every number is of the files beside it or of a manifest; the front matter is YAML
whatever names it holds; what comes from data is escaped. Does not escape the sections that a caller
brings (observations, decontamination): they are the text of our own reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from kernels_eval.records import Record
from tasks.publishing.columns import COLUMNS, UNKNOWN
from tasks.publishing.lineage import CURATION, SYNTHESIS, TASKS, VERIFICATION
from tasks.publishing.shards import Shard
from tasks.publishing.statistics import Statistics
from tasks.publishing.workloads import Workloads, section
from tasks.reporting.text import cell, fenced, table

SIZES = (
    (1_000, "n<1K"),
    (10_000, "1K<n<10K"),
    (100_000, "10K<n<100K"),
    (1_000_000, "100K<n<1M"),
    (10_000_000, "1M<n<10M"),
)
PAPER = """@article{kong2025concur,
  title   = {ConCuR: Conciseness Makes State-of-the-Art Kernel Generation},
  author  = {Kong, Lingcheng and Wei, Jiateng and Shen, Hanzhang and Wang, Huan},
  journal = {arXiv preprint arXiv:2510.07356},
  year    = {2025},
  url     = {https://arxiv.org/abs/2510.07356}
}"""
LANGUAGES = {"cuda": "CUDA", "triton": "Triton", "cpp": "C++"}


class CardContext(Record):
    """Everything a card says."""

    name: str
    license: str
    tag: str
    default_config: str
    shards: tuple[Shard, ...]
    columns: tuple[str, ...]
    statistics: dict[str, Statistics]
    facts: dict[str, dict[str, Any]]
    holdout_share: float
    seed: int
    workloads: Workloads | None = None
    observations: str | None = None
    decontamination: str | None = None
    figures: tuple[str, ...] = ()
    citation: str | None = None


def card(context: CardContext) -> str:
    """The whole README.md."""
    from huggingface_hub import DatasetCardData

    languages = list(context.statistics[context.default_config].counts["language"])
    data = DatasetCardData(
        pretty_name=_line(context.name),
        license=context.license,
        language=["en"],
        task_categories=["text-generation"],
        size_categories=[size_category(sum(shard.rows for shard in context.shards))],
        tags=["concur", "code", "gpu-kernels", "reasoning", *languages],
        configs=[
            {
                "config_name": config,
                **({"default": True} if config == context.default_config else {}),
                "data_files": [
                    {
                        "split": split,
                        "path": str(PurePosixPath(files[0].path).parent / f"{split}-*.parquet"),
                    }
                    for split, files in _by_split(context, config).items()
                ],
            }
            for config in context.statistics
        ],
    )
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(_body(context)) + "\n"


def size_category(rows: int) -> str:
    """The hub's name for a number of rows."""
    return next((name for limit, name in SIZES if rows < limit), "10M<n<100M")


def bibtex_of_set(name: str, tag: str) -> str:
    """A BibTeX entry of one refresh of the set."""
    title = "".join(character for character in _line(name) if character not in "{}\\%$#&~^")
    key = (
        "".join(
            character for character in title.lower() if character.isascii() and character.isalnum()
        )
        or "kernels"
    )
    fields = {
        "title": title,
        "howpublished": f"made with concur, revision {tag}",
        "year": _year(tag),
    }
    lines = [f"@misc{{{key}", *(f"  {field:<12} = {{{value}}}" for field, value in fields.items())]
    return ",\n".join(lines) + "\n}"


def _body(context: CardContext) -> Iterator[str]:
    facts, numbers = (
        context.facts[context.default_config],
        context.statistics[context.default_config],
    )
    written_in = " and ".join(
        LANGUAGES.get(name, cell(name)) for name in numbers.counts["language"]
    )
    yield f"# {cell(context.name)}"
    yield (
        f"{numbers.rows:,} kernels ({written_in}) for {numbers.tasks:,} PyTorch programs, each with"
        " the reasoning of the model that wrote it. Every kernel was built, compared with its"
        " program on inputs it had not seen, and timed against it. This is the revision"
        f" `{context.tag}`."
    )
    yield "## Load it\n\n" + fenced(_loading(context), "python")
    yield "## How it was made\n\n" + _how(facts)
    yield "## Size\n\n" + _sizes(context)
    yield "## Columns\n\n" + _columns(context)
    yield "## Statistics\n\n" + "\n\n".join(
        _numbers(config, found) for config, found in context.statistics.items()
    )
    if context.workloads:
        yield "## What the tasks compute\n\n" + section(context.workloads)
    if context.observations or context.figures:
        images = [
            f"![{cell(PurePosixPath(path).stem)}]({path})"
            for path in context.figures
            if path not in (context.observations or "")
        ]
        yield "## Observations\n\n" + "\n\n".join(
            [*([_nested(context.observations)] if context.observations else []), *images]
        )
    yield "## Decontamination\n\n" + (
        _nested(context.decontamination)
        if context.decontamination
        else (
            "No report came with this refresh: how far these tasks overlap with a benchmark is not"
            " known. Find out before you report a score of a model trained on them."
        )
    )
    yield "## One row\n\n" + _example(numbers.example)
    yield "## Licence and sources\n\n" + _licence(context, numbers)
    yield "## Limits\n\n" + _limits(context, numbers)
    yield "## How to cite\n\n" + fenced(
        (context.citation or bibtex_of_set(context.name, context.tag)) + "\n\n" + PAPER,
        "bibtex",
        10_000,
    )


def _loading(context: CardContext) -> str:
    lines = [
        "from datasets import load_dataset",
        "",
        'rows = load_dataset("FOLDER_OR_HUB_ID", split="train")',
    ]
    lines += [
        f'rows = load_dataset("FOLDER_OR_HUB_ID", "{name}", split="train")'
        for name in context.statistics
    ]
    return "\n".join(
        [
            *lines,
            (
                f'rows = load_dataset("HUB_ID", split="train", revision="{context.tag}")  # this'
                " refresh, whatever follows"
            ),
        ]
    )


def _how(facts: Mapping[str, Any]) -> str:
    """The line, stage by stage, with the settings and the fingerprint of each snapshot."""
    words = {
        TASKS: "tasks",
        SYNTHESIS: "candidates written by a model, with reasoning",
        VERIFICATION: "verdicts: correctness and speedup of each",
        CURATION: "taken",
    }
    rows = []
    for stage, word in words.items():
        told = facts.get(stage)
        if told:
            counted = f"{told['rows']:,} {word}" if told.get("rows") is not None else word
            shown = {
                name: value for name, value in told.items() if name not in ("fingerprint", "rows")
            }
            if stage == VERIFICATION:  # forty numbers
                shown["config"] = {"protocol": f"see facts.{stage} in publication.json"}
            settings = _settings(shown)
            rows.append((stage, counted, settings, cell(told["fingerprint"])))
    tools = ", ".join(
        f"{cell(name)} {cell(version)}"
        for name, version in sorted((facts.get("tools") or {}).items())
    )
    return (
        f"{table(('stage', 'rows', 'settings', 'snapshot'), rows)}\n\nFinished"
        f" {cell(facts['created_at'])}, with {tools}."
    )


def _settings(told: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{cell(name)} {cell(value, 400)}"
        for name, value in _flat(told)
        if value not in (None, "", [], {})
    )


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, prefix if name == "config" else f"{prefix}{name}.")
        else:
            yield (
                f"{prefix}{name}",
                (", ".join(map(str, item)) if isinstance(item, list | tuple) else item),
            )


def _sizes(context: CardContext) -> str:
    rows = []
    for config in context.statistics:
        for split, shards in _by_split(context, config).items():
            size = sum(shard.size_bytes for shard in shards)
            tasks = str(shards[0].tasks) if len(shards) == 1 else ""
            rows.append(
                (
                    cell(config),
                    split,
                    f"{sum(shard.rows for shard in shards):,}",
                    tasks,
                    str(len(shards)),
                    f"{size / 1e6:,.1f}",
                )
            )
    text = table(("configuration", "split", "rows", "tasks", "files", "MB"), rows)
    if context.holdout_share:
        text += (
            f"\n\n`test` holds the rows of about {context.holdout_share:.0%} of all tasks, chosen"
            f" by a hash of the task_id and the seed {context.seed}: a task stays in its split in"
            " every refresh."
        )
    return text


def _columns(context: CardContext) -> str:
    return table(
        ("column", "meaning"),
        [
            (
                f"`{name}`" if name in COLUMNS else cell(name),
                COLUMNS.get(name, "as curation wrote it"),
            )
            for name in context.columns
        ],
    )


def _numbers(config: str, found: Statistics) -> str:
    lines = [f"Configuration {cell(config)}:"]
    for name, counts in found.counts.items():
        if counts:
            shown = list(counts.items())[:20]
            more = f", and {len(counts) - len(shown)} more" if len(counts) > len(shown) else ""
            lines.append(
                f"- {name}: "
                + ", ".join(f"{cell(value)} {count:,}" for value, count in shown)
                + more
            )
    rows = [
        (name, *(f"{value:,.4g}" for value in quantiles.values()))
        for name, quantiles in found.quantiles.items()
    ]
    if rows:
        shares = [f"{float(share):.0%}" for share in next(iter(found.quantiles.values()))]
        lines += ["", table(("quantile", *shares), rows)]
    return "\n".join([lines[0], "", *lines[1:]])


def _nested(text: str | None) -> str:
    """A section of somebody else's document: its headings go below ours, code blocks stay as they
    are."""
    lines, fence = [], ""
    for line in (text or "").strip().splitlines():
        mark = line.lstrip()[:3]
        if mark in ("```", "~~~") and (not fence or fence == mark):
            fence = "" if fence else mark
        lines.append(f"##{line}" if line.startswith("#") and not fence else line)
    return "\n".join(lines)


def _example(example: Mapping[str, str]) -> str:
    return "\n\n".join(
        [
            f"Task {cell(example['task_id'])}:",
            fenced(example["task_code"], "python"),
            "reasoning:",
            fenced(example["reasoning"], "text"),
            "code:",
            fenced(example["code"], "python"),
        ]
    )


def _licence(context: CardContext, numbers: Statistics) -> str:
    of_tasks = ", ".join(
        f"{cell(name)} ({count:,} rows)" for name, count in numbers.counts["task_license"].items()
    )
    lines = [
        f"The set: {cell(context.license)}. Its tasks: {of_tasks or UNKNOWN}; `task_license` says"
        " it row by row."
    ]
    if context.license == UNKNOWN:
        lines.append(
            "Whoever made this folder named no licence for the set: ask before you use it."
        )
    if UNKNOWN in numbers.counts["task_license"]:
        lines.append(
            "`unknown` means that the source states no licence that we could record, not that there"
            " is none."
        )
    lines.append("The terms of the models that wrote the kernels (`generator`) may apply as well.")
    return " ".join(lines)


def _limits(context: CardContext, numbers: Statistics) -> str:
    devices = " and ".join(cell(name) for name in numbers.counts["device"]) or "an unknown device"
    lines = [
        (
            f"- Speedups are over eager PyTorch on {devices}, at the shapes of the task; elsewhere"
            " they differ."
        ),
        "- Correct means equal within tolerance on every input that was tried, not proven.",
        (
            "- Reasoning and kernels are a model's text: run `code` only where you would run code"
            " of a stranger."
        ),
        (
            "- Curation prefers short reasoning and fast kernels: the set is no sample of what the"
            " generator writes."
        ),
    ]
    if numbers.shared_programs:
        lines.append(
            f"- {numbers.shared_programs:,} programs are in both splits, under different task_ids:"
            " leave them out of what `test` measures."
        )
    return "\n".join(lines)


def _by_split(context: CardContext, config: str) -> dict[str, list[Shard]]:
    found: dict[str, list[Shard]] = {}
    for shard in context.shards:
        if shard.config == config:
            found.setdefault(shard.split, []).append(shard)
    return found


def _line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text).strip()


def _year(tag: str) -> str:
    return tag.removeprefix("refresh-")[:4]
