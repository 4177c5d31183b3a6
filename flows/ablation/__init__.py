"""Ablations: strategies x sizes x seeds on the same verdicts."""
