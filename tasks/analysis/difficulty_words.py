"""What the division by ARL supports, in plain sentences made from its numbers by rules (see
`findings` for what such a sentence claims)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.analysis.findings import interval

if TYPE_CHECKING:
    from tasks.analysis.difficulty import Difficulty, Division

MEANING = {
    "falls": "falls with every step, with 95 % confidence",
    "not refuted": "falls with every step, though not with 95 % confidence in each",
    "refuted": "does not fall monotonically: a step rises, with 95 % confidence",
    "not shown": "does not fall with every step, though no rise is certain",
    "unsayable": "cannot be compared between the groups",
}


def difficulty_finding(found: Difficulty) -> tuple[str, ...]:
    """The sentences, most important first."""
    if found.tertiles is None:
        return (f"{found.tasks} tasks cannot be divided into easy, medium and hard.",)
    said = [f"By ARL, Exec {MEANING[found.tertiles.exec_monotone]}: {_execs(found.tertiles)}."]
    said.append(
        f"The geometric-mean speedup {MEANING[found.tertiles.speedup_monotone]}:"
        f" {_speedups(found.tertiles)}."
    )
    if found.split_half is not None:
        said.append(
            "With ARL and outcomes taken from different samples of a task, Exec"
            f" {MEANING[found.split_half.exec_monotone]}: {_execs(found.split_half)}. The ARLs of"
            f" two halves of the samples agree with Spearman {interval(found.reliability)}."
        )
    else:
        said.append(
            "With one sample a task, ARL and outcome come from the same sample: difficulty and luck"
            " cannot be told apart."
        )
    other = [
        division
        for division in found.sensitivity
        if division.exec_monotone == found.tertiles.exec_monotone
    ]
    said.append(f"Of {len(found.sensitivity)} other divisions, {len(other)} say the same of Exec.")
    if found.agreement is None:
        said.append("One generator: whether another finds the same tasks hard cannot be said.")
    else:
        said.append(
            f"{found.agreement.first} and {found.agreement.second} agree on"
            f" {found.agreement.tasks:,} tasks with Spearman {interval(found.agreement.spearman)},"
            f" weighted kappa of the thirds {interval(found.agreement.kappa)}."
        )
        if found.agreement.crossed is not None:
            crossed = found.agreement.crossed
            said.append(
                f"Divided by the other generator's ARL, Exec {MEANING[crossed.exec_monotone]}:"
                f" {_execs(crossed)}."
            )
    return tuple(said)


def _execs(division: Division) -> str:
    return ", ".join(
        f"{group.name} {100 * (group.exec.value or 0):.0f} %" for group in division.groups
    )


def _speedups(division: Division) -> str:
    return ", ".join(
        (
            f"{group.name} {group.speedup.value:.2f}"
            if group.speedup.value is not None
            else f"{group.name} none"
        )
        for group in division.groups
    )
