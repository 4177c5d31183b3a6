"""Every threat of the list has a cheat and an honest twin in this corpus, and most can be judged
without a GPU."""

from collections import defaultdict

import pytest

from tests.kernels_eval.adversarial import test_corpus, test_gpu_corpus, test_timing_threats

THREATS = (
    *(*range(1, 51), *range(53, 59), *range(60, 65)),
    *(71, 72, 73, 74, 78, 79, 80, 81, 82, 85),
)
HERE = [*test_corpus.TRIALS, *test_timing_threats.SAMPLERS]


def both(cases):
    """Of each threat, whether it has a cheat, a twin, or both."""
    found = defaultdict(set)
    for case in cases:
        found[case.threat].add("twin" if case.honest else "cheat")
    return found


def test_every_threat_has_a_cheat_and_a_twin():
    found = both([*HERE, *test_gpu_corpus.TRIALS])
    missing = {threat: found[threat] for threat in THREATS if len(found[threat]) < 2}
    assert not missing, f"threats without a cheat or a twin: {missing}"
    assert found.keys() <= set(range(1, 86)), "a number that is not on the list"


def test_of_every_threat_a_cheat_and_a_twin_are_not_left_to_slow_runs():
    quick = [trial for trial in test_corpus.TRIALS if trial.quick]
    assert both(quick) == both(test_corpus.TRIALS)


def test_most_threats_need_no_gpu():
    complete = [threat for threat, kinds in both(HERE).items() if len(kinds) == 2]
    assert len(complete) >= 32, f"only {sorted(complete)} have a cheat and a twin that need no GPU"


@pytest.mark.parametrize(
    "trials", [test_corpus.TRIALS, test_gpu_corpus.TRIALS], ids=["on_cpu", "on_gpu"]
)
def test_a_twin_is_no_copy_of_its_cheat(trials):
    names = [trial.name for trial in trials]
    assert len(names) == len(set(names)), "two cases of one name"
    cheats = {trial.name.removesuffix("-cheat"): trial for trial in trials if not trial.honest}
    for twin in (trial for trial in trials if trial.honest):
        cheat = cheats[twin.name.removesuffix("-honest")]
        assert (twin.code, twin.task.code) != (cheat.code, cheat.task.code), twin.name
