"""Verdicts of candidates, in chunks, on a cluster or one machine."""
