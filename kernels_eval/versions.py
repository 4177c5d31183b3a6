"""The version of the verification protocol, which is part of every verdict's key."""

from __future__ import annotations

PROTOCOL_VERSION = 14
"""Raise this number in the commit that can change any verdict: its status, its reason, what is
compared, how it is timed, or a threshold. Candidates are then verified anew. Leave it for edits of
docstrings, messages, logging, structure or speed, which change no verdict."""
