"""Evolutionary search by parameters, flags, rewrites and crosses."""
