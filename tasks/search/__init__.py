"""Candidates that improve: parameters, flags, rewrites and crosses, searched by evolution."""
