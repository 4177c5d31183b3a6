"""A run's report: records, content, figures, files."""
