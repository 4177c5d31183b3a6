"""Correct CUDA kernels beside their HIP form (CASS): compiled for AMD GPUs, and never run."""
