"""Search: correct candidates in, faster ones out, confirmed by independent measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial

from prefect import flow

from flows.config import PipelineConfig
from flows.naming import run_name
from flows.runtime.guard import guarding
from flows.track import search_record, track
from kernels_eval.devices import conditions
from kernels_eval.errors import UsageError
from kernels_eval.records import Json, Language, Record, Row, Verdict, stable_hash
from kernels_eval.versions import PROTOCOL_VERSION
from tasks.keys import keyed
from tasks.profiling.stage import STAGE as PROFILES
from tasks.search import confirm
from tasks.search.config import OF_MODELS
from tasks.search.gain import again_id
from tasks.search.population import Plan
from tasks.search.stage import SETTLED, Search, Write, run
from tasks.search.step import run_generation
from tasks.store import Snapshot, SnapshotRef, known_rows
from tasks.store.lookup import find_snapshot, newest_first
from tasks.synthesis.earlier import Kernel, with_earlier_kernels
from tasks.synthesis.prompts import render
from tasks.synthesis.refine import LIMIT, follow_up_prompt, limit_words, said_of
from tasks.synthesis.requests import SEED_STEP
from tasks.synthesis.sampler import Request, Sampler
from tasks.synthesis.samplers import make_sampler
from tasks.synthesis.stage import candidate_row
from tasks.tables import CORRECT, KERNEL_PROFILES, VERDICTS, unconfirmed
from tasks.verification.config import VerificationConfig
from tasks.verification.confirmation import Rule, all_of
from tasks.verification.stage import STAGE as VERIFICATION
from tasks.verification.stage import Verification
from tasks.verification.step import confirm as confirm_kept
from tasks.verification.step import verify
from tasks.versions import SEARCH_VERSION

SOURCES = ("synthesis", "candidates")
"""Default stages of a search's first candidates."""


class Searched(Record):
    """The snapshots of a search: what was proposed, and the candidates with the confirmed winners
    and their verdicts."""

    proposals: SnapshotRef
    improved: SnapshotRef
    verdicts: SnapshotRef


def begun_with(
    config: PipelineConfig, name: str | None
) -> tuple[PipelineConfig, SnapshotRef, SnapshotRef, SnapshotRef]:
    """(configuration, verdicts, candidates, tasks) of a search: the named verdicts (a fingerprint
    under the root, or a directory), else the newest finished ones of sampled candidates, those of
    training tasks first. Raises UsageError where one is missing."""
    if name:
        found = [find_snapshot(config.root, name, VERIFICATION).open()]
    else:
        # the benchmark's answers are verified last, and their tasks are held out
        found = sorted(
            newest_first(config.root, VERIFICATION),
            key=lambda each: each.above("training-tasks") is None,
        )
    for snapshot in found:
        candidates = snapshot.above(*SOURCES, *([confirm.IMPROVED] if name else ()))
        tasks = snapshot.above("training-tasks", "tasks")
        if candidates and tasks:
            language = Language(snapshot.manifest["language"])
            changes = {"root": snapshot.root, "language": language}
            return config.model_copy(update=changes), snapshot.ref, candidates.ref, tasks.ref
    raise UsageError(
        f"{config.root} holds no finished verdicts with their candidates and tasks",
        "run `concur run --only refresh` first, or name verdicts with --verdicts",
    )


def search_kernels(
    config: PipelineConfig, verdicts: SnapshotRef, candidates: SnapshotRef, tasks: SnapshotRef
) -> Searched:
    """Search by screened verdicts, confirm winners, measure their gain anew, and add improved
    ones."""
    language = config.language
    protocol = config.verification.protocol.model_dump(mode="json")
    measured = conditions(language).model_dump(mode="json")
    search = Search(
        *(verdicts, candidates, tasks),
        config.search,
        language,
        conditions=[protocol, measured, PROTOCOL_VERSION],
        writer=keyed(config.synthesis),
    )
    once = config.verification.model_copy(update={"once_per_code": True})
    with Verification(search.snapshot.ref, tasks, once, language) as judge:
        proposals = run(search, judge, writer_of(config, judge), run_generation=run_generation)
    screened = verify(proposals, tasks, once, language)
    winners = winners_of(search)
    search.confirm(confirm_kept(screened, proposals, tasks, once, language, winners))
    fresh = measured_anew(search, tasks, once)
    summary = confirm.told_of(search, fresh.open())
    improved = confirm.improved(search, candidates, fresh, summary)
    with Verification(improved, tasks, config.verification, language) as work:
        keep_fresh(work, fresh.open(), summary["results"])
    of = (improved, tasks, config.verification, language)
    judged = confirm_kept(verify(*of), *of, all_of(confirmed_among(verdicts)))
    return Searched(proposals=proposals, improved=improved, verdicts=judged)


