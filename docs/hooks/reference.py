"""The pages of the reference that are made from the code each time the site is built.

Guarantees: every command and option; every key of a profile with its type, default, bounds and
meaning; every column of every table; every profile and strategy that ships. What the code does not
say is an error here (`Undescribed`), so that nothing is listed without its meaning. Does not write
into the repository: the pages exist in the site alone.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import columns

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # the site is that of this checkout
    sys.path.insert(0, str(ROOT))


CLI_HEAD = """
# The command line

This page is generated from the command; `concur COMMAND --help` prints the same. In a clone the
command is `.venv/bin/concur`.

Exit status: 0 done; 1 the run or the machine failed; 2 the input cannot be used (one line names the
cause and the fix); 130 interrupted: rerun the command to resume. A kernel that fails is a result,
not a failure of the command.
"""


class Undescribed(ValueError):
    """A key or column without a sentence that says what it is."""


class Key(NamedTuple):
    """A key of a profile. `children`: its own keys are in a section of that name."""

    path: str
    kind: str
    default: str
    bounds: str
    meaning: str
    children: str = ""


def pages() -> dict[str, str]:
    """The path in docs/ and the text of each page."""
    return {
        "reference/cli.md": cli_page(),
        "reference/configuration.md": configuration_page(),
        "reference/profiles.md": profiles_page(),
        "reference/tables.md": tables_page(),
    }


# -- the command line ------------------------------------------------------------------------------


def commands(group: Any, path: str = "concur") -> Iterator[tuple[str, Any, Any]]:
    """The group and every command, with its words and a context of its own."""
    import typer

    context = typer.Context(group, info_name=path, **group.context_settings)
    yield path, group, context
    for name, command in group.commands.items():
        yield f"{path} {name}", command, typer.Context(command, info_name=name, parent=context)


def cli_page() -> str:
    """Raises Undescribed for a command or an option without help."""
    from flows.cli.main import main

    lines = [CLI_HEAD.strip(), ""]
    for path, command, context in commands(main):
        if not command.help:
            raise Undescribed(f"{path} has no help")
        usage = " ".join([path, *command.collect_usage_pieces(context)])
        lines += [
            f"## {path}",
            "",
            _cell(inspect.cleandoc(command.help)),
            "",
            "```text",
            usage,
            "```",
            "",
        ]
        rows = [
            _option_row(path, option)
            for option in command.get_params(context)
            if option.param_type_name == "option"
        ]
        lines += ["| option | value | default | meaning |", "| --- | --- | --- | --- |", *rows, ""]
    return "\n".join(lines)


def _option_row(path: str, option: Any) -> str:
    if not option.help:
        raise Undescribed(f"{path} {option.opts[0]} has no help")
    default = ""
    if isinstance(option.show_default, str):
        default = option.show_default
    elif option.show_default and option.default is not None and not option.is_flag:
        default = str(option.default)
    value = "" if option.is_flag else _value_of(option)
    value += ", required" if option.required else ""
    names = ", ".join(f"`{name}`" for name in option.opts)
    return f"| {names} | {_cell(value)} | {_cell(default)} | {_cell(option.help)} |"


def _value_of(option: Any) -> str:
    """What is typed behind an option: its metavar, the choices, or the type."""
    if option.metavar:
        return f"`{option.metavar}`"
    for kind in (option.type_descriptor.annotation, *get_args(option.type_descriptor.annotation)):
        if get_origin(kind) is Literal:
            return ", ".join(f"`{choice}`" for choice in get_args(kind))
        if isinstance(kind, type) and issubclass(kind, Enum):
            return ", ".join(f"`{choice.value}`" for choice in kind)
        if kind in (int, float):
            return "number"
    return "text"


# -- configuration ---------------------------------------------------------------------------------


def sections() -> Iterator[tuple[str, str, list[Key]]]:
    """Every group of keys: its path ("" for the top), what it is about, and its keys. A group that
    is there twice is described once.

    Raises Undescribed for a key or group that nothing describes.
    """
    from flows.config import PipelineConfig

    schema = PipelineConfig.model_json_schema()
    defaults = PipelineConfig().model_dump(mode="json")
    yield from _sections("", schema, defaults, schema["$defs"], {})


def _sections(
    path: str, schema: Any, defaults: Any, known: Any, seen: dict[str, tuple[str, Any]]
) -> Iterator[tuple[str, str, list[Key]]]:
    about = " ".join(schema.get("description", "").split())
    keys, below = [], []
    for name, field in schema["properties"].items():
        place = f"{path}.{name}".lstrip(".")
        default = (defaults or {}).get(name)
        group = _group_of(field, known)
        meaning = field.get("description") or (group[1].get("description", "") if group else "")
        if not meaning:
            raise Undescribed(f"{place} has no description: give it a docstring")
        meaning = " ".join(meaning.split())
        if group is None:
            keys.append(
                Key(place, _kind(field, known), _yaml(default), _bounds(field, known), meaning)
            )
            continue
        title, definition = group
        if title in seen:  # described once; here stands what is otherwise
            first, usual = seen[title]
            changed = default and {
                key: value for key, value in default.items() if usual.get(key) != value
            }
            keys.append(
                Key(place, "group", "" if changed == {} else _yaml(changed), "", meaning, first)
            )
            continue
        seen[title] = (place, default or {})
        keys.append(Key(place, "group", "", "", meaning, place))
        below.append((place, definition, default))
    yield path, about, keys
    for place, definition, default in below:
        yield from _sections(place, definition, default, known, seen)


def _group_of(field: Any, known: Any) -> tuple[str, Any] | None:
    """The name and schema of the model that a field holds, if it holds one."""
    for option in field.get("anyOf", field.get("allOf", [field])):
        name = option.get("$ref", "").removeprefix("#/$defs/")
        if name and "properties" in known[name]:
            return name, known[name]
    return None


def _options(field: Any, known: Any) -> list[Any]:
    options = field.get("anyOf") or field.get("oneOf") or [field]
    return [
        known[option["$ref"].removeprefix("#/$defs/")] if "$ref" in option else option
        for option in options
    ]


def _kind(field: Any, known: Any) -> str:
    return " or ".join(dict.fromkeys(_one_kind(option, known) for option in _options(field, known)))


def _one_kind(option: Any, known: Any) -> str:
    if "$ref" in option:
        option = known[option["$ref"].removeprefix("#/$defs/")]
    if "enum" in option or "const" in option:
        return ", ".join(f"`{value}`" for value in option.get("enum", [option.get("const")]))
    if option.get("type") == "array":
        items = option.get("items")
        return "list" if items is None else f"list of {_one_kind(items, known)}"
    if option.get("type") == "object":
        return "mapping of text"
    names = {
        "integer": "integer",
        "number": "number",
        "string": "text",
        "boolean": "true or false",
        "null": "null",
    }
    return names[option["type"]]


def _bounds(field: Any, known: Any) -> str:
    said = []
    for option in _options(field, known):
        signs = (
            ("minimum", "≥"),
            ("exclusiveMinimum", ">"),
            ("maximum", "≤"),
            ("exclusiveMaximum", "<"),
        )
        said += [
            f"{sign} {option[name]:g}" if option[name] < 1e15 else f"{sign} 2^63"
            for name, sign in signs
            if name in option
        ]
        if option.get("minLength") or option.get("minItems"):
            said.append("not empty")
    return ", ".join(dict.fromkeys(said))


def _yaml(value: Any) -> str:
    import yaml

    text = (
        yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
        .removesuffix("...\n")
        .strip()
    )
    return text


def _cell(text: str) -> str:
    """Text that stays in its cell of a table and is no HTML."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else part.replace("<", "&lt;").replace("*", "\\*")
        for part in parts
    ).replace("|", "\\|")


