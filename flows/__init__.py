"""Prefect flows over the stages, and what starts and keeps them."""
