"""Roles that run the task alone, in processes no candidate code enters."""
