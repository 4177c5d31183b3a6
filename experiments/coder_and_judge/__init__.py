"""A coder and a judge (CudaForge): a second model reads an attempt, and says what to change."""
