"""Versions of the stages' logic: what a snapshot's identity says of the code that made it.

Raise a constant when the same inputs may give other rows, and a nightly refresh does that stage
again. Editing a docstring, a page or an error message changes nothing. `LOGIC` names the code that
each constant stands for; `tests/support/protocol_lock.py` keeps its hashes and reminds whoever
edits it. `kernels_eval.versions.PROTOCOL_VERSION` is the verifier's.
"""

from __future__ import annotations

SOURCES_VERSION = 1
"""How tasks of other formats become ours. In no key: a tasks snapshot is its content."""
SYNTHESIS_VERSION = 2
"""Which requests are made of tasks, and what is kept of an answer."""
TEACHER_VERSION = 2
"""What the scripted teacher writes."""
PARSER_VERSION = 2
"""How an answer is divided into reasoning, text and code. Raw answers do not depend on it."""
CANDIDATE_TABLE_VERSION = 3
"""How a table of candidates from elsewhere is read."""
DECONTAMINATION_VERSION = 3
WORKLOAD_VERSION = 1
"""What a task's reference computes and moves."""
PROFILE_VERSION = 1
"""Where a task's reference spends its time."""
KERNEL_PROFILE_VERSION = 1
"""What limits a correct kernel, and by which numbers."""
TRACE_FLAG_VERSION = 1
"""What is wrong with a trace of reasoning."""
CURATION_VERSION = 2
ANALYSIS_VERSION = 3
SEARCH_VERSION = 2
"""Which candidates are proposed, and what confirms a winner."""
TRAINING_VERSION = 1
SCORING_VERSION = 2
"""Which numbers the benchmark makes of verdicts."""
REPORT_VERSION = 6
"""What the report of a run shows."""
VIEWER_VERSION = 1
"""What the viewer of candidates shows."""
PUBLISHING_VERSION = 3
"""What a published data set holds."""

LOGIC: dict[str, tuple[str, ...]] = {
    "SOURCES_VERSION": ("tasks.sources",),
    "SYNTHESIS_VERSION": (
        "tasks.synthesis.stage",
        "tasks.synthesis.requests",
        "tasks.synthesis.refine",
        "tasks.synthesis.contrast",
        "tasks.synthesis.prompts",
        "kernels_eval.languages",
        "tasks.synthesis.sampler",
        "tasks.synthesis.recorded",
        "tasks.synthesis.client",
        "tasks.synthesis.local",
    ),
    "TEACHER_VERSION": ("tasks.synthesis.scripted",),
    "PARSER_VERSION": ("tasks.synthesis.parsing",),
    "CANDIDATE_TABLE_VERSION": ("tasks.synthesis.tables", "tasks.synthesis.inputs"),
    "PROTOCOL_VERSION": (
        "kernels_eval.build",
        "kernels_eval.checks",
        "kernels_eval.child",
        "kernels_eval.config",
        "kernels_eval.evaluator",
        "kernels_eval.isolation",
        "kernels_eval.languages",
        "kernels_eval.parent",
        "kernels_eval.records",
        "kernels_eval.reference",
    ),
    "DECONTAMINATION_VERSION": ("tasks.decontamination",),
    "WORKLOAD_VERSION": (
        "tasks.workload",
        "tasks.operators",
        "kernels_eval.reference.workload",
        "kernels_eval.reference.operator_costs",
        "kernels_eval.checks.inputs",
        "kernels_eval.checks.operators",
    ),
    "PROFILE_VERSION": (
        "tasks.workload",
        "kernels_eval.reference.operator_times",
        "kernels_eval.checks.operator_times",
        "kernels_eval.checks.inputs",
    ),
    "KERNEL_PROFILE_VERSION": (
        "tasks.profiling",
        "kernels_eval.profiling",
        "kernels_eval.checks.operator_times",
        "kernels_eval.checks.cubins",
        "kernels_eval.child.profiled",
    ),
    "TRACE_FLAG_VERSION": ("tasks.curation.flags",),
    "CURATION_VERSION": ("tasks.curation", "tasks.operators"),
    "ANALYSIS_VERSION": ("tasks.analysis",),
    "SEARCH_VERSION": ("tasks.search",),
    "TRAINING_VERSION": ("tasks.training", "tasks.sources.holdout"),
    "SCORING_VERSION": (
        "tasks.benchmark.stage",
        "tasks.benchmark.scoring",
        "tasks.benchmark.samples",
        "tasks.benchmark.comparing",
        "tasks.benchmark.metrics",
    ),
    "REPORT_VERSION": ("tasks.benchmark", "tasks.reporting", "flows.report"),
    "VIEWER_VERSION": ("tasks.viewer", "flows.view"),
    "PUBLISHING_VERSION": ("tasks.publishing",),
}
"""Modules and packages by the constant to raise when what they come to changes."""

STAGES: dict[str, tuple[str, ...]] = {
    "tasks": ("SOURCES_VERSION",),
    "synthesis": ("SYNTHESIS_VERSION", "PARSER_VERSION"),
    "candidates": ("CANDIDATE_TABLE_VERSION", "PARSER_VERSION"),
    "verification": ("PROTOCOL_VERSION",),
    "training-tasks": ("DECONTAMINATION_VERSION",),
    "workloads": ("WORKLOAD_VERSION",),
    "profiles": ("PROFILE_VERSION",),
    "kernel-profiles": ("KERNEL_PROFILE_VERSION",),
    "trace-flags": ("TRACE_FLAG_VERSION",),
    "curation": ("CURATION_VERSION",),
    "analysis": ("ANALYSIS_VERSION",),
    "search": ("SEARCH_VERSION",),
    "search-confirmation": ("SEARCH_VERSION",),
    "improved": ("SEARCH_VERSION",),
    "training": ("TRAINING_VERSION",),
    "benchmark": ("SCORING_VERSION",),
}
"""Constants by the name of the stage whose snapshots carry them."""


def modules_of(stage: str) -> tuple[str, ...]:
    """The modules whose logic a stage's manifest records; none for a stage that is not ours."""
    return tuple(name for constant in STAGES.get(stage, ()) for name in LOGIC[constant])
