"""The table of timing budgets: by hand, and of candidates that were judged under all of them."""

import math

from benchmarks.timing_budget import Built, build, chosen, tables
from kernels_eval.records import Language


def row(candidate, budget, speedup, half):
    told = {"candidate": candidate, "budget": budget, "status": "correct", "pairs": 10}
    told |= {"run_s": budget, "timing_s": budget / 2, "speedup": speedup}
    return told | {"lower": speedup * math.exp(-half), "upper": speedup * math.exp(half)}


def test_costs_and_widths_by_hand():
    wrong = {"status": "wrong_output", "speedup": None}
    rows = [
        row("a", 1.0, 1.1, 0.2),
        row("b", 1.0, 2.0, 0.1),
        row("c", 1.0, 1.0, 0.1) | wrong,
        row("a", 4.0, 1.2, 0.02),
        row("b", 4.0, 2.0, 0.02),
        row("c", 4.0, 1.0, 0.1) | wrong | {"run_s": 0.7},
        row("d", 1.0, 3.0, 0.1),  # not judged under 4
    ]
    found = list(tables(rows, [1.0, 4.0]))
    assert found[0].startswith("3 candidates")
    assert found[3] == "| 1 | 1.00 | 0.50 | 2 | 10 | 0.150 | 0.100 | 50% | 0.044 | 0 |"
    assert found[4] == "| 4 | 2.90 | 2.00 | 2 | 10 | 0.020 | 0.020 | 100% | 0.000 | 0 |"


def test_a_budget_under_which_nothing_was_judged_leaves_no_table_of_numbers():
    assert list(tables([row("a", 1.0, 1.1, 0.2)], [1.0, 4.0]))[-1].count("|") == 11


def test_responses_with_code_are_taken_task_by_task(monkeypatch):
    class Arguments:
        limit, tasks = 14, None

    found = list(chosen(Arguments, Language.CPP))
    names = [task.task_id for task, _ in found]
    assert len(found) == 14 and len(set(names[: len(set(names))])) == len(set(names))
    assert len({candidate.candidate_id for _, candidate in found}) == 14
    prepared = []

    class Preparer:
        def __init__(self, _config): ...

        def prepare(self, candidate, task):
            prepared.append(candidate.candidate_id)
            return task.task_id

        def close(self):
            prepared.append("closed")

    monkeypatch.setattr("benchmarks.timing_budget.Preparer", Preparer)
    built = build(found, 1.0, 1)
    assert built == [Built(task, candidate, task.task_id) for task, candidate in found]
    assert prepared[-1] == "closed" and len(prepared) == 15
