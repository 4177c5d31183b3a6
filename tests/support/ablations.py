"""Ablations whose truth is known: verdicts of every branch as finished snapshots, with the chance
of a correct answer planted by strategy."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from tasks.benchmark.comparison.numbers import compared
from tasks.benchmark.comparison.page import headline, write_comparison
from tasks.benchmark.comparison.records import Ablation, Branch
from tasks.benchmark.stage import Answers
from tasks.tables import VERDICTS
from tests.support.samples import finished

DEVICE = "a CPU"


class Written(NamedTuple):
    """The files of a comparison, and its first sentence."""

    html: Path
    markdown: Path
    json_file: Path
    headline: str


def written_comparison(ablation, out, *, resamples=2000):
    found = compared(ablation, resamples=resamples)
    return Written(*write_comparison(found, out), headline(found))


def verdict(task, number, speedup, device=DEVICE, salt=""):
    """One row of VERDICTS: correct with this speedup, or a wrong output."""
    right = speedup is not None
    timing = (
        {"speedup": speedup, "speedup_lower": speedup * 0.9, "speedup_upper": speedup * 1.1}
        if speedup is not None
        else None
    )
    return {
        "candidate_id": f"{salt}{task}-{number}",
        "task_id": task,
        "status": "correct" if right else "incorrect",
        "reason": "ok" if right else "wrong_output",
        "outputs_match": right,
        "timing": timing,
        "device": device,
    }


def answers(root, model, rows, name):
    ref = finished(root, "verification", rows, VERDICTS, name)
    return Answers(
        model=model, candidates=ref.model_copy(update={"stage": "synthesis"}), verdicts=ref
    )


def drawn(chance, *, tasks, samples, seed, fast=1.3, device=DEVICE):
    """Verdicts on tasks of unequal difficulty; the tasks' difficulties are the same for every
    seed."""
    hard = np.random.default_rng(7).uniform(-0.15, 0.15, tasks)
    luck = np.random.default_rng(seed)
    rows = []
    for task in range(tasks):
        for number in range(samples):
            right = luck.random() < min(max(chance + hard[task], 0.0), 1.0)
            rows.append(
                verdict(
                    f"task-{task:03}",
                    number,
                    float(fast * luck.lognormal(0, 0.3)) if right else None,
                    device,
                )
            )
    return rows


def branch(
    root,
    strategy,
    seed,
    verdicts,
    *,
    size=None,
    **facts,
):
    """A branch that is done, with these verdicts."""
    name = f"{strategy}-{size or 'all'}-{seed}"
    found = answers(root, "tuned", verdicts, facts.pop("snapshot", name))
    facts = {"name": name, "strategy": strategy, "size": size, "seed": seed} | facts
    return Branch(**facts, state="done", answers=found)


def solved(root, strategy, seed, right, tasks=40):
    """A branch with two samples a task that solves so many of the tasks, always the first ones."""
    rows = [
        verdict(f"t{task:03}", number, 2.0 if task < right else None)
        for task in range(tasks)
        for number in range(2)
    ]
    return branch(root, strategy, seed, rows, snapshot=f"{strategy}-{seed}-{right}")


def ablation(
    root,
    chances,
    *,
    tasks=40,
    samples=5,
    seeds=2,
    base=None,
    **more,
):
    """A branch for each (strategy, size) and seed. Candidate ids are the same in all branches, as
    equal answers' are."""
    plans = [(*plan, seed) for plan in chances.items() for seed in range(seeds)]
    branches = tuple(
        branch(
            *(root, strategy, seed),
            drawn(chance, tasks=tasks, samples=samples, seed=1000 + number),
            size=size,
            rows=size or 40,
            loss_last=1.5 - chance,
            held_out_loss_last=1.7,
            seconds=90.0,
            mlflow_url=f"http://127.0.0.1:7201/#/experiments/1/runs/{number}",
            prefect_url="http://127.0.0.1:7202/runs/x",
        )
        for number, ((strategy, size), chance, seed) in enumerate(plans, 1)
    )
    beside = {} if base is None else {"base": drawn(base, tasks=tasks, samples=samples, seed=1)}
    facts = {
        "name": "planted",
        "fingerprint": "abc123",
        "base_model": "small",
        "created_at": "2026-11-22T05:00:00+00:00",
        "branches": branches,
        "references": tuple(answers(root, name, rows, "of-base") for name, rows in beside.items()),
    }
    return Ablation(**(facts | more))
