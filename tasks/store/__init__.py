"""Snapshots, journals and fingerprints."""
