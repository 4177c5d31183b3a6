"""The odds ratio within tasks, recomputed in plain numpy from the rows that snapshots hold."""

from itertools import combinations

import numpy as np


def test_ranks_within_tasks(analysed):
    verdicts, candidates, analysis = (ref.open().read() for ref in analysed)
    told = {row["name"]: row for row in analysis.to_dicts()}["odds_ratio_within_tasks"]
    rows = verdicts.join(candidates, on="candidate_id").partition_by("task_id")
    tasks = [(t["reasoning_tokens"].to_numpy(), t["status"].to_numpy() == "correct") for t in rows]
    ranks = [(np.sign(x[:, None] - x).sum(1) / 2 / len(x), y) for x, y in tasks if any(y ^ y[0])]
    sd = np.sqrt(sum((r**2).sum() for r, _ in ranks) / sum(len(r) - 1 for r, _ in ranks))
    sums = [np.sum([*combinations(r / sd, y.sum())], axis=1) for r, y in ranks]
    seen, log = sum(r[y].sum() / sd for r, y in ranks), 0.0
    for _ in range(20):  # Newton's method on the exact conditional likelihood
        moments = [np.average([s, s**2], axis=1, weights=np.exp(log * s)) for s in sums]
        bits = sum(square - mean**2 for mean, square in moments)
        log += (seen - sum(mean for mean, _ in moments)) / bits
    found = log + np.array([0, -1, 1]) * 1.959963985 / bits**0.5
    assert np.allclose(np.exp(found), [told[key] for key in ("value", "lower", "upper")], rtol=1e-9)
    assert (told["tasks"], told["samples"]) == (len(ranks), sum(len(r) for r, _ in ranks))
