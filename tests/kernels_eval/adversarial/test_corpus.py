"""Cheats and their honest twins that need no GPU: tests/data/adversarial has them, by group of
threats. And verdicts of every other kind, from tests/data/verdicts."""

import pytest

from tests.support.adversarial import CORPUS, VERDICTS, parameters, trials_of

TRIALS = trials_of(CORPUS)


@pytest.mark.parametrize("trial", parameters([*TRIALS, *trials_of(VERDICTS)]))
def test_corpus(verifiers, trial):
    trial.assert_judged(verifiers(trial.config))
