"""The stages, one package each, and what they share."""
