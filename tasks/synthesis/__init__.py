"""Sampling candidates: prompts, samplers, servers, and the parser of answers."""
