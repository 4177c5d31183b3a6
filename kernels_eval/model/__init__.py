"""What every process that runs a model has in common: inputs, memory, comparisons, operators."""
