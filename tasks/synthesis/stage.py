"""The synthesis stage: tasks in, candidates out; every response is parsed, counted and stored as it
arrives.

Guarantees: no request is repeated that any snapshot answers; a killed run loses only what is in
flight. A later turn's snapshot includes the turns before. Derived columns come from today's parser,
also for reused rows; a candidate's id depends on the raw answer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kernels_eval.errors import UsageError
from kernels_eval.records import Candidate, Json, Language, candidate_id
from tasks.keys import keyed
from tasks.progress import report
from tasks.sources.stage import read_tasks
from tasks.store import Snapshot, SnapshotRef, known_rows
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.parsing import Parsed, parse_response
from tasks.synthesis.prompts import prompt_hash
from tasks.synthesis.refine import FOLLOW_UP_VERSION
from tasks.synthesis.requests import (
    Questions,
    RequestSet,
    first_requests,
    follow_up_requests,
)
from tasks.synthesis.sampler import Request, Response, Sampler, adapter_of, model_name
from tasks.synthesis.samplers import make_sampler, sampler_class
from tasks.tables import CANDIDATES
from tasks.versions import PARSER_VERSION, SYNTHESIS_VERSION

STAGE = "synthesis"
OF_LATER_TURNS = ("refine_below_speedup", "profiles")
"""Settings unused by the first turn."""


class Synthesis:
    """One turn of one generator over a snapshot of tasks; `run` fills `snapshot`.

    A later `turn` holds all rows of `candidates`, and one more answer where the last turn's verdict
    asks for it. `adapter`: a snapshot's, known by its fingerprint; any other goes into
    `config.adapter`, known by its content. Raises UsageError for a later turn of recorded
    responses.
    """

    def __init__(
        self,
        tasks: SnapshotRef,
        config: SynthesisConfig,
        language: Language,
        adapter: Path | None = None,
        candidates: SnapshotRef | None = None,
        verdicts: SnapshotRef | None = None,
        turn: int = 1,
        profiles: SnapshotRef | None = None,
    ) -> None:
        self._before = (candidates, verdicts) if candidates and verdicts else None
        if (turn > 1) != (self._before is not None):
            raise ValueError(f"turn {turn} has no candidates to follow up")
        if turn > 1 and not sampler_class(config.sampler).answers_follow_ups:
            raise UsageError(
                f"{config.sampler} responses hold no answer to a follow-up",
                "set synthesis.sampler to a model, or synthesis.turns to 1",
            )
        self.config, self.language, self.adapter = config, language, adapter
        self._tasks, self._turn = tasks, turn
        shown = config.profiles == "shown" and self._before is not None
        self._profiles = profiles.open() if shown and profiles else None
        above = (tasks, *(self._before or ()), profiles if shown else None)
        identity = [
            keyed(config, without=() if turn > 1 else OF_LATER_TURNS),
            language.value,
            model_name(config.model, adapter_of(config, adapter)),
            sampler_class(config.sampler).data_version(config),
            *([turn] if turn > 1 else []),
        ]
        versions = (SYNTHESIS_VERSION, PARSER_VERSION)
        self.snapshot = Snapshot.planned(STAGE, identity, above, versions)

    def run(self) -> SnapshotRef:
        """Ask for what is missing and publish. Returns a finished snapshot of
        tasks.tables.CANDIDATES."""
        snapshot = self.snapshot
        if snapshot.finished:
            return snapshot.ref
        snapshot.recover(CANDIDATES)
        sampler = make_sampler(self.config, snapshot.root, self.adapter)
        try:
            self._bring_along()
            counts = self._ask(self._requests(sampler), sampler)
        finally:
            sampler.close()
        if not snapshot.parts():
            raise UsageError(
                f"synthesis.sampler {sampler.generator!r} has no response to any of"
                f" {counts['requests']} requests for {self.language.value} kernels",
                "set language to one that it answers in, or synthesis.sampler to a model",
            )
        turns = snapshot.read(columns=["candidate_id", "turn"], unique="candidate_id")["turn"]
        extra: Json = {"generator": sampler.generator, **counts}
        if served := getattr(sampler, "served", None):
            extra["served"] = served
        if self._before:  # counted over all turns, as the rows are
            earlier = self._before[0].open().manifest
            rows = sorted(turns.value_counts().iter_rows())
            extra |= {name: earlier.get(name, 0) + count for name, count in counts.items()}
            extra |= {"turn": self._turn, "followed_up": counts["requests"]}
            extra["turn_counts"] = {f"turn {turn}": count for turn, count in rows}
        return snapshot.publish(config=self.config, rows=len(turns), extra=extra).ref

    def _bring_along(self) -> None:
        if self._before:
            before, snapshot = self._before[0].open(), self.snapshot
            every = before.index(["candidate_id"], unique=True)
            there = snapshot.index(["candidate_id"])
            left = every.join(there, on="candidate_id", how="anti", maintain_order="left")
            snapshot.append(before.rows_of(left), CANDIDATES)

    def _requests(self, sampler: Sampler) -> RequestSet:
        asked = Questions(read_tasks(self._tasks), self.config, self.language, sampler)
        if self._before is None:
            return first_requests(asked)
        candidates, verdicts = (ref.open() for ref in self._before)
        return follow_up_requests(asked, candidates, verdicts, self._turn, self._profiles)

    def _ask(self, requests: RequestSet, sampler: Sampler) -> dict[str, int]:
        snapshot, there = self.snapshot, self.snapshot.keys("request_key")
        numbers = range(sampler.most_attempts + 1)
        wanted = (attempt_key(key, number) for key in requests.keys for number in numbers)
        missing = [key for key in wanted if key not in there]
        kept = known_rows(snapshot, "request_key", missing, CANDIDATES)
        snapshot.append((parsed_again(row, sampler.count_tokens) for row in kept), CANDIDATES)
        total, left = len(requests), requests.without(snapshot.keys("request_key"))
        asked = sampler.generator if self._turn == 1 else f"{sampler.generator}, turn {self._turn}"
        asked += ", the tuned model" if self.adapter else ""
        asked += "; usage counts the reasoning" if self.config.counts_by_usage else ""
        answered = total - len(left)
        if len(left):
            report(STAGE, answered, total, f"{asked}: waiting for the first answer")
            # Loading a tokenizer takes seconds, in which answers that have arrived would not be
            # on the disk.
            sampler.count_tokens([""])
        with snapshot.journal(CANDIDATES) as add:
            for number, response in enumerate(sampler.sample(left), start=1):
                add(*transcript(requests[response.request_key], response, sampler))
                report(STAGE, answered + number, total, asked)
        unanswered = len(requests.without(snapshot.keys("request_key")))
        return {"requests": total, "unanswered": unanswered}


def planned(**arguments: Any) -> Snapshot:
    return Synthesis(**arguments).snapshot


def run(
    tasks: SnapshotRef,
    config: SynthesisConfig,
    language: Language,
    adapter: Path | None = None,
    candidates: SnapshotRef | None = None,
    verdicts: SnapshotRef | None = None,
    turn: int = 1,
    profiles: SnapshotRef | None = None,
) -> SnapshotRef:
    return Synthesis(tasks, config, language, adapter, candidates, verdicts, turn, profiles).run()


CountTokens = Callable[[Sequence[str]], Sequence[int] | None]


def attempt_key(request_key: str, number: int) -> str:
    """The request key of a response's attempt; of the response itself where `number` is 0."""
    return f"{request_key}/{number}" if number else request_key


