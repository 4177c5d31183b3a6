"""The verifier over HTTP (extra `serve`): requests in, verdicts out."""
