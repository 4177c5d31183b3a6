"""Parquet schemas of the snapshots: the columns any reader (datasets, polars, DuckDB) finds. Nested
values are structs, not JSON."""

from __future__ import annotations

import pyarrow as pa

SAMPLING = pa.struct(
    [
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("max_tokens", pa.int64()),
        ("seed", pa.int64()),
        # null where the server decided, and in snapshots that older versions began
        ("top_k", pa.int64()),
        ("min_p", pa.float64()),
        ("repetition_penalty", pa.float64()),
    ]
)

TASKS = pa.schema(
    [
        ("task_id", pa.string()),
        ("name", pa.string()),
        ("code", pa.string()),
        ("entry_point", pa.string()),
        ("init_form", pa.string()),
        ("source", pa.string()),
        ("level", pa.int64()),
    ]
)

CANDIDATES = pa.schema(
    [
        ("candidate_id", pa.string()),
        ("task_id", pa.string()),
        ("language", pa.string()),
        ("generator", pa.string()),
        ("sampling", SAMPLING),
        ("sample_index", pa.int64()),
        ("prompt_hash", pa.string()),
        ("response", pa.string()),
        ("reasoning", pa.string()),
        ("answer", pa.string()),
        ("code", pa.string()),
        ("parse_reason", pa.string()),
        ("reasoning_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
        ("finish_reason", pa.string()),
        (
            "turn",
            pa.int64(),
            # 1, or later where it answers a follow-up; older snapshots have neither this nor
            # `parent`
        ),
        ("parent", pa.string()),  # candidate_id of the attempt that was followed up; null at turn 1
        # reasoning as the server separated it from `response`; null where it did not
        ("separated_reasoning", pa.string()),
        (
            "request_key",
            pa.string(),
            # hash of everything asked (task, generator, sampling, index): lets a refresh reuse the
            # answer
        ),
    ]
)

COMPILED = pa.struct(
    [
        ("mode", pa.string()),
        ("reference_ms", pa.float64()),
        ("speedup", pa.float64()),
        ("speedup_lower", pa.float64()),
        ("speedup_upper", pa.float64()),
        ("drift", pa.float64()),
        ("graphs", pa.int64()),
        ("compile_s", pa.float64()),
        ("unavailable_reason", pa.string()),  # `why_not` in snapshots of before
    ]
)

TIMING = pa.struct(
    [
        ("reference_ms", pa.float64()),
        ("candidate_ms", pa.float64()),
        ("speedup", pa.float64()),
        ("speedup_lower", pa.float64()),
        ("speedup_upper", pa.float64()),
        ("pairs", pa.int64()),
        ("calls_per_sample", pa.int64()),
        ("clock_bound_ms", pa.float64()),
        ("drift", pa.float64()),
        ("throttled", pa.bool_()),
        ("compiled", COMPILED),  # null where torch.compile was not asked for as a baseline
    ]
)

CORRECTNESS = pa.struct(
    [
        ("trials", pa.int64()),
        ("rms_error", pa.float64()),
        ("reference_rms_error", pa.float64()),
        ("max_error", pa.float64()),
        ("kernelbench_1e4", pa.bool_()),
        ("kernelbench_1e2", pa.bool_()),
        ("oracle", pa.string()),
    ]
)

PHASES = pa.struct(
    [
        (f"{name}_s", pa.float64())
        for name in ("reference", "load", "correctness", "attribution", "timing")
    ]
)

VERDICTS = pa.schema(
    [
        ("schema_version", pa.int64()),
        ("candidate_id", pa.string()),
        ("task_id", pa.string()),
        ("language", pa.string()),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("timing", TIMING),
        ("correctness", CORRECTNESS),
        ("outputs_match", pa.bool_()),
        ("custom_kernels", pa.list_(pa.string())),
        ("custom_kernel_time_share", pa.float64()),
        ("library_calls", pa.list_(pa.string())),
        ("reference_operators", pa.list_(pa.string())),
        ("precision_class", pa.string()),
        ("flags", pa.list_(pa.string())),
        ("build_tier", pa.string()),
        ("build_cached", pa.bool_()),
        ("isolation", pa.list_(pa.string())),
        ("device", pa.string()),
        ("build_s", pa.float64()),
        ("run_s", pa.float64()),
        ("phases", PHASES),
        ("log_tail", pa.string()),
        (
            "verdict_key",
            pa.string(),
            # hash(candidate_id, EvalConfig, device, verifier code): lets a refresh reuse the
            # verdict
        ),
    ]
)

CURATED = pa.schema(
    [
        ("candidate_id", pa.string()),
        ("task_id", pa.string()),
        ("task_name", pa.string()),
        ("task_code", pa.string()),
        ("entry_point", pa.string()),
        ("language", pa.string()),
        ("generator", pa.string()),
        ("reasoning", pa.string()),
        ("answer", pa.string()),
        ("code", pa.string()),
        ("reasoning_tokens", pa.int64()),
        ("speedup", pa.float64()),
        ("speedup_lower", pa.float64()),
        ("operator_kind", pa.string()),  # single_operator | fusion
        ("criterion", pa.string()),  # which rule took it
        (
            "reasoning_from",
            pa.string(),
        ),  # candidate_id that `reasoning` was moved here from; null where it is the sample's own
    ]
)
