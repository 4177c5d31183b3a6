"""Profiles of correct kernels, and what limits them."""
