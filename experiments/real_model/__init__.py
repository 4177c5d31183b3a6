"""A published code model gets better: expert iteration on tasks that nobody here wrote."""
