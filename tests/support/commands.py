"""`concur` as a user runs it: a process of its own, without settings of Prefect, MLflow or Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import flows

ROOT = Path(flows.__file__).parent.parent
CONCUR = (sys.executable, "-m", "flows.cli")
FOREIGN = ("PREFECT_", "MLFLOW_", "RAY_", "CONCUR_ROOT", "CONCUR_STACK_")


def environment(**more: str) -> dict[str, str]:
    """This process's environment for a command, without settings that other tests or a user
    made."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    quiet = {"PYTHONPATH": str(ROOT), "DO_NOT_TRACK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return clean | quiet | more


def run(
    words: list[str], env: dict[str, str], cwd: Path = ROOT, timeout_s: float = 900
) -> subprocess.CompletedProcess[str]:
    """A command that may not ask anything; its output is kept."""
    return subprocess.run(
        words,
        env=env,
        cwd=cwd,
        timeout=timeout_s,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def concur(*words: object, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `concur` with these arguments and further environment variables."""
    return run([*CONCUR, *map(str, words)], environment(**env), cwd)
