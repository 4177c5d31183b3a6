"""Chance in tests: every generator starts anew with each test, at one seed."""

import os
import random
import secrets
import sys

SEED = int(os.environ.get("CONCUR_TEST_SEED", "0"))
"""Another one finds by hand what this one does not show."""


def seed_generators():
    random.seed(SEED)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(SEED)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(SEED)


def seed_judge(monkeypatch):
    """What the judge draws in this process is what it drew in the last run."""
    drawn = random.Random(SEED)
    monkeypatch.setattr(secrets, "randbits", drawn.getrandbits)
    monkeypatch.setattr(secrets, "randbelow", drawn.randrange)
    monkeypatch.setattr(secrets, "choice", drawn.choice)
    monkeypatch.setattr(secrets, "SystemRandom", lambda: drawn)
