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
from typing import Any

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

STAGE = "synthesis"
OF_NO_TURN = frozenset({"concurrency", "api_key_env", "api_key_block", "server", "turns"})
"""Settings that decide nothing of a turn's answers. `turns` says only how often there is one
more."""
OF_LATER_TURNS = frozenset({"refine_below_speedup"})


def make_sampler(config: SynthesisConfig, root: str, adapter: Path | None = None) -> Sampler:
    """The configured sampler. Raises UsageError naming the setting that is missing."""
    tokenizer = resolve_model(config.tokenizer, root) if config.tokenizer else None
    if config.sampler == "recorded":
        from tasks.synthesis.recorded import RecordedSampler, ResponsesFile

        if config.responses:
            return ResponsesFile(config.responses, tokenizer)
        return RecordedSampler(tokenizer)
    if config.model is None:
        raise UsageError(
            f"synthesis.sampler is {config.sampler!r} but synthesis.model is not set",
            "--set synthesis.model=NAME",
        )
    if config.sampler == "transformers":
        from tasks.synthesis.local import TransformersSampler

        name = model_name(config, adapter)
        return TransformersSampler(resolve_model(config.model, root), adapter, name=name)
    if config.sampler == "vllm":
        return _vllm_sampler(config, config.model, root, adapter, tokenizer)
    from tasks.synthesis.client import OpenAISampler

    if config.base_url is None:
        raise UsageError(
            "synthesis.sampler is 'openai' but synthesis.base_url is not set",
            "--set synthesis.base_url=http://HOST:PORT/v1",
        )
    block = config.api_key_block
    return OpenAISampler(
        base_url=config.base_url,
        model=config.model,
        api_key_env=config.api_key_env,
        api_key=secret(block) if block else None,
        key_place=f"the Prefect secret block {block}" if block else None,
        concurrency=config.concurrency,
        tokenizer=tokenizer,
    )


def _vllm_sampler(
    config: SynthesisConfig, model: str, root: str, adapter: Path | None, tokenizer: str | None
) -> Sampler:
    from tasks.synthesis.server import VllmSampler

    adapters, asked = dict(config.server.adapters), config.adapter
    if adapter is not None:
        asked = adapter.parent.name[:12]
        adapters[asked] = str(adapter)
    return VllmSampler(
        resolve_model(model, root),
        model,
        config.server,
        generator=model_name(config, adapter),
        adapters=adapters,
        asked=asked,
        logs=None if "://" in root else Path(root) / "logs" / "vllm",
        tokenizer=tokenizer,
    )


def model_name(config: SynthesisConfig, adapter: Path | None) -> str:
    """The generator's identity: the model, and the adapter by the fingerprint of the snapshot it
    lies in, or by its name."""
    named = config.adapter if config.sampler == "vllm" else None
    added = adapter.parent.name[:12] if adapter is not None else named
    return f"{config.model}+{added}" if added else str(config.model)


