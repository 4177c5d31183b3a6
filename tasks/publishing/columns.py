"""The columns of a published row: what each means, where it comes from, and its type.

Guarantees: the columns named here are in every published file, in this order. What curation writes
beyond them follows, under its own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tasks.publishing.lineage import SYNTHESIS, TASKS, VERIFICATION

if TYPE_CHECKING:
    import pyarrow as pa

UNKNOWN = "unknown"
COLUMNS: Mapping[str, str] = {
    "task_id": "the task, unique in its source",
    "task_name": "what the source calls it",
    "task_source": "where the task is from",
    "task_license": (
        "SPDX identifier of the task's licence where the source states one, else `unknown`"
    ),
    "task_level": "KernelBench level, else null",
    "entry_point": "class of the reference program in `task_code`",
    "init_form": (
        "what `get_init_inputs()` returns: `args` (a list) or `args_kwargs` (`[args, kwargs]`)"
    ),
    "task_code": "the reference program, PyTorch",
    "language": "what the kernel is written in: `cuda`, `triton` or `cpp`",
    "candidate_id": (
        "hash of task, generator, sampling, sample index and response; the key of a row"
    ),
    "sample_index": "which of the task's samples this is, from 0",
    "turn": "1 answers the task; a later one answers what verification said of `parent`",
    "parent": "candidate_id of the attempt that was followed up; null at turn 1",
    "generator": "the model that wrote it",
    "sampling": "how the response was drawn; null where the server decided",
    "prompt_hash": "hash of the prompt",
    "reasoning": "what the model wrote before its answer",
    "answer": "the answer as the model wrote it",
    "code": "the module with `ModelNew`, taken from the answer",
    "reasoning_tokens": "tokens of the reasoning under the generator's own tokenizer",
    "criterion": "the rule that took the sample",
    "reasoning_from": (
        "the candidate whose reasoning this is, where it was moved between tasks (strategy"
        " shuffled_reasoning), else null"
    ),
    "operator_kind": "`single_operator` or `fusion`: what the reference was seen to execute",
    "speedup": "median reference time / median candidate time, paired in one run",
    "speedup_lower": "lower end of its 95 % interval",
    "speedup_upper": "upper end of its 95 % interval",
    "reference_ms": "median time of a call of the reference, in milliseconds",
    "candidate_ms": "median time of a call of the kernel, in milliseconds",
    "device": "what it was timed on",
    "precision_class": "the precision that the outputs were held to",
    "flags": "what verification noticed without rejecting it",
    "verdict_key": "hash of candidate, parsed code, protocol, device and torch",
    "verdict_schema_version": "version of the verdict's form",
}
REQUIRED = (
    "candidate_id",
    "task_id",
    "task_code",
    "generator",
    "reasoning",
    "answer",
    "code",
    "criterion",
    "speedup",
)
"""Columns without which a curated snapshot is no training set."""
OF_CANDIDATES = ("candidate_id", "sample_index", "turn", "parent", "sampling", "prompt_hash")
OF_VERDICTS = (
    "candidate_id",
    "schema_version",
    "timing",
    "device",
    "precision_class",
    "flags",
    "verdict_key",
)
OF_TASKS = ("task_id", "source", "level", "init_form")

LICENCES: Mapping[str, str] = {"bundled": "Apache-2.0", "kernelbook": "MIT"}
"""What a source states. KernelBook's is that of the one revision that we load from the hub: a file
may be of any."""


def licence_of(source: str, tasks_config: Mapping[str, Any]) -> str:
    """SPDX identifier of the licence of a source's tasks, `unknown` where the source states none or
    may be another revision."""
    if source == "kernelbook" and tasks_config.get("location") not in (None, "GPUMODE/KernelBook"):
        return UNKNOWN
    return LICENCES.get(source, UNKNOWN) if source == tasks_config.get("source") else UNKNOWN


def provenance_schema() -> pa.Schema:
    """Types of the columns that do not come from the curated snapshot itself."""
    import pyarrow as pa

    from tasks.tables import CANDIDATES, TASKS, TIMING, VERDICTS

    def field(name: str, of: pa.DataType) -> pa.Field:
        return pa.field(name, of)

    return pa.schema(
        [
            field("task_source", TASKS.field("source").type),
            field("task_license", pa.string()),
            field("task_level", TASKS.field("level").type),
            field("init_form", TASKS.field("init_form").type),
            *(
                field(name, CANDIDATES.field(name).type)
                for name in OF_CANDIDATES
                if name != "candidate_id"
            ),
            *(
                field(name, TIMING.field(name).type)
                for name in ("speedup_upper", "reference_ms", "candidate_ms")
            ),
            *(
                field(name, VERDICTS.field(name).type)
                for name in ("device", "precision_class", "flags", "verdict_key")
            ),
            field("verdict_schema_version", VERDICTS.field("schema_version").type),
        ]
    )


def published_schema(curated: pa.Schema) -> pa.Schema:
    """The schema of a published file, for what a curated snapshot holds."""
    import pyarrow as pa

    from tasks.tables import CURATED

    from_elsewhere = provenance_schema()
    fields = []
    for name in COLUMNS:
        if name in from_elsewhere.names:
            fields.append(from_elsewhere.field(name))
        else:
            fields.append(curated.field(name) if name in curated.names else CURATED.field(name))
    extra = [field for field in curated if field.name not in COLUMNS]
    return pa.schema([pa.field(field.name, _plain(field.type)) for field in [*fields, *extra]])


def _plain(of: pa.DataType) -> pa.DataType:
    """One type for a text and one for a list, whichever library wrote the snapshot."""
    import pyarrow as pa

    if pa.types.is_large_string(of) or pa.types.is_string_view(of):
        return pa.string()
    if pa.types.is_list(of) or pa.types.is_large_list(of):
        return pa.list_(_plain(of.value_type))
    return (
        pa.struct([pa.field(field.name, _plain(field.type)) for field in of])
        if pa.types.is_struct(of)
        else of
    )


STAGE_OF = {"candidates": SYNTHESIS, "verdicts": VERIFICATION, "tasks": TASKS}
