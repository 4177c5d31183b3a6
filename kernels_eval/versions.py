"""The version of the verification protocol, which is part of every verdict's key."""

from __future__ import annotations

PROTOCOL_VERSION = 35
"""Raise this in a commit that can change a verdict: status, reason, what is compared, timing, a
threshold; candidates are then verified anew. Leave it for docstrings, messages, logging,
structure or speed.
"""
