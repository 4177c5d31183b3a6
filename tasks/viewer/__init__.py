"""A static site that shows candidates."""
