"""`python -m flows.cli`: the `concur` command."""

from flows.cli.main import main

main()
