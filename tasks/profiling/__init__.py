"""What limits correct kernels: a stage of its own, no part of any verdict."""
