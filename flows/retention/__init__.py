"""Retention: which snapshots of a root anything still refers to, and letting go of the others. `collect.collect` is the way in."""
