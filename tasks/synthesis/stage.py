"""Tasks in, candidates out: every response is parsed, counted and kept as it arrives. A later turn
takes candidates and verdicts too.

Guarantees: n candidates per task in the finished snapshot unless the generator has fewer; a
response to the same request (task, prompt, generator, sampling, sample index, in later turns the
turn and the parent) in this or an earlier snapshot is never asked for again; a killed run loses at
most what is in flight. A later turn's snapshot holds the rows of the turns before it: who reads
candidates reads one snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels_eval.errors import UsageError
from kernels_eval.records import Language
from tasks.policy import secret
from tasks.progress import report
from tasks.sources.small_model import resolve_model
from tasks.sources.stage import read_tasks
from tasks.store import Snapshot, SnapshotRef, fingerprint, known_rows
from tasks.synthesis.answers import candidate_row, in_turn, parsed_again
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.requests import (
    Questions,
    RequestSet,
    Speed,
    data_version,
    first_requests,
    follow_up_requests,
)
from tasks.synthesis.sampler import Sampler
from tasks.tables import CANDIDATES
from tasks.versions import PARSER_VERSION, SYNTHESIS_VERSION

if TYPE_CHECKING:
    from tasks.synthesis.client import OpenAISampler

STAGE = "synthesis"
UNDECISIVE = frozenset({"concurrency", "api_key_env", "api_key_block", "server", "turns"})
"""Settings that decide nothing of a turn's answers. `turns` says only how often there is one
more."""
OF_LATER_TURNS = frozenset({"refine_below_speedup", "profiles"})


def make_sampler(config: SynthesisConfig, root: str, adapter: Path | None = None) -> Sampler:
    """The configured sampler. Raises UsageError naming the setting that is missing."""
    tokenizer = resolve_model(config.tokenizer, root) if config.tokenizer else None
    if config.sampler == "recorded":
        from tasks.synthesis.recorded import RecordedSampler, ResponsesFile

        if config.responses:
            return ResponsesFile(config.responses, tokenizer)
        return RecordedSampler(tokenizer)
    if config.sampler == "scripted":
        from tasks.synthesis.scripted.teacher import ScriptedSampler

        return ScriptedSampler(config.teacher, tokenizer)
    if config.model is None:
        raise _missing(config, "model=NAME")
    if config.sampler == "openai":
        return _client(config, config.model, tokenizer)
    model = resolve_model(config.model, root)
    if config.sampler == "transformers":
        from tasks.synthesis.local import TransformersSampler

        return TransformersSampler(model, adapter, name=model_name(config, adapter))
    from tasks.synthesis.server import VllmSampler

    adapters, asked = config.server.adapters, config.adapter
    if adapter is not None:
        asked = adapter.parent.name[:12]
        adapters = adapters | {asked: str(adapter)}
    logs = None if "://" in root else Path(root) / "logs" / "vllm"
    return VllmSampler(model, config.model, config.server, adapters, asked, logs, tokenizer)


def require_endpoint(config: SynthesisConfig) -> str:
    """Ask the endpoint of `sampler: openai` for its models, in words. Raises UsageError or
    EvalError where it does not answer, refuses the key or lacks the model."""
    if config.model is None:
        raise _missing(config, "model=NAME")
    return _client(config, config.model, None).require_model()


def _client(config: SynthesisConfig, model: str, tokenizer: str | None) -> OpenAISampler:
    from tasks.synthesis.client import OpenAISampler

    if config.base_url is None:
        raise _missing(config, "base_url=http://HOST:PORT/v1")
    block = config.api_key_block
    return OpenAISampler(
        config.base_url,
        model,
        api_key_env=config.api_key_env,
        api_key=secret(block) if block else None,
        key_place=f"the Prefect secret block {block}" if block else None,
        concurrency=config.concurrency,
        tokenizer=tokenizer,
    )


def _missing(config: SynthesisConfig, setting: str) -> UsageError:
    name = setting.partition("=")[0]
    return UsageError(
        f"synthesis.sampler is {config.sampler!r} but synthesis.{name} is not set",
        f"--set synthesis.{setting}",
    )


def model_name(config: SynthesisConfig, adapter: Path | None) -> str:
    """The generator's identity: the model, and the adapter by the fingerprint of the snapshot it
    lies in, or by its name."""
    named = config.adapter if config.sampler == "vllm" else None
    added = adapter.parent.name[:12] if adapter is not None else named
    return f"{config.model}+{added}" if added else str(config.model)


class Synthesis:
    """One turn of one generator over a snapshot of tasks; `snapshot` is what `run` fills.

    The first turn asks for every task. A later `turn` holds all rows of `candidates`, and one
    answer more for those of them, of the turn before, whose verdict asks for it. Raises UsageError
    for a later turn of recorded responses, which cannot answer.
    """

    def __init__(
        self,
        tasks: SnapshotRef,
        config: SynthesisConfig,
        language: Language,
        adapter: Path | None = None,
        *,
        candidates: SnapshotRef | None = None,
        verdicts: SnapshotRef | None = None,
        profiles: SnapshotRef | None = None,
        turn: int = 1,
    ) -> None:
        self._before = (candidates, verdicts) if candidates and verdicts else None
        if (turn > 1) != (self._before is not None):
            raise ValueError(f"turn {turn} has no candidates to follow up")
        if turn > 1 and config.sampler in ("recorded", "scripted"):
            raise UsageError(
                f"{config.sampler} responses hold no answer to a follow-up",
                "set synthesis.sampler to a model, or synthesis.turns to 1",
            )
        self.config, self.language, self.adapter = config, language, adapter
        self._tasks, self._turn = tasks, turn
        shown = config.profiles == "shown" and self._before is not None
        self._profiles = profiles.open() if shown and profiles else None
        seen = (profiles,) if shown and profiles else ()
        self._upstream = [ref.fingerprint for ref in (tasks, *(self._before or ()), *seen)]
        unused = UNDECISIVE if turn > 1 else UNDECISIVE | OF_LATER_TURNS
        identity = [
            config.model_dump(mode="json", exclude=set(unused)),
            language.value,
            model_name(config, adapter),
            data_version(config),
            *([turn] if turn > 1 else []),
        ]
        versions = (SYNTHESIS_VERSION, PARSER_VERSION)
        self.snapshot = Snapshot(
            tasks.root, STAGE, fingerprint(STAGE, identity, self._upstream, versions)
        )

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
            with self._requests(sampler.generator) as requests:
                counts = self._ask(requests, sampler)
        finally:
            sampler.close()
        turns = snapshot.read(columns=["candidate_id", "turn"], unique="candidate_id")["turn"]
        if turns.is_empty():
            raise UsageError(
                f"{sampler.generator} gave no response to any of {counts['requests']} requests",
                "check synthesis.sampler and the language",
            )
        extra: dict[str, Any] = {"generator": sampler.generator, **counts}
        if self._before:  # counted over all turns, as the rows are
            earlier = self._before[0].open().manifest
            rows = sorted(turns.value_counts().iter_rows())
            extra |= {name: earlier.get(name, 0) + count for name, count in counts.items()}
            extra |= {"turn": self._turn, "followed_up": counts["requests"]}
            extra["turn_counts"] = {f"turn {turn}": count for turn, count in rows}
        return snapshot.publish(
            config=self.config, upstream=self._upstream, rows=len(turns), extra=extra
        ).ref

    def _bring_along(self) -> None:
        """Take the rows of the turns before into the snapshot."""
        if self._before:
            before, snapshot = self._before[0].open(), self.snapshot
            every = before.index(["candidate_id"]).unique(
                "candidate_id", keep="first", maintain_order=True
            )
            there = snapshot.index(["candidate_id"])
            left = every.join(there, on="candidate_id", how="anti", maintain_order="left")
            snapshot.append(map(in_turn, before.rows_of(left)), CANDIDATES)

    @contextmanager
    def _requests(self, generator: str) -> Iterator[RequestSet]:
        asked = Questions(read_tasks(self._tasks), self.config, self.language, generator)
        if self._before is None:
            yield first_requests(asked)
            return
        candidates, verdicts = (ref.open() for ref in self._before)
        with (
            self.snapshot.scratch() as folder,
            follow_up_requests(
                asked, candidates, verdicts, self._turn, folder, self._profiles
            ) as requests,
        ):
            yield requests

    def _ask(self, requests: RequestSet, sampler: Sampler) -> dict[str, int]:
        """Take what earlier snapshots know, ask for the rest. Returns how many `requests` there
        are, and how many stay `unanswered`."""
        snapshot, missing = self.snapshot, requests.without(self.snapshot.keys("request_key"))
        kept = known_rows(
            snapshot.root,
            STAGE,
            "request_key",
            missing.keys,
            CANDIDATES,
            exclude=snapshot.fingerprint,
        )
        snapshot.append((parsed_again(row, sampler.count_tokens) for row in kept), CANDIDATES)
        total, left = len(requests), requests.without(snapshot.keys("request_key"))
        asked = sampler.generator if self._turn == 1 else f"{sampler.generator}, turn {self._turn}"
        answered = total - len(left)
        if len(left) and self.config.sampler == "vllm":  # for minutes, where the model is large
            report(STAGE, answered, total, f"{asked}: starting servers")
        elif len(left):
            # Loading a tokenizer takes seconds, in which answers that have arrived would not be
            # on the disk.
            sampler.count_tokens([""])
        speed = Speed()
        with snapshot.journal(CANDIDATES) as add:
            for number, response in enumerate(sampler.sample(left), start=1):
                add(candidate_row(requests[response.request_key], response, sampler))
                speed.count(response)
                report(STAGE, answered + number, total, f"{asked}{speed.line(len(left) - number)}")
        unanswered = len(requests.without(snapshot.keys("request_key")))
        return {"requests": total, "unanswered": unanswered}


def planned(**arguments: Any) -> Snapshot:
    """The snapshot of a synthesis with these arguments."""
    return Synthesis(**arguments).snapshot
