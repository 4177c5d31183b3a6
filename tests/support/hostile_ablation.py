"""An ablation whose strategies, branches, tasks, models, devices and errors are named after
payloads, put where `concur ablate` puts one.

Our own edge refuses most of these names before an ablation begins (`flows.ablation.plan.label_of`).
Its pages must not lean on that: a record may come of an older version, another machine or
somebody's hand.
"""

from tasks.benchmark.comparison.records import Ablation, Branch
from tests.support.ablations import answers, branch, drawn, verdict, written_comparison
from tests.support.payloads import ACT, CANARY, HOSTILE, LINES, PAYLOADS

OUTSIDE = f"http://{CANARY}/run'\"><script>{ACT}</script>"
SCRIPT = f"javascript:{ACT}"
LINKS = {"mlflow_url": OUTSIDE, "prefect_url": SCRIPT}


def hostile_ablation(root):
    """A strategy for each payload; the first at two sizes, the second with two seeds; one branch
    that failed."""
    plans = [(strategy, None, 0) for strategy in PAYLOADS] + [
        (PAYLOADS[0], 10, 0),
        (PAYLOADS[1], None, 1),
    ]
    facts = {"curated": HOSTILE, "trained": LINES, "scores": HOSTILE, **LINKS}
    broken = {"status": "task_error", "reason": "reference_failed"}
    branches = [
        branch(
            *(root, strategy, seed),
            drawn(0.2 + 0.05 * number, tasks=8, samples=3, seed=number, device=HOSTILE)
            + [verdict(task, 0, None, HOSTILE) | broken for task in PAYLOADS],
            size=size,
            name=f"branch {number} {strategy}",
            snapshot=f"branch-{number}",
            rows=size or 20,
            loss_last=1.0,
            **facts,
        )
        for number, (strategy, size, seed) in enumerate(plans)
    ]
    lost = {"strategy": PAYLOADS[0], "seed": 2, **LINKS}
    branches.append(Branch(name=f"failed {HOSTILE}", state="failed", error=LINES, **lost))
    beside = {
        model: drawn(0.2, tasks=8, samples=3, seed=90, device=HOSTILE)
        for model in (*PAYLOADS, "base")
    }
    return Ablation(
        name=HOSTILE,
        fingerprint=HOSTILE,
        branches=tuple(branches),
        base_model=HOSTILE,
        references=tuple(
            answers(root, model, rows, f"beside-{place}")
            for place, (model, rows) in enumerate(beside.items())
        ),
        baseline=PAYLOADS[0],
        created_at=HOSTILE,
        cautions=(HOSTILE, LINES),
        **LINKS,
    )


def hostile_comparison(root):
    return written_comparison(hostile_ablation(root), root / "comparison", resamples=100)
