"""Parquet schemas of the snapshots: the columns any reader (datasets, polars, DuckDB) finds.

Nested values are structs, not JSON. docs/hooks/columns.py describes every column.
"""

from __future__ import annotations

import pyarrow as pa

TEXT, NUMBER, COUNT, YES_OR_NO = pa.string(), pa.float64(), pa.int64(), pa.bool_()
TEXTS = pa.list_(TEXT)
Columns = list[tuple[str, pa.DataType]]


def _columns(*groups: tuple[str, pa.DataType]) -> Columns:
    """Names (divided by spaces) with their type, in order."""
    return [(name, kind) for names, kind in groups for name in names.split()]


SAMPLING = pa.struct(
    _columns(
        ("temperature top_p", NUMBER),
        ("max_tokens seed", COUNT),
        # null where the server decided, and in snapshots that older versions began
        ("top_k", COUNT),
        ("min_p repetition_penalty", NUMBER),
    )
)

TASKS = pa.schema(
    _columns(("task_id name code entry_point init_form source", TEXT), ("level", COUNT))
)

CANDIDATES = pa.schema(
    _columns(
        ("candidate_id task_id language generator", TEXT),
        ("sampling", SAMPLING),
        ("sample_index", COUNT),
        ("prompt_hash response reasoning answer code parse_reason", TEXT),
        ("reasoning_tokens completion_tokens", COUNT),
        ("finish_reason", TEXT),
        # 1, or later where it answers a follow-up; older snapshots have neither this nor `parent`
        ("turn", COUNT),
        # candidate_id of the attempt that was followed up; null at turn 1
        ("parent", TEXT),
        # reasoning as the server separated it from `response`; null where it did not
        ("separated_reasoning", TEXT),
        # hash of everything asked (task, generator, sampling, index): a refresh reuses the answer
        ("request_key", TEXT),
    )
)

COMPILED = pa.struct(
    _columns(
        ("mode", TEXT),
        ("reference_ms speedup speedup_lower speedup_upper drift", NUMBER),
        ("graphs", COUNT),
        ("compile_s", NUMBER),
        ("unavailable_reason", TEXT),  # `why_not` in older snapshots
    )
)

TIMING = pa.struct(
    _columns(
        ("reference_ms candidate_ms speedup speedup_lower speedup_upper", NUMBER),
        ("pairs calls_per_sample", COUNT),
        ("clock_bound_ms drift", NUMBER),
        ("throttled", YES_OR_NO),
        ("compiled", COMPILED),  # null where torch.compile was not asked for as a baseline
    )
)

CORRECTNESS = pa.struct(
    _columns(
        ("trials", COUNT),
        ("rms_error reference_rms_error max_error", NUMBER),
        ("kernelbench_1e4 kernelbench_1e2", YES_OR_NO),
        ("oracle", TEXT),
    )
)

PHASES = pa.struct(
    _columns(("reference_s load_s correctness_s attribution_s timing_s", NUMBER)),
)

VERDICTS = pa.schema(
    _columns(
        ("schema_version", COUNT),
        ("candidate_id task_id language status reason detail", TEXT),
        ("timing", TIMING),
        ("correctness", CORRECTNESS),
        ("outputs_match", YES_OR_NO),
        ("custom_kernels", TEXTS),
        ("custom_kernel_time_share", NUMBER),
        ("library_calls reference_operators", TEXTS),
        ("precision_class", TEXT),
        ("flags", TEXTS),
        ("build_tier", TEXT),
        ("build_cached", YES_OR_NO),
        ("isolation", TEXTS),
        ("device", TEXT),
        ("build_s run_s", NUMBER),
        ("phases", PHASES),
        ("log_tail", TEXT),
        # hash(candidate, code, protocol and its version, device, software): a refresh reuses it
        ("verdict_key", TEXT),
    )
)

CURATED = pa.schema(
    _columns(
        ("candidate_id task_id task_name task_code entry_point language generator", TEXT),
        ("reasoning answer code", TEXT),
        ("reasoning_tokens", COUNT),
        ("speedup speedup_lower", NUMBER),
        ("operator_kind", TEXT),  # single_operator | fusion
        ("criterion", TEXT),  # which rule took it
        # candidate_id that `reasoning` was moved here from; null where it is the sample's own
        ("reasoning_from", TEXT),
    )
)
