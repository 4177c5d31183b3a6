"""The stack that a line needs to run every night, as processes of this machine: a Prefect server, a worker, an MLflow server, a Ray head.

`control.py` is what the commands call; `supervisor.py` is the process that keeps the four alive.
"""
