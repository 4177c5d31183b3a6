"""`concur` as a user runs it: a process of its own, without settings of Prefect, MLflow or Ray."""

import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue

import psutil

import flows

ROOT = Path(flows.__file__).parent.parent
CONCUR = (sys.executable, "-m", "flows.cli")
FOREIGN = ("PREFECT_", "MLFLOW_", "RAY_", "CONCUR_ROOT", "CONCUR_STACK_")


def environment(**more):
    """This process's environment for a command, without settings that other tests or a user
    made."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    quiet = {"PYTHONPATH": str(ROOT), "DO_NOT_TRACK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return clean | quiet | more


def run(words, env, cwd=ROOT, timeout_s=900):
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


def concur(*words, cwd=ROOT, **env):
    """Run `concur` with these arguments and further environment variables."""
    return run([*CONCUR, *map(str, words)], environment(**env), cwd)


def start(*words, cwd, **env):
    """Start `concur` in a session of its own, its output in pipes."""
    return subprocess.Popen(
        [*CONCUR, *map(str, words)],
        cwd=cwd,
        env=environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


class Running:
    """`concur` in a session of its own, as in a terminal, its output read by lines as it comes."""

    def __init__(self, *words, cwd, **env):
        self.process = start(*words, cwd=cwd, **env)
        self.stderr, self._stdout, self._lines = [], [], Queue()
        self._readers = [
            threading.Thread(target=read, daemon=True)
            for read in (self._read_stderr, self._read_stdout)
        ]
        for reader in self._readers:
            reader.start()

    def _read_stderr(self):
        for line in self.process.stderr:
            self.stderr.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def _read_stdout(self):
        self._stdout.extend(self.process.stdout)

    @property
    def text(self):
        return "".join(self._stdout)

    def wait_for(self, pattern, timeout_s=600):
        """The match in the next line of stderr that has one. Fails where the command ends, or is
        silent for so long, before it."""
        with suppress(Empty):
            while (line := self._lines.get(timeout=timeout_s)) is not None:
                if found := re.search(pattern, line):
                    return found
        raise AssertionError(f"no line {pattern!r} in\n{''.join(self.stderr)[-4000:]}")

    def finish(self, timeout_s=900):
        status = self.process.wait(timeout=timeout_s)
        for reader in self._readers:
            reader.join(timeout=30)
        return status

    def below(self):
        return psutil.Process(self.process.pid).children(recursive=True)


def kill_tree(process):
    """SIGKILL to a command and to all that it had started, whichever group that is in (Ray's
    daemons, sandboxed children)."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    for child in children:
        if child.is_running():
            child.kill()
    psutil.wait_procs(children, timeout=30)


def tiny(name, *, tasks, training, benchmark, **more):
    """A profile of the whole line on bundled tasks and the small model, in seconds a stage. One
    worker and one builder: between two verdicts there is always time to be killed in."""
    bundled = {"source": "bundled"}
    recipe = {"base_model": "small", "max_length": 8192, "gradient_accumulation": 1}
    suite = {"tasks": bundled | {"split": "heldout", "limit": 1}, "samples_per_task": 2}
    quick = {"timing": {"max_s": 0.3}, "address_sanitizer": "off", "compute_sanitizer": ()}
    return {
        "name": name,
        "language": "cpp",
        "tasks": bundled | {"split": "train", "limit": tasks},
        "synthesis": {"sampler": "recorded", "tokenizer": "small", "samples_per_task": 2},
        "verification": {"workers": 1, "builders": 1, "eval": quick},
        "training": recipe | training,
        "benchmark": suite | benchmark,
        **more,
    }
