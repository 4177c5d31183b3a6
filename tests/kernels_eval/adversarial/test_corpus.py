"""Cheats and their honest twins that need no GPU: tests/data/adversarial has them, by group of
threats."""

import pytest

from tests.support.adversarial import CORPUS, cases_of, trials

CASES = [case for page in sorted(CORPUS.glob("*.yaml")) for case in cases_of(page)]


@pytest.mark.parametrize("trial", trials(CASES, str))
def test_corpus(verify, trial):
    trial.assert_judged(verify)
