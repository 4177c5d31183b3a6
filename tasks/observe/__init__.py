"""Observations of reasoning length, task difficulty and the content of training sets."""
