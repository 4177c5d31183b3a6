"""A root of snapshots whose training sets and scores are recomputed elsewhere: synthetic verdicts,
then the stages themselves."""

import numpy as np

from tasks.benchmark import stage as benchmark
from tasks.benchmark.config import BenchmarkConfig
from tasks.curation import stage as curation
from tasks.curation.config import CurationConfig
from tests.support.samples import FUSION, SINGLE, line_of, sample

STATUSES = ("correct", "incorrect", "compile_error", "no_code", "task_error")


def verdicts(seed, tasks, samples):
    """Samples of every kind that a choice depends on: wrong, untimed, cut off, without reasoning,
    equal in speed, equal in code."""
    rng = np.random.default_rng(seed)
    tokens, rows = rng.permutation(np.arange(1, tasks * samples + 1)), []
    speed = 0.0
    for task in range(tasks):
        solved = rng.beta(1, 1) if task % 17 else 0.0
        for index in range(samples):
            chance = [solved, *np.full(4, (1 - solved) / 4)] if task % 17 else [0, 0, 0, 0.2, 0.8]
            if not index or rng.random() > 0.1:  # else as fast as the sample before
                speed = float(rng.lognormal(0.5, 1.2))
            length = int(tokens[task * samples + index])
            status = str(rng.choice(STATUSES, p=chance))
            ops = SINGLE if task % 3 == 0 else FUSION
            row = sample(
                f"t{task:03d}",
                index,
                length if rng.random() > 0.03 else 0,
                speed if rng.random() > 0.1 else None,
                status=status,
                ops=ops,
            )
            row["finish_reason"] = "length" if rng.random() < 0.15 else "stop"
            row |= {"code": f"kernel {rng.integers(3)}", "completion_tokens": 2 * length}
            row |= {"reason": "ok" if status == "correct" else status, "device": "a GPU"}
            rows.append(row)
    return rows


def make(root):
    """Three training sets and a benchmark of two models under a root, which is returned."""
    line = line_of(root, verdicts(1, 300, 6), "line")
    for strategy in ("concur", "min_length", "speedup"):
        curation.run(line, CurationConfig.model_validate({"strategy": strategy}))
    answers = []
    for model, seed in (("base", 2), ("tuned", 3)):
        line = line_of(root, verdicts(seed, 80, 10), model)
        judged, candidates = line.verdicts, line.candidates
        answers.append(benchmark.Answers(model=model, candidates=candidates, verdicts=judged))
    benchmark.run(answers, BenchmarkConfig(samples_per_task=10))
    return root
