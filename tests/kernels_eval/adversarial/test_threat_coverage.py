"""Every threat of the list has a cheat and an honest twin in this corpus, and most can be judged
without a GPU."""

from collections import defaultdict

import pytest

from tests.kernels_eval.adversarial import (
    test_corpus,
    test_gpu_threats,
    test_others_gpu,
    test_timing_threats,
)
from tests.support.adversarial import trials

THREATS = (*range(1, 51), *range(53, 59), 60)
TABLES = (test_corpus, test_gpu_threats, test_others_gpu, test_timing_threats)
CASES = [case for table in TABLES for case in table.CASES]
SAMPLERS = test_timing_threats.SAMPLERS


def test_every_threat_has_a_cheat_and_a_twin():
    cheats = {case.threat for case in CASES} | {case.threat for case in SAMPLERS if not case.honest}
    twins = {case.threat for case in CASES if case.twin is not None} | {
        case.threat for case in SAMPLERS if case.honest
    }
    assert sorted(set(THREATS) - cheats) == [], "threats without a cheat"
    assert sorted(set(THREATS) - twins) == [], "threats without an honest twin"
    assert cheats | twins <= set(range(1, 61)), "a number that is not on the list"


def test_most_threats_need_no_gpu():
    here = defaultdict(set)
    for case in CASES:
        if not case.needs_gpu:
            here[case.threat] |= {False, True} if case.twin is not None else {False}
    for sampler in SAMPLERS:
        here[sampler.threat].add(sampler.honest)
    complete = [threat for threat, roles in here.items() if roles == {False, True}]
    assert len(complete) >= 32, f"only {sorted(complete)} have a cheat and a twin that need no GPU"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__.rsplit(".", 1)[-1])
def test_a_twin_is_no_copy_of_its_cheat(table):
    for case in table.CASES:
        twin_task = case.twin_task or case.task
        assert (case.twin, twin_task.code) != (case.code, case.task.code), (
            f"{case.name}: cheat and twin are the same candidate"
        )
    ids = [parameter.id for parameter in trials(table.CASES, str)]
    assert len(ids) == len(set(ids)), "two cases of one name"
