"""What an analysis found, as records: observations of length, and the difficulty of tasks.

Guarantees: every number carries its n and an interval, or says why there is none. Holds no formula
but `bend`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kernels_eval.records import Record
from tasks.reporting.findings import Estimate, Finding


class Bin(Record):
    """Samples with from_tokens <= length < to_tokens (None: open), and Wilson's 95 % bounds."""

    from_tokens: float
    to_tokens: float | None
    samples: int
    correct: int
    tasks: int
    accuracy: float
    lower: float
    upper: float


class Spread(Record):
    """Lengths of one outcome, in tokens.

    The bounds of the median are exact order statistics for independent samples (scipy).
    """

    samples: int
    mean: float
    p10: float
    p25: float
    median: float
    p75: float
    p90: float
    median_lower: float | None = None
    median_upper: float | None = None


class WithinTask(Record):
    """Length against correctness among samples of one task.

    `samples` are those of the `tasks` tasks that have both outcomes, of `tasks_in_all`. Linear in
    tokens: `odds_ratio` per `sd_tokens` (the standard deviation within a task) longer,
    `odds_ratio_per_unit` the same fit per `unit_tokens`, `slope` the change of the share correct
    (-1 to 1) per `sd_tokens`, and `permutation_p`, two-sided, of `permutations` shuffles. By ranks
    within the task (0 to 1): `rank_odds_ratio` and `rank_slope` per `sd_rank`. `median_odds_ratio`
    compares samples above with those below their task's median length.
    """

    tasks: int
    tasks_in_all: int
    samples: int
    unit_tokens: float
    sd_tokens: float | None = None
    sd_rank: float | None = None
    odds_ratio: Estimate
    odds_ratio_per_unit: Estimate
    slope: Estimate
    rank_odds_ratio: Estimate
    rank_slope: Estimate
    median_odds_ratio: Estimate
    permutation_p: float | None = None
    permutations: int = 0


class SensitivityRow(Record):
    """The analysis within tasks on the part `name` of the samples, such as "level 1"."""

    name: str
    samples: int
    within: WithinTask


class Stratum(Record):
    """Samples of one level and token limit. `longest_tokens` is their greatest length; `truncated`
    is None where nothing says which samples were cut off."""

    name: str
    samples: int
    tasks: int
    correct: int
    truncated: int | None
    longest_tokens: float


class Population(Record):
    """Accuracy against length: `all` samples, or the `complete` ones, not cut off by the limit.

    `bins` have the paper's fixed width, `tenths` equal counts (ties stay together).
    `longer_if_incorrect` is the chance that a random incorrect sample is longer than a random
    correct one. `pooled` is the odds ratio per `unit_tokens`, tasks ignored.
    """

    name: str
    samples: int
    correct: int
    tasks: int
    bins: tuple[Bin, ...]
    tenths: tuple[Bin, ...]
    correct_lengths: Spread | None
    incorrect_lengths: Spread | None
    longer_if_incorrect: Estimate
    pooled: Estimate
    within: WithinTask


class SpeedTenth(Record):
    """Speedup (a ratio): geometric mean and quartiles in a tenth of the correct samples."""

    from_tokens: float
    to_tokens: float
    samples: int
    geometric_mean: float
    p25: float
    p75: float


class LengthAndSpeedup(Record):
    """Of correct, timed samples.

    `within` is the factor on the speedup for one standard deviation (`sd_tokens`) within a task,
    `within_ranks` the correlation of the ranks of both within their tasks, `strata` Spearman's rho
    in each level and token limit (empty where there is one).
    """

    label: str
    samples: int
    tasks: int
    pearson: Estimate
    pearson_log: Estimate
    spearman: Estimate
    within: Estimate
    within_ranks: Estimate
    strata: dict[str, Estimate] = {}
    sd_tokens: float | None = None
    tenths: tuple[SpeedTenth, ...] = ()
    points: tuple[tuple[float, float], ...] = ()


class Observations(Record):
    """`rows` of the frame, of which `samples` were judged and measured.

    `left_out` counts the others by reason. `truncated` samples were cut off by the token limit
    (None where nothing says), `truncated_correct` of them are correct. `strata` are levels and
    token limits where there are several, `sensitivity` the parts of the samples on which the
    analysis within tasks is repeated. `findings` are the rows that the numbers support, `finding`
    their headline, `cautions` what bounds it.
    """

    rows: int
    samples: int
    tasks: int
    generators: tuple[str, ...]
    left_out: dict[str, int]
    length_unit: str
    unit_tokens: float
    truncated: int | None
    truncated_correct: int
    everything: Population
    complete: Population | None
    strata: tuple[Stratum, ...] = ()
    sensitivity: tuple[SensitivityRow, ...] = ()
    speedup: LengthAndSpeedup
    finding: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    cautions: tuple[str, ...] = ()


class Group(Record):
    """Tasks with from_arl <= ARL <= to_arl (tokens); groups overlap where levels were divided each
    by itself.

    Exec is the mean over tasks of the share correct; the speedup is a geometric mean over correct,
    timed samples (a ratio).
    """

    name: str
    from_arl: float
    to_arl: float
    tasks: int
    samples: int
    exec: Estimate
    speedup: Estimate


class Division(Record):
    """Groups from short to long ARL, by rank within each level and token limit.

    `steps` are the drops of Exec from one group to the next (positive: falls), with intervals that
    hold with 95 % for all steps together. `exec_monotone` and `speedup_monotone` are the verdicts
    on "falls with every step": "supported", "contradicted" (rises with every step) or "not robust".
    """

    label: str
    quantiles: tuple[float, ...]
    groups: tuple[Group, ...]
    steps: tuple[Estimate, ...]
    speed_steps: tuple[Estimate, ...]
    exec_monotone: str
    speedup_monotone: str


class Agreement(Record):
    """Two ARLs of the same tasks.

    Spearman's rho, the share of tasks in the same third, and Cohen's kappa with linear weights.
    `crossed` divides by the second generator's ARL and judges the first one's samples.
    """

    first: str
    second: str
    tasks: int
    spearman: Estimate
    same_third: Estimate
    kappa: Estimate
    crossed: Division | None


class Difficulty(Record):
    """Tasks divided by ARL: `tertiles` as the paper does.

    `split_half` takes ARL of every second sample and outcomes of the others (None: one sample a
    task). `sensitivity` moves the thresholds, and takes medians, or only samples that were not cut
    off. `reliability` is Spearman's rho between ARLs of two halves of the samples.
    """

    tasks: int
    samples: int
    arl_exec: Estimate
    tertiles: Division | None
    split_half: Division | None
    reliability: Estimate
    sensitivity: tuple[Division, ...]
    agreement: Agreement | None
    finding: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


def bend(tenths: Sequence[Bin]) -> tuple[int, Bin] | None:
    """Return (1, the peak) or (-1, the trough) of accuracy over length, or None.

    A tenth is one where it lies beyond the intervals of both a shorter and a longer tenth.
    """
    for sign in (1, -1):
        place = max(range(len(tenths)), key=lambda at: sign * tenths[at].accuracy, default=0)
        sides = tenths[:place], tenths[place + 1 :]
        if not all(sides):
            continue
        extreme = tenths[place]
        if sign > 0 and extreme.lower > max(min(bin.upper for bin in side) for side in sides):
            return 1, extreme
        if sign < 0 and extreme.upper < min(max(bin.lower for bin in side) for side in sides):
            return -1, extreme
    return None
