"""Curated sets as folders for `datasets.load_dataset`."""
