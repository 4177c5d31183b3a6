"""The report of a run: its records, content, figures and files."""