def transcript(request: Request, response: Response, sampler: Sampler) -> list[Json]:
    """A response's rows: an agent's attempts are earlier turns, each the parent of the next."""
    rows: list[Json] = []
    for number, attempt in enumerate(response.attempts, start=1):
        key = attempt_key(request.request_key, number)
        rows.append(candidate_row(_after(rows, request, key), attempt, sampler))
    rows.append(candidate_row(_after(rows, request, request.request_key), response, sampler))
    return rows


def _after(rows: Sequence[Json], request: Request, key: str) -> Request:
    later = {"turn": len(rows) + 1, "parent": rows[-1]["candidate_id"]} if rows else {}
    return request.model_copy(update={"request_key": key, **later})


def candidate_row(request: Request, response: Response, sampler: Sampler) -> Json:
    text = sampler.whole_text(response)
    parsed = parse_response(
        text, reasoning=response.reasoning, finish_reason=response.finish_reason
    )
    counted = _count(sampler.count_tokens, parsed.reasoning)
    if counted is None:
        counted = response.reasoning_tokens
    if counted is None:
        counted = usage_share(response.completion_tokens, parsed)
    asked = (request.task, sampler.generator, request.sampling, request.sample_index)
    candidate = Candidate(
        candidate_id=candidate_id(*asked, text, request.turn, request.parent),
        task_id=request.task.task_id,
        language=request.language,
        generator=sampler.generator,
        sampling=request.sampling,
        sample_index=request.sample_index,
        prompt_hash=prompt_hash(
            request.prompt, *([] if request.turn == 1 else [FOLLOW_UP_VERSION])
        ),
        response=text,
        **parsed.model_dump(),
        reasoning_tokens=counted,
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


def parsed_again(row: Json, count_tokens: CountTokens) -> Json:
    """A kept row with its derived columns as today's parser has them.

    Tokens are counted again only where the reasoning has changed, or they were not counted by a
    tokenizer.
    """
    parsed = parse_response(
        row["response"],
        reasoning=row["separated_reasoning"],
        finish_reason=row["finish_reason"],
    )
    tokens, by_usage = row["reasoning_tokens"], usage_share(row["completion_tokens"], parsed)
    if parsed.reasoning != row["reasoning"] or tokens in (None, by_usage):
        tokens = _count(count_tokens, parsed.reasoning)
        tokens = by_usage if tokens is None else tokens
    return row | parsed.model_dump() | {"reasoning_tokens": tokens}


def usage_share(completion_tokens: int | None, parsed: Parsed) -> int | None:
    """The reasoning's share, by characters, of the tokens that an endpoint counted; None without
    its count."""
    if completion_tokens is None:
        return None
    written = len(parsed.reasoning) + len(parsed.answer)
    return round(completion_tokens * len(parsed.reasoning) / written) if written else 0


def _count(count_tokens: CountTokens, text: str) -> int | None:
    counts = count_tokens([text])
    return counts[0] if counts else None
