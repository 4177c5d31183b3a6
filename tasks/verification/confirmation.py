"""Screened verdicts in, the same with those of what is kept confirmed out.

In rounds: a rule proposes candidates by the verdicts so far; those only screened get the whole
protocol, and their new verdicts replace the screened ones, until nothing proposed is unconfirmed.
No choice among noisy times survives as a speedup (the winner's curse).

Guarantees: a rule is asked only with the verdicts of whole earlier rounds, so that a killed run
repeats its rounds and ends in the same set; a kill loses only candidates in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.pool.pool import Pool
from kernels_eval.pool.worker import InstrumentingBuildWorker
from kernels_eval.records import Json, Language
from kernels_eval.settings import validated
from kernels_eval.versions import PROTOCOL_VERSION
from tasks.progress import Ahead, expect
from tasks.store import Snapshot, SnapshotRef
from tasks.tables import VERDICTS, right, unconfirmed
from tasks.verification.config import VerificationConfig
from tasks.verification.stage import CONFIRMING_TIMES, STAGE, Verification

READ = ("candidate_id", "status", "level", "reason", "outputs_match")
ALONE_TIMES = 2.0
"""How many times as long as in the first round one takes in later ones, which have one or two."""
RATIO_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Rule:
    """Which candidates are kept, by verdicts alone.

    `propose` gets one row per candidate with `columns` of tasks.tables.VERDICTS, those that exist,
    and returns ids; equal rows give equal ids. `identity` is part of the snapshot's key, `reads`
    are other snapshots.
    """

    identity: object
    propose: Callable[[pl.DataFrame], Iterable[str]]
    columns: Sequence[str] = READ
    reads: Sequence[SnapshotRef | None] = ()


EVERYTHING_RIGHT = Rule("right", lambda verdicts: verdicts.filter(right(verdicts))["candidate_id"])


def all_of(candidate_ids: Iterable[str]) -> Rule:
    """A rule that keeps these candidates, whatever their verdicts."""
    chosen = sorted(candidate_ids)
    return Rule(chosen, lambda _: chosen)


class Confirmation(Verification):
    """The confirmation of what a rule keeps of a finished verdicts snapshot, by its protocol;
    `config` says on which machines.

    Its own snapshot has every row, the confirmed verdicts in place of theirs. The manifest's
    `confirmation` counts `rounds` and candidates `proposed`, `confirmed` and `failed` by reason;
    `speedup_ratio` has quantiles of confirmed / screened speedup.
    """

    activity, verb = "confirmation", "confirm"
    repeats_nothing = False

    def __init__(
        self,
        verdicts: SnapshotRef,
        candidates: SnapshotRef,
        tasks: SnapshotRef,
        config: VerificationConfig,
        language: Language,
        rule: Rule,
    ) -> None:
        self._screened, self._rule = verdicts.open(), rule
        told, where = self._screened.manifest["config"], str(self._screened.path)
        protocol = validated(VerificationConfig, told, where).eval
        config = config.model_copy(update={"eval": protocol}).confirming()
        super().__init__(candidates, tasks, config, language)
        above = (candidates, tasks, verdicts, *rule.reads)
        identity = [self._identity, rule.identity]
        self.snapshot = Snapshot.planned(STAGE, identity, above, PROTOCOL_VERSION)
        self._asked: set[str] = set()
        self._rounds = 0
        self._others = 0
        """Right ones that nothing proposed: some may take the place of one that fails."""

    def pool(self) -> Pool:
        pool = super().pool()
        pool.builder = InstrumentingBuildWorker
        return pool

    def _wanted(self) -> pl.DataFrame:
        return super()._wanted().filter(pl.col("candidate_id").is_in(sorted(self._asked)))

    def _plans(self) -> Iterator[int]:
        while self._ask():
            chunks = self.plan()
            self._report()
            yield chunks

    def _ask(self) -> bool:
        verdicts = self._overlaid(self._rule.columns)
        open_ones = set(verdicts.filter(unconfirmed(verdicts))["candidate_id"])
        new = open_ones.intersection(self._rule.propose(verdicts)) - self._asked
        if new:
            self._require_same_device()
            self._settled = len(self._asked)
            self._asked |= new
            self._rounds += 1
            if self._rounds > 1:
                self.activity = f"{Confirmation.activity}, round {self._rounds}"
        self._others = len(open_ones - new)
        return bool(new)

    def _expect(self) -> None:
        """Another of its task takes the place of one that does worse, in the next round: in the
        first one, a screened time that was luck is likely, also where none fails."""
        first = self._rounds == 1
        others = min(self._others, max(self._failed, int(first)))
        words = f"then about {others} in place of worse ones" if others else ""
        like = (STAGE, CONFIRMING_TIMES) if first else (Confirmation.activity, ALONE_TIMES)
        expect(self.activity, Ahead(words, others, *like))

    def _overlaid(self, columns: Sequence[str]) -> pl.DataFrame:
        names = list(dict.fromkeys((*READ, *columns)))
        screened = self._screened.read(columns=names, unique="candidate_id")
        confirmed = self._confirmed(names)
        if confirmed.is_empty():
            return screened
        rest = screened.join(confirmed, on="candidate_id", how="anti", maintain_order="left")
        return pl.concat([confirmed, rest], how="diagonal_relaxed")

    def _confirmed(self, columns: Sequence[str]) -> pl.DataFrame:
        """Of the rounds so far: a killed run may have left more."""
        asked = pl.DataFrame({"candidate_id": pl.Series(sorted(self._asked), dtype=pl.String)})
        return self.snapshot.read(columns=columns, unique="candidate_id", among=asked)

    def _require_same_device(self) -> None:
        there, here = self._screened.manifest.get("device"), self._measured.device
        if there not in (None, "", here):
            raise UsageError(
                f"the verdicts of {self._screened.path} were screened on {there}, and this is"
                f" {here}: times of two devices are not compared",
                "confirm where they were screened, or refresh the data set here",
            )

    # -- what came of it ---------------------------------------------------------------------------

    def publish(self) -> SnapshotRef:
        self._end_stream()
        there = self.snapshot.index(["candidate_id"])
        places = self._screened.index(["candidate_id"], unique=True)
        rest = places.join(there, on="candidate_id", how="anti", maintain_order="left")
        self.snapshot.append(self._screened.rows_of(rest, VERDICTS.names), VERDICTS)
        return super().publish()

    def _facts(self) -> Json:
        confirmed = self._confirmed([*READ, "timing.speedup"])
        facts: Json = {"rounds": self._rounds, "proposed": len(self._asked), "confirmed": 0}
        if confirmed.is_empty():
            return {"confirmation": facts | {"failed": {}, "speedup_ratio": {}}}
        held = right(confirmed)
        failed = confirmed.filter(~held)["reason"].value_counts().iter_rows()
        screened = self._screened.read(
            columns=["candidate_id", "timing.speedup"], unique="candidate_id", among=confirmed
        )
        paired = confirmed.filter(held).join(
            screened.select("candidate_id", screened="speedup"), on="candidate_id"
        )
        ratio = (paired["speedup"] / paired["screened"]).drop_nulls()
        facts["confirmed"] = paired.height
        facts["failed"] = dict(sorted(failed))
        facts["speedup_ratio"] = {
            f"{share:g}": round(ratio.quantile(share, "linear") or 0.0, 4)
            for share in (RATIO_QUANTILES if len(ratio) else ())
        }
        return {"confirmation": facts}


def run(
    verdicts: SnapshotRef,
    candidates: SnapshotRef,
    tasks: SnapshotRef,
    config: VerificationConfig,
    language: Language,
    rule: Rule,
    *,
    confirmation: type[Confirmation] = Confirmation,
    verify_chunk: Callable[[Any, int], Any] = Verification.verify_chunk,
) -> SnapshotRef:
    """A finished snapshot of tasks.tables.VERDICTS in which all that the rule keeps is confirmed;
    `verdicts` itself where nothing was only screened."""
    levels = verdicts.open().read(columns=READ)
    if levels.filter(unconfirmed(levels)).is_empty():
        return verdicts
    with confirmation(verdicts, candidates, tasks, config, language, rule) as work:
        return work.run(verify_chunk)
