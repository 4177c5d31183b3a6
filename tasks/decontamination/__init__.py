"""Distinct training tasks that no benchmark contains."""
