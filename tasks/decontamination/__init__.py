"""Training tasks that no benchmark knows, and each of them once."""
