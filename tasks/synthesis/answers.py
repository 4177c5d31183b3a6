"""Raw answers and the rows of candidates derived from them.

A row keeps what a generator sent: `response`, `separated_reasoning` where its server divided the
two, `finish_reason` and the token count. `reasoning`, `answer`, `code` and `parse_reason` are
derived from those by today's parser, also when an earlier snapshot's row is reused: a better parser
reaches answers that were paid for long ago. A candidate's id depends on the raw answer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kernels_eval.records import Candidate, candidate_id
from tasks.synthesis.parsing import THINK_CLOSE, clean_text, parse_response
from tasks.synthesis.prompts import prompt_hash
from tasks.synthesis.refine import FOLLOW_UP_VERSION
from tasks.synthesis.sampler import Request, Response, Sampler

CountTokens = Callable[[Sequence[str]], Sequence[int] | None]


def candidate_row(request: Request, response: Response, sampler: Sampler) -> dict[str, Any]:
    """A row of tasks.tables.CANDIDATES for a new answer."""
    parsed = parse_response(
        response.text, reasoning=response.reasoning, finish_reason=response.finish_reason
    )
    asked = (request.task, sampler.generator, request.sampling, request.sample_index)
    candidate = Candidate(
        candidate_id=candidate_id(*asked, response.text, request.turn, request.parent),
        task_id=request.task.task_id,
        language=request.language,
        generator=sampler.generator,
        sampling=request.sampling,
        sample_index=request.sample_index,
        prompt_hash=prompt_hash(
            request.prompt, *([] if request.turn == 1 else [FOLLOW_UP_VERSION])
        ),
        response=response.text,
        **parsed.model_dump(),
        reasoning_tokens=_count(sampler.count_tokens, parsed.reasoning),
        completion_tokens=response.completion_tokens,
        finish_reason=response.finish_reason,
        turn=request.turn,
        parent=request.parent,
    )
    raw = {
        "separated_reasoning": response.reasoning,
        "request_key": request.request_key,
        "finish_guessed": response.finish_guessed,
    }
    return candidate.model_dump(mode="json") | raw


def parsed_again(row: dict[str, Any], count_tokens: CountTokens) -> dict[str, Any]:
    """A kept row of any version with its derived columns as today's parser has them.

    Tokens are counted again only where the reasoning has changed.
    """
    separated = row.get("separated_reasoning") or _separated_before(row)
    parsed = parse_response(
        row["response"], reasoning=separated, finish_reason=row.get("finish_reason")
    )
    tokens = row.get("reasoning_tokens")
    if parsed.reasoning != row.get("reasoning"):
        tokens = _count(count_tokens, parsed.reasoning)
    derived = parsed.model_dump() | {"separated_reasoning": separated, "reasoning_tokens": tokens}
    return in_turn(row) | derived


def in_turn(row: dict[str, Any]) -> dict[str, Any]:
    """A kept row with its turn: rows from before there were turns are all of the first."""
    return row | {"turn": row.get("turn") or 1, "parent": row.get("parent")}


def _count(count_tokens: CountTokens, text: str) -> int | None:
    counts = count_tokens([text])
    return counts[0] if counts else None


def _separated_before(row: dict[str, Any]) -> str | None:
    """What the server had separated, for rows from before that was kept: the reasoning is in the
    response unless the server took it out. A module that the parser moved from the end of the
    reasoning to the head of the answer goes back."""
    text = clean_text(row["response"])
    reasoning, answer = row.get("reasoning") or "", row.get("answer") or ""
    moved = answer.removesuffix(text.strip()).strip()
    if reasoning in text and (reasoning or not moved or THINK_CLOSE in text):
        return None
    return "\n\n".join(part for part in (reasoning, moved) if part)
