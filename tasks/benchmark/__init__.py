"""Scores of models on held-out tasks, and the pages that show them."""