class Synthesis:
    """The synthesis of one tasks snapshot by one generator: the first turn."""

    _title = ""

    def __init__(
        self,
        tasks: SnapshotRef,
        config: SynthesisConfig,
        language: Language,
        adapter: Path | None = None,
    ) -> None:
        self.config, self.language, self.adapter = config, language, adapter
        self._tasks = tasks
        self.snapshot = self._planned(OF_NO_TURN | OF_LATER_TURNS, [tasks])

    def _planned(
        self, without: frozenset[str], upstream: list[SnapshotRef], *more: Any
    ) -> Snapshot:
        """The snapshot to fill: identified by the configuration (`without` what decides nothing
        here), and by what is read."""
        self._upstream = [ref.fingerprint for ref in upstream]
        identity = [
            self.config.model_dump(mode="json", exclude=set(without)),
            self.language.value,
            model_name(self.config, self.adapter),
            data_version(self.config),
            *more,
        ]
        return Snapshot(
            self._tasks.root,
            STAGE,
            fingerprint(STAGE, identity, self._upstream, (SYNTHESIS_VERSION, PARSER_VERSION)),
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
            rows = len(snapshot.read(columns=["candidate_id"], unique="candidate_id"))
        finally:
            sampler.close()
        if not rows:
            raise UsageError(
                f"{sampler.generator} gave no response to any of {counts['requests']} requests",
                "check synthesis.sampler and the language",
            )
        extra = {"generator": sampler.generator, **self._facts(counts)}
        return snapshot.publish(
            config=self.config, upstream=self._upstream, rows=rows, extra=extra
        ).ref

    def _ask(self, requests: RequestSet[Any], sampler: Sampler) -> dict[str, int]:
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
        asked = f"{sampler.generator}{self._title}"
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

    def _bring_along(self) -> None:
        """Rows that the snapshot holds before anything is asked: none in a first turn."""

    def _questions(self, generator: str) -> Questions:
        return Questions(read_tasks(self._tasks), self.config, self.language, generator)

    @contextmanager
    def _requests(self, generator: str) -> Iterator[RequestSet[Any]]:
        yield first_requests(self._questions(generator))

    def _facts(self, counts: dict[str, int]) -> dict[str, Any]:
        """What the manifest says of the requests."""
        return counts


class Refinement(Synthesis):
    """A later turn: the candidates of the turns before and, for those of the last one whose verdict
    asks for it, one answer more."""

    def __init__(
        self,
        tasks: SnapshotRef,
        candidates: SnapshotRef,
        verdicts: SnapshotRef,
        config: SynthesisConfig,
        language: Language,
        turn: int,
        adapter: Path | None = None,
    ) -> None:
        if turn < 2:
            raise ValueError(f"turn {turn} follows nothing up")
        if config.sampler == "recorded":
            raise UsageError(
                "recorded responses hold no answer to a follow-up",
                "set synthesis.sampler to a model, or synthesis.turns to 1",
            )
        self.config, self.language, self.adapter = config, language, adapter
        self._tasks, self._candidates, self._verdicts = tasks, candidates, verdicts
        self._turn, self._title = turn, f", turn {turn}"
        self.snapshot = self._planned(OF_NO_TURN, [tasks, candidates, verdicts], turn)

    def _bring_along(self) -> None:
        before, snapshot = self._candidates.open(), self.snapshot
        every = before.index(["candidate_id"]).unique(
            "candidate_id", keep="first", maintain_order=True
        )
        left = every.join(
            snapshot.index(["candidate_id"]), on="candidate_id", how="anti", maintain_order="left"
        )
        snapshot.append(map(in_turn, before.rows_of(left)), CANDIDATES)

    @contextmanager
    def _requests(self, generator: str) -> Iterator[RequestSet[Any]]:
        asked, turn = self._questions(generator), self._turn
        candidates, verdicts = self._candidates.open(), self._verdicts.open()
        with (
            self.snapshot.scratch() as directory,
            follow_up_requests(asked, candidates, verdicts, turn, directory) as requests,
        ):
            yield requests

    def _facts(self, counts: dict[str, int]) -> dict[str, Any]:
        """Requests and those without an answer are counted over all turns, as the rows are."""
        before = self._candidates.open().manifest
        over_all = {name: before.get(name, 0) + count for name, count in counts.items()}
        found = self.snapshot.read(columns=["candidate_id", "turn"], unique="candidate_id")
        turns = sorted(found["turn"].value_counts().iter_rows())
        rows = {f"turn {turn}": count for turn, count in turns}
        return {
            **over_all,
            "turn": self._turn,
            "followed_up": counts["requests"],
            "turn_counts": rows,
        }


def planned(
    tasks: SnapshotRef, config: SynthesisConfig, language: Language, adapter: Path | None = None
) -> Snapshot:
    """The snapshot that `run` with the same arguments fills."""
    return Synthesis(tasks, config, language, adapter).snapshot


def run(
    tasks: SnapshotRef, config: SynthesisConfig, language: Language, adapter: Path | None = None
) -> SnapshotRef:
    """The whole stage as a plain call: the first turn."""
    return Synthesis(tasks, config, language, adapter).run()


def planned_turn(
    tasks: SnapshotRef,
    candidates: SnapshotRef,
    verdicts: SnapshotRef,
    config: SynthesisConfig,
    language: Language,
    turn: int,
    adapter: Path | None = None,
) -> Snapshot:
    """The snapshot that `refine` with the same arguments fills."""
    return Refinement(tasks, candidates, verdicts, config, language, turn, adapter).snapshot


def refine(
    tasks: SnapshotRef,
    candidates: SnapshotRef,
    verdicts: SnapshotRef,
    config: SynthesisConfig,
    language: Language,
    turn: int,
    adapter: Path | None = None,
) -> SnapshotRef:
    """Turn `turn` (2 or later) as a plain call: a finished snapshot of all rows of `candidates` and
    of the answers to this turn's follow-ups. Verifying it reuses every verdict of `verdicts`.
    Raises UsageError for recorded responses, which cannot answer.
    """
    return Refinement(tasks, candidates, verdicts, config, language, turn, adapter).run()
