"""The rule by which an observation is supported, contradicted or not robust.

Guarantees: one rule for every observation, and symmetric: if every number lay as far on the other
side of its line, "supported" and "contradicted" would change places. Does not guarantee that an
effect matters, nor its cause: sizes and intervals are in the rows beside the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tasks.analysis.records import WithinTask
from tasks.reporting.findings import Estimate

SUPPORTED, CONTRADICTED, NOT_ROBUST = "supported", "contradicted", "not robust"
ADEQUATE_TASKS = 30
"""Tasks with both outcomes that a row of the sensitivity table needs to have a say."""
NEGLIGIBLE = 0.1
"""|correlation| under which length explains less than 1 % of the variance."""


class Check(NamedTuple):
    """What one number says of a claim: 1 for it, -1 against it, 0 unknown or on the line.

    It is `certain` where its whole 95 % interval lies on that side.
    """

    side: int
    certain: bool


def below(estimate: Estimate, line: float) -> Check:
    """The claim is that the number lies below `line`."""
    if estimate.value is None:
        return Check(0, False)
    side = (estimate.value < line) - (estimate.value > line)
    return Check(side, bool(side) and estimate.side(line) == -side)


def above(estimate: Estimate, line: float) -> Check:
    """The claim is that the number lies above `line`."""
    found = below(estimate, line)
    return found._replace(side=-found.side)


def negligible(estimate: Estimate) -> Check:
    """The claim is that a correlation lies within `NEGLIGIBLE` of 0."""
    if estimate.value is None:
        return Check(0, False)
    inside = abs(estimate.value) < NEGLIGIBLE
    sides = estimate.side(-NEGLIGIBLE), estimate.side(NEGLIGIBLE)
    return Check(1 if inside else -1, sides in ([(1, -1)] if inside else [(-1, -1), (1, 1)]))


def shorter(found: WithinTask) -> list[Check]:
    """What the three statistics within tasks say of "shorter is more often correct".

    Where length separates outcomes perfectly an odds ratio of a regression is 0 or infinite; the
    slope on the same exposure then stands in for it.
    """
    tokens, ranks = (
        below(slope, 0.0) if ratio.value is None else below(ratio, 1.0)
        for ratio, slope in (
            (found.odds_ratio, found.slope),
            (found.rank_odds_ratio, found.rank_slope),
        )
    )
    return [tokens, ranks, below(found.median_odds_ratio, 1.0)]


def judge(main: Sequence[Check], others: Sequence[Check] = ()) -> tuple[str, str]:
    """Return the verdict and a sentence that counts what it rests on.

    "supported": every number, main or not, speaks for the claim, and the main ones are certain.
    "contradicted": the same with "against". Everything else, no number included, is "not robust".
    """
    every = (*main, *others)
    verdict = NOT_ROBUST
    for side, said in ((1, SUPPORTED), (-1, CONTRADICTED)):
        agree = all(check.side == side for check in every)
        if main and agree and all(check.certain for check in main):
            verdict = said
    counts = [sum(check.side == side for check in every) for side in (1, -1, 0)]
    certain = sum(check.certain for check in main)
    return verdict, (
        f"of {len(every)} numbers {counts[0]} support it, {counts[1]} contradict it, {counts[2]}"
        f" are unknown; {certain} of {len(main)} main intervals are on one side"
    )
