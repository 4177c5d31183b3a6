"""Verdicts of candidates, chunk by chunk, on a cluster or one machine."""
