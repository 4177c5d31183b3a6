"""Scores on held-out tasks, and their pages."""
