"""The sandbox around candidates: processes, namespaces, filters, limits."""

from __future__ import annotations
