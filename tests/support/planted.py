"""Finished snapshots of verdicts and candidates in which an effect of length is planted, and a
configuration that analyses them quickly."""

from benchmarks.analysis_scale import planted_frame
from tasks.analysis.config import ObservationConfig
from tasks.tables import CANDIDATES, VERDICTS
from tests.support.samples import finished

QUICK = ObservationConfig(max_conditional_tasks=60, permutations=199)


def planted(root, rows=600):
    """Verdicts, and candidates the other way round."""
    table = [
        row | {"timing": row["speedup"] and {"speedup": row["speedup"]}}
        for row in planted_frame(rows, 0).to_dicts()
    ]
    return (
        finished(root, "verification", table, VERDICTS),
        finished(root, "synthesis", table[::-1], CANDIDATES),
    )
