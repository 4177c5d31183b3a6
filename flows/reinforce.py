"""Reinforcement: the adapter of a training answers tasks, the verifier judges, GRPO learns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from prefect import flow

from flows.config import PipelineConfig
from flows.naming import run_name
from flows.runtime.guard import guarding
from flows.track import reinforcement_record, track
from flows.train import of_line, prompts_for
from kernels_eval.errors import UsageError
from kernels_eval.judge.messages import no_code_verdict
from kernels_eval.records import Candidate, Json, KernelTask, Verdict
from tasks.sources.small_model import resolve_model
from tasks.sources.stage import read_tasks
from tasks.store.lookup import find_snapshot, newest_first
from tasks.store.snapshot import SnapshotRef
from tasks.synthesis.parsing import parse_response
from tasks.synthesis.refine import told_in_place
from tasks.training import reinforce
from tasks.training.stage import STAGE as TRAINING
from tasks.training.stage import adapter_of
from tasks.verification.stage import pool_of

if TYPE_CHECKING:
    from tasks.training.grpo import Judge, Judged

Code = tuple[str, str]
"""A task's id, and code for it."""
Verify = Callable[[Iterable[tuple[KernelTask, Candidate]]], Iterable[Verdict]]
"""`Pool.verify`, or what does the same."""


def reinforce_adapter(
    config: PipelineConfig, tasks: SnapshotRef, trained: SnapshotRef
) -> SnapshotRef:
    """GRPO on the training tasks, from the adapter of a finished training."""
    prompts, recipe = prompts_for(config, tasks), config.reinforcement
    snapshot = reinforce.planned(trained, recipe, prompts)
    if snapshot.finished:
        return snapshot.ref
    resolve_model(str(trained.open().manifest["base_model"]), trained.root)  # before any worker
    known = {task.task_id: task for task in read_tasks(tasks)}
    with pool_of(config.language, config.verification) as pool:
        return reinforce.run(trained, recipe, prompts, judge_by(pool.verify, config, known))


def judge_by(verify: Verify, config: PipelineConfig, tasks: Mapping[str, KernelTask]) -> Judge:
    """Judge answers by their verdicts; equal code for a task is verified once per step, or per run
    with `verification.once_per_code`."""
    from tasks.training.grpo import Judged

    known: dict[Code, Verdict] = {}

    def judge(task_ids: Sequence[str], answers: Sequence[str]) -> list[Judged]:
        if not config.verification.once_per_code:
            known.clear()
        candidates = [
            _candidate(str(place), tasks[task_id], answer, config)
            for place, (task_id, answer) in enumerate(zip(task_ids, answers, strict=True))
        ]
        unknown = {
            (each.task_id, each.code): each
            for each in candidates
            if each.code is not None and (each.task_id, each.code) not in known
        }
        key_of = {each.candidate_id: key for key, each in unknown.items()}
        pairs = [(tasks[each.task_id], each) for each in unknown.values()]
        for verdict in verify(pairs) if pairs else ():
            known[key_of[verdict.candidate_id]] = verdict
        verdicts = [_verdict(each, tasks, known) for each in candidates]
        return [
            Judged(verdict, each.reasoning or "", told_in_place(verdict))
            for verdict, each in zip(verdicts, candidates, strict=True)
        ]

    return judge


def _verdict(
    candidate: Candidate, tasks: Mapping[str, KernelTask], known: Mapping[Code, Verdict]
) -> Verdict | None:
    if candidate.code is None:
        return no_code_verdict(tasks[candidate.task_id], candidate)
    return known.get((candidate.task_id, candidate.code))


def _candidate(name: str, task: KernelTask, answer: str, config: PipelineConfig) -> Candidate:
    parsed = parse_response(answer)
    return Candidate(
        candidate_id=name,
        task_id=task.task_id,
        language=config.language,
        generator="policy",
        sample_index=int(name),
        response=answer,
        reasoning=parsed.reasoning,
        answer=parsed.answer,
        code=parsed.code,
        parse_reason=parsed.parse_reason,
    )


@flow(name="reinforce and track", flow_run_name=run_name("reinforce"))
def reinforce_and_track(
    config: PipelineConfig, tasks: SnapshotRef, trained: SnapshotRef
) -> tuple[SnapshotRef, str | None]:
    with guarding(config.root):
        reinforced = reinforce_adapter(config, tasks, trained)
        return reinforced, track(reinforcement_record, config, reinforced)


def of_training(
    config: PipelineConfig, name: str | None
) -> tuple[PipelineConfig, SnapshotRef, SnapshotRef]:
    """(configuration, tasks, training) of a finished training: its fingerprint under the root, its
    directory, or the newest. Raises UsageError where one is missing."""
    there = newest_first(config.root, TRAINING)
    if not (name or there):
        raise UsageError(f"{config.root} holds no finished training", "run `concur train` first")
    trained = find_snapshot(config.root, name, TRAINING) if name else there[0].ref
    config, tasks, _ = of_line(trained.root, trained.open().manifest["upstream"][0], config)
    return config, tasks, trained


def summary_of(trained: SnapshotRef, reinforced: SnapshotRef) -> Json:
    snapshot = reinforced.open()
    log = snapshot.read(unique="step").sort("step")
    return {
        "training": trained.fingerprint,
        "reinforcement": reinforced.fingerprint,
        "tasks": snapshot.manifest["tasks"],
        "steps": len(log),
        "reward": (log["reward"][0], log["reward"][-1]),
        "correct": (log["status/correct"][0], log["status/correct"][-1]),
        "rejected": (log["status/rejected"][0], log["status/rejected"][-1]),
        "adapter": str(adapter_of(reinforced).absolute()),
    }
