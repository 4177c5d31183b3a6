"""The columns of a published row: what each means, where it comes from, and its type.

Guarantees: the columns named here are in every published file, in this order. What curation writes
beyond them follows, under its own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from tasks.publishing.config import UNKNOWN
from tasks.tables import CANDIDATES, CURATED, TASKS, TIMING, VERDICTS

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
    *("candidate_id", "task_id", "task_code", "generator"),
    *("reasoning", "answer", "code", "criterion", "speedup"),
)
"""Columns without which a curated snapshot is no training set."""
# Where the other columns come from: the name there, by the name published.
OF_CANDIDATES = {
    name: name for name in ("sample_index", "turn", "parent", "sampling", "prompt_hash")
}
OF_TIMING = {name: name for name in ("speedup_upper", "reference_ms", "candidate_ms")}
OF_VERDICTS = {
    **{name: name for name in ("device", "precision_class", "flags", "verdict_key")},
    "verdict_schema_version": "schema_version",
}
OF_TASKS = {"task_source": "source", "task_level": "level", "init_form": "init_form"}

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
    sources = (
        (OF_TASKS, TASKS),
        (OF_CANDIDATES, CANDIDATES),
        (OF_TIMING, TIMING),
        (OF_VERDICTS, VERDICTS),
    )
    return pa.schema(
        [
            ("task_license", pa.string()),
            *(
                (name, schema.field(there).type)
                for names, schema in sources
                for name, there in names.items()
            ),
        ]
    )


def published_schema(curated: pa.Schema) -> pa.Schema:
    """The schema of a published file, for what a curated snapshot holds."""
    known = {field.name: field for schema in (CURATED, curated) for field in schema}
    known |= {field.name: field for field in provenance_schema()}
    extra = [name for name in curated.names if name not in COLUMNS]
    return pa.schema([(name, _plain(known[name].type)) for name in (*COLUMNS, *extra)])


def _plain(of: pa.DataType) -> pa.DataType:
    """One type for a text and one for a list, whichever library wrote the snapshot."""
    if pa.types.is_large_string(of) or pa.types.is_string_view(of):
        return pa.string()
    if pa.types.is_list(of) or pa.types.is_large_list(of):
        return pa.list_(_plain(of.value_type))
    if pa.types.is_struct(of):
        return pa.struct([(field.name, _plain(field.type)) for field in of])
    return of
