"""The verifier as the reward of a trainer: one module a trainer, which alone imports it."""
