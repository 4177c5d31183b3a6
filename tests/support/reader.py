"""A reader of the pages: a clone of this checkout, and a shell in it that commands are typed into.

Guarantees: the clone holds what git tracks and has an origin to pull from; pip finds no index, but
what is installed here; profiles are those of the clone, made small; servers have free ports; no
command reaches a daemon, bus or cluster of whoever runs the tests; nothing that a command started
is left.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import uuid
from contextlib import contextmanager
from pathlib import Path

import psutil
import yaml

from tests.support.commands import ROOT, environment
from tests.support.doc_commands import fences
from tests.support.processes import processes_with
from tests.support.servers import free_ports, logged, two_ports

LONGEST_S = 1800
MARK = "CONCUR_TEST_READER"
NOWHERE = {
    "DOCKER_HOST": "unix:///nowhere",
    "KUBECONFIG": "/nowhere",
    "DBUS_SESSION_BUS_ADDRESS": "unix:path=/nowhere",
    "DBUS_SYSTEM_BUS_ADDRESS": "unix:path=/nowhere",
}
OF_THE_USER = ("PYTHONPATH", "XDG_RUNTIME_DIR", "KUBERNETES_SERVICE_HOST")
PYTHON = """#!/bin/sh
# the venv that it makes finds what is installed here
{base} "$@" || exit
for site in .venv/lib/python3*/site-packages; do
    rm -rf "$site"/*
    echo {here} > "$site/here.pth"
done
"""
CONCUR = """#!/bin/sh
# on ports of its own
case "$1 $*" in
    "up "*) set -- "$@" --prefect-port={} --mlflow-port={} --ray-port={} ;;
    "serve "*--port*) ;;
    "serve "*) set -- "$@" --port={} ;;
esac
exec {folder}/.venv/concur "$@"
"""
SCRIPT = """#!{python} -P
from importlib.metadata import entry_points
entry_points(group="console_scripts")["{name}"].load()()
"""
"""What pip writes for a package that it installs."""
SMALL = {
    "tasks": {"limit": 2},
    "synthesis": {"samples_per_task": 2},
    "verification": {"eval": {"timing": {"max_s": 0.1}}},
    "curation": {"if_empty": "shortest"},
    "training": {"num_epochs": 3},
    "benchmark": {
        "tasks": {"source": "bundled", "split": "heldout", "limit": 1},
        "samples_per_task": 2,
        "sampling": {"temperature": 0.8, "max_tokens": 32},
    },
    "search": {"tasks": 1, "patience": 4, "rounds": 2},
}


class Reader:
    """A shell in a folder, whose variables last from one command to the next."""

    def __init__(self, folder, variables):
        self.folder, self.variables = folder, variables

    def type(self, text):
        """What a command prints, which must succeed."""
        said, status = self._type(text)
        assert status == 0, (text, said[-4000:])
        return said

    def refuse_all(self, commands, **fill):
        """Type commands, each of which must end with a status that is not 0, and say why: a
        regular expression."""
        for text, why in commands.items():
            if text.endswith("&"):
                text += " wait $!"
            said, status = self._type(filled(text, fill))
            found = re.search(why, " ".join(said.split()))
            assert status and found, (text, why, status, said[-4000:])

    def _type(self, text):
        """What a command prints, and its exit status."""
        with tempfile.TemporaryDirectory() as kept:
            script = f"{text}\nstatus=$?\nenv -0 > {kept}/variables\nexit $status\n"
            with open(f"{kept}/printed", "wb") as printed:
                done = subprocess.run(
                    ["bash", "-c", script],
                    cwd=self.folder,
                    env=self.variables,
                    timeout=LONGEST_S,
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            said = Path(kept, "printed").read_text(errors="replace")
            found = Path(kept, "variables").read_text().rstrip("\0").split("\0")
        self.variables = dict(each.split("=", 1) for each in found)
        return said, done.returncode

    def type_all(self, commands, **fill):
        """Type commands, each of which must print what is beside it, in one line or several."""
        for text, said in commands.items():
            printed = " ".join(self.type(filled(text, fill)).split())
            assert said in printed, (text, said, printed[-4000:])

    def running(self, text):
        """A command that runs until the block ends."""
        return logged(
            ["bash", "-c", f"exec {text}"],
            self.folder / "server.log",
            cwd=self.folder,
            env=self.variables,
            stdin=subprocess.DEVNULL,
        )

    def beside(self, folder):
        """The same shell in an empty folder, with the same packages and the pages' files."""
        (folder / ".venv").symlink_to(self.folder / ".venv")
        write_what_pages_say(folder)
        return Reader(folder, dict(self.variables))


def filled(text, values):
    """A command with these values in place of its placeholders."""
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text


@contextmanager
def cloned(place):
    """A reader in a fresh clone, PLACE/clone, of PLACE/origin."""
    origin, clone, programs = (place / name for name in ("origin", "clone", "bin"))
    copy_tracked(origin)
    for name in ("local", "ablation"):
        make_small(origin / f"deployments/profiles/{name}.yaml")
    programs.mkdir()
    here = sysconfig.get_path("purelib")
    write_program(programs / "python3", PYTHON.format(base=sys._base_executable, here=here))
    write_program(programs / "python3.11", f'#!/bin/sh\nexec {sys._base_executable} "$@"\n')
    # not below the others: a socket's path is short
    with tempfile.TemporaryDirectory(prefix="concur_pages-") as short:
        mark, name = uuid.uuid4().hex, "a reader"
        variables = environment(
            CUDA_VISIBLE_DEVICES="",
            PATH=f"{clone}/.venv/bin:{programs}:{os.environ['PATH']}",
            COLUMNS="200",
            BROWSER="true",
            PIP_NO_INDEX="1",
            PIP_NO_BUILD_ISOLATION="0",
            RAY_TMPDIR=short,
            GIT_AUTHOR_NAME=name,
            GIT_COMMITTER_NAME=name,
            GIT_AUTHOR_EMAIL=f"{mark}@localhost",
            GIT_COMMITTER_EMAIL=f"{mark}@localhost",
            **NOWHERE,
            **{MARK: mark},
        )
        for name in OF_THE_USER:
            variables.pop(name, None)
        Reader(origin, variables).type("git init -q . && git add . && git commit -q -m first")
        Reader(place, variables).type("git clone -q origin clone")
        try:
            yield Reader(clone, variables)
        finally:
            while left := processes_with(MARK, mark):
                for process in left:
                    process.kill()
                psutil.wait_procs(left, timeout=30)


def give_ports(reader):
    """Servers of an installed clone on free ports: those of Prefect, MLflow, Ray and `serve`."""
    ports = [*free_ports(2), two_ports(), *free_ports(1)]
    programs = reader.folder / ".venv/bin"
    (programs / "concur").rename(programs.parent / "concur")
    write_program(programs / "concur", CONCUR.format(*ports, folder=reader.folder))
    for name in ("prefect", "ray"):
        write_program(programs / name, SCRIPT.format(python=programs / "python", name=name))
    (programs.parent / ".installed").touch()  # as `make install` does
    return ports


def copy_tracked(folder):
    words = ["git", "ls-files", "-z"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, found.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def make_small(profile):
    """Few tasks, answers and steps; what the profile is for stays at its head."""
    text = profile.read_text(encoding="utf-8")
    about = [line for line in text.splitlines() if line.startswith("#")]
    small = merged(yaml.safe_load(text), SMALL)
    profile.write_text("\n".join([*about, yaml.safe_dump(small)]), encoding="utf-8")


def merged(values, more):
    """Values of a profile, with these in their places."""
    if not isinstance(more, dict):
        return more
    return values | {key: merged(values.get(key, {}), each) for key, each in more.items()}


def write_program(path, text):
    path.write_text(text)
    path.chmod(0o755)


def write_what_pages_say(place):
    """The files that the pages tell to write, but a package's, which is not for a clone."""
    for fence in fences():
        if fence.title and fence.title != "pyproject.toml":
            (place / fence.title).parent.mkdir(parents=True, exist_ok=True)
            (place / fence.title).write_text(fence.text, encoding="utf-8")
