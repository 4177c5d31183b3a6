"""Other suites' forms of a task, a kernel and a verdict: one module a form, for the service, the
verifier's commands and the line alike."""
