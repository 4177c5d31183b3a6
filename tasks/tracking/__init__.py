"""Runs, metrics, data sets and models in MLflow."""
