"""Top-level commands of `concur`, one module each; cli.py registers them."""
