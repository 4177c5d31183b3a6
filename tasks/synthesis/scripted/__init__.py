"""A sampler without a model: answers to generated tasks with planted properties."""
