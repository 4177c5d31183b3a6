"""Recorded answers taken apart: reasoning, answer and code by hash, and the reason without code."""

from __future__ import annotations

from typing import Any

from tests.support.oracle.inputs import Inputs, digest


def parsed(text: str, reasoning: str | None, finish_reason: str | None) -> tuple[Any, ...]:
    """Adapter: reasoning, answer, code, and why there is no code."""
    from tasks.synthesis.parsing import parse_response

    found = parse_response(text, reasoning=reasoning, finish_reason=finish_reason)
    reason = found.parse_reason
    return found.reasoning, found.answer, found.code, reason and str(reason)


def section(inputs: Inputs) -> Any:
    found = {}
    for row in inputs.table("qwq32b_candidates").iter_rows(named=True):
        name = f"QwQ-32B {row['level']}/{row['problem_id']}/{row['sample_id']}"
        found |= _ways(name, row["response"])
    for row in inputs.table("tritonbench_t_candidates").iter_rows(named=True):
        found |= _ways(f"{row['model']} {row['name']}/{row['index']}", row["response"])
    return found


def _ways(name: str, text: str) -> dict[str, Any]:
    """The answer as it is, cut off, and as a server sends it that separates the reasoning."""
    thought, closed, answer = text.partition("</think>")
    ways: dict[str, tuple[str, str | None, str | None]] = {
        "whole": (text, None, "stop"),
        "cut off": (text[: len(text) * 2 // 3], None, "length"),
        "without reasoning": (answer if closed else text, None, None),
        "separated": (answer if closed else text, thought if closed else "", None),
    }
    found = {}
    for way, given in ways.items():
        reasoning, rest, code, reason = parsed(*given)
        found[f"{name}, {way}"] = [digest(reasoning), digest(rest), digest(code), reason]
    return found
