"""Cheats and their honest twins that need no GPU: tests/data/adversarial has them, by group of
threats. And verdicts of every other kind, from tests/data/verdicts."""

from dataclasses import replace

import pytest

from tests.support.adversarial import CORPUS, VERDICTS, parameters, trials_of

TRIALS = trials_of(CORPUS)


@pytest.mark.parametrize("trial", parameters([*TRIALS, *trials_of(VERDICTS)]))
def test_corpus(verifiers, trial):
    trial.assert_judged(verifiers(trial.config))


@pytest.mark.slow
@pytest.mark.parametrize(
    "trial",
    parameters(
        [each for each in [*TRIALS, *trials_of(VERDICTS)] if each.honest and not each.timed]
    ),
)
def test_honest_kernels_are_not_refused_by_their_times(verifiers, trial):
    replace(trial, timed=True).assert_judged(verifiers(trial.config))


@pytest.mark.slow
@pytest.mark.parametrize("trial", parameters([each for each in TRIALS if each.honest]))
def test_honest_kernels_pass_a_screening(verifiers, trial):
    """What it accepts beside them, `python -m benchmarks.levels` says."""
    screened = replace(trial, config=trial.config.screened(), check=None)
    screened.assert_judged(verifiers(screened.config))
