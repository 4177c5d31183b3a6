"""A controlled experiment: generated tasks, a scripted teacher with known faults, a student."""
