"""Contrastive prompts (CUDA-L1): a sampler that shows earlier kernels, and asks another sampler."""
