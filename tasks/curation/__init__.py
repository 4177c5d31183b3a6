"""Verdicts to training sets, by named strategies."""