def configuration_page() -> str:
    lines = [
        "# Configuration: every key of a profile",
        "",
        (
            "A profile is a YAML file of these keys; what it leaves out has the default below. Any"
            " key can be set on the command line,"
        ),
        (
            "`--set KEY=VALUE`, where the value is YAML. An unknown key, a wrong type or a value"
            " out of bounds is one error with its name."
        ),
        "Made from `flows.config.PipelineConfig` and the configurations in it.",
        "",
    ]
    for path, about, keys in sections():
        lines += [f"## `{path}`" if path else "## The top", ""]
        lines += [_cell(about), ""] if about else []
        lines += ["| key | type | default | bounds | meaning |", "| --- | --- | --- | --- | --- |"]
        for key in keys:
            kind = f"[keys](#{anchor(key.children)})" if key.children else _cell(key.kind)
            default = f"`{key.default}`".replace("|", "\\|") if key.default else ""
            lines.append(
                f"| `{key.path.rpartition('.')[2]}` | {kind} | {default} | {_cell(key.bounds)} |"
                f" {_cell(key.meaning)} |"
            )
        lines.append("")
    return "\n".join(lines)


def anchor(path: str) -> str:
    """What the heading of a section is linked by."""
    from markdown.extensions.toc import slugify

    return slugify(path, "-")


# -- profiles and strategies -----------------------------------------------------------------------


