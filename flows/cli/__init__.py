"""The `concur` command, one module a command group."""