def winners_of(search: Search) -> Rule:
    identity = ["winners of a search", SEARCH_VERSION]
    return Rule(identity, partial(confirm.winners, search), SETTLED)


def confirmed_among(verdicts: SnapshotRef) -> list[str]:
    rows = verdicts.open().read(columns=["candidate_id", "status", "level"], unique="candidate_id")
    return rows.filter(CORRECT, ~unconfirmed(rows))["candidate_id"].to_list()


@flow(name="search and track", flow_run_name=run_name("search"))
def search_and_track(
    config: PipelineConfig, verdicts: SnapshotRef, candidates: SnapshotRef, tasks: SnapshotRef
) -> tuple[Searched, str | None]:
    with guarding(config.root):
        searched = search_kernels(config, verdicts, candidates, tasks)
        return searched, track(search_record, config, searched.proposals, searched.improved)


def measured_anew(search: Search, tasks: SnapshotRef, config: VerificationConfig) -> SnapshotRef:
    anew = config.confirming().model_copy(update={"once_per_code": False})
    return verify(confirm.confirmation(search), tasks, anew, search.language)


def keep_fresh(work: Verification, fresh: Snapshot, results: Sequence[Row]) -> None:
    """Give confirmed winners their first confirming verdict: the search's own is biased upwards."""
    if work.snapshot.finished:
        return
    work.snapshot.recover(VERDICTS)
    there = work.snapshot.keys("candidate_id")
    wanted = {
        again_id(result["winner"], 0): result["winner"]
        for result in results
        if result["improved"] and result["winner"] not in there
    }
    rows = (
        row | {"candidate_id": wanted[row["candidate_id"]]}
        for row in fresh.rows_by("candidate_id", wanted)
    )
    work.snapshot.append(rows, VERDICTS)


# -- what a model writes ---------------------------------------------------------------------------


def writer_of(config: PipelineConfig, judge: Verification) -> Write | None:
    """A model for rewriting and crossover; None where no operator needs one. Raises UsageError for
    recorded responses, which answer no new prompt."""
    if not OF_MODELS & set(config.search.operators):
        return None
    if config.synthesis.sampler == "recorded":
        raise UsageError(
            "search.operators names rewrite or cross, which recorded responses cannot answer",
            "set synthesis.sampler to a model, or search.operators to [parameters]",
        )

    def write(plans: Sequence[Plan]) -> Iterator[tuple[Plan, Row]]:
        # closed before kernels are timed: a model may hold the devices
        with closing(make_sampler(config.synthesis, config.root)) as sampler:
            requests = {
                (made := _request(each, config, sampler, judge)).request_key: (each, made)
                for each in plans
            }
            for response in sampler.sample([request for _, request in requests.values()]):
                each, request = requests[response.request_key]
                yield each, candidate_row(request, response, sampler)

    return write


def _request(plan: Plan, config: PipelineConfig, sampler: Sampler, judge: Verification) -> Request:
    prompt = prompt_of(plan, judge.language, config.synthesis.hardware, judge.snapshot)
    base = config.synthesis.sampling
    sampling = base.model_copy(update={"seed": base.seed + SEED_STEP + plan.step})
    key = [plan.task.code, prompt, sampler.generator, sampling.identity, plan.step, plan.turn]
    return Request(
        request_key=stable_hash([*key, plan.operator]),
        task=plan.task,
        language=judge.language,
        prompt=prompt,
        sample_index=plan.step,
        sampling=sampling,
        turn=plan.turn,
        parent=plan.parents[0].candidate_id,
    )


def prompt_of(plan: Plan, language: Language, hardware: str | None, verdicts: Snapshot) -> str:
    """The task's prompt with its parents: one with its verdict and, if there, profile in words; or
    two with their speedups."""
    prompt, parents = render(plan.task, language, hardware), plan.parents
    if plan.operator == "cross":
        return with_earlier_kernels(
            prompt, sorted(Kernel(each.score, each.code) for each in parents)
        )
    name = parents[0].candidate_id
    profiles = Snapshot(verdicts.root, PROFILES, "")
    known = known_rows(profiles, "candidate_id", [name], KERNEL_PROFILES)
    limits = ({key: row[key] for key in LIMIT} for row in known if row["limit"])
    said = [said_of(_verdict(verdicts, name)), *(limit_words(**limit) for limit in limits)]
    return follow_up_prompt(prompt, parents[0].code, "".join(said), correct=True)


def _verdict(verdicts: Snapshot, candidate_id: str) -> Verdict:
    row = next(verdicts.rows_by("candidate_id", [candidate_id]))
    return Verdict.model_validate({name: row[name] for name in Verdict.model_fields if name in row})


def summary_of(searched: Searched) -> Json:
    refs = {name: ref.fingerprint for name, ref in searched}
    return {**searched.improved.open().manifest["search"], "snapshots": refs}
