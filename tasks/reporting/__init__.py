"""Reports for people and machines: content blocks, renderers, charts."""