def profiles_page() -> str:
    from flows.config import shipped_dir

    lines = [
        "# Profiles and strategies that ship",
        "",
        (
            "A profile is a whole configuration of the line, `concur run --profile NAME`, or the"
            " path of a file of your own. A strategy says"
        ),
        (
            "which verified samples become training data, `concur curate --strategy NAME`, or"
            " `curation.strategy` in a profile."
        ),
        "[Every key](configuration.md) has a default, so a file holds only what it changes.",
        "",
    ]
    for title, folder in (
        ("Profiles", shipped_dir("profiles")),
        ("Strategies", shipped_dir("profiles").parent / "strategies"),
    ):
        lines += [f"## {title}", ""]
        for file in sorted(folder.glob("*.yaml")):
            about, text = _headed(file)
            lines += [f"### {file.stem}", "", about, "", "```yaml", text, "```", ""]
    return "\n".join(lines)


def _headed(file: Path) -> tuple[str, str]:
    """The comment at the top of a YAML file, and the rest. Raises Undescribed where there is no
    comment."""
    lines = file.read_text(encoding="utf-8").splitlines()
    top = [
        line
        for line in lines[
            : next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
        ]
    ]
    if not top:
        raise Undescribed(f"{file.name} does not open with a comment that says what it is")
    return _cell(" ".join(line.lstrip("# ") for line in top)), "\n".join(lines[len(top) :]).strip()


# -- tables ----------------------------------------------------------------------------------------


def tables() -> dict[str, tuple[str, Any, Mapping[str, str]]]:
    """The table of each stage, in the order of the line: what a row is, its schema, and the meaning
    of each column."""
    from tasks import tables as schemas
    from tasks.tables import NUMBERS, SCORES, TRACE_FLAGS, WORKLOADS
    from tasks.training.stage import HISTORY

    return {
        "tasks": ("a PyTorch reference program", schemas.TASKS, columns.TASKS),
        "training-tasks": (
            "a task that the benchmark does not know, each once",
            schemas.TASKS,
            columns.TASKS,
        ),
        "workloads": ("what one task computes and moves", WORKLOADS, columns.WORKLOADS),
        "synthesis": ("a candidate", schemas.CANDIDATES, columns.CANDIDATES),
        "verification": ("the verdict of one candidate", schemas.VERDICTS, columns.VERDICTS),
        "kernel-profiles": (
            "what limits one correct candidate",
            schemas.KERNEL_PROFILES,
            columns.KERNEL_PROFILES,
        ),
        "trace-flags": (
            "what is wrong with the reasoning of one correct candidate",
            TRACE_FLAGS,
            columns.TRACE_FLAGS,
        ),
        "curation": ("a sample of the training set", schemas.CURATED, columns.CURATED),
        "analysis": ("a headline number", NUMBERS, columns.NUMBERS),
        "training": ("an optimiser step", HISTORY, columns.HISTORY),
        "benchmark": ("a score", SCORES, columns.SCORES),
    }


def columns_of(schema: Any) -> dict[str, Any]:
    """Every column, and every field of its structs as `column.field`, with its type."""
    import pyarrow as pa

    found: dict[str, Any] = {}
    for field in schema:
        found[field.name] = field.type
        if pa.types.is_struct(field.type):
            found |= {f"{field.name}.{inner.name}": inner.type for inner in field.type}
    return found


def tables_page() -> str:
    from kernels_eval.flags import FLAGS

    lines = [
        "# Tables: every column of every snapshot",
        "",
        (
            "A stage writes `ROOT/STAGE/FINGERPRINT/part-*.parquet` ([what a snapshot"
            " is](../explanation/line.md#snapshots)). Any reader of"
        ),
        (
            "Parquet will do; structs are written here with a dot. Names end in their unit: `_ms`"
            " milliseconds, `_s` seconds, `_tokens` tokens"
        ),
        "under the generator's own tokenizer, `_share` a share of 1.",
        "",
    ]
    for stage, (row, schema, said) in tables().items():
        lines += [
            f"## {stage}",
            "",
            f"A row is {row}.",
            "",
            "| column | type | meaning |",
            "| --- | --- | --- |",
        ]
        for name, of in columns_of(schema).items():
            if name not in said:
                raise Undescribed(f"docs/hooks/columns.py does not say what {name} of {stage} is")
            lines.append(f"| `{name}` | {_type(of)} | {_cell(said[name])} |")
        lines.append("")
    lines += ["## Flags of a verdict", "", "| flag | what it means for you |", "| --- | --- |"]
    lines += [f"| `{flag}` | {_cell(meaning)} |" for flag, meaning in FLAGS.items()]
    return "\n".join([*lines, ""])


def _type(of: Any) -> str:
    text = str(of)
    if text.startswith("list<") and "struct" in text:
        return "list of structs"
    return (
        "struct"
        if text.startswith("struct")
        else re.sub(r"^list<\w+: (\w+)>$", r"list of \1", text)
    )
