"""What an install holds: the base verifies, an extra that is missing is named in one line, and the
wheel holds every file that the commands read."""

import json
import os
import re
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flows.cli.common import NEEDS
from flows.cli.main import main
from flows.extras import EXTRAS
from kernels_eval.installation import command_at, install_command
from tests.support import commands
from tests.support.audit import needed
from tests.support.doc_commands import fences

PROJECT = tomllib.loads((commands.ROOT / "pyproject.toml").read_text("utf-8"))["project"]
TIME_LIMITS = ("limits.run_s", "limits.load_s", "limits.reference_s", "build.timeout_s")
"""Seconds of a verification that a busy machine may exceed."""
NEEDY = {name: list(extras) for name, extras in NEEDS.items() if extras}

BLOCKED = """
import json, sys
blocked = set(json.loads(sys.argv.pop(1)))

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Finder())
from flows.cli.main import main
main()
"""
"""The command in a process where the modules of argv[1] are as if they were not installed."""


def modules_of(requirements):
    """The top-level modules of these distributions and of what they need here."""
    names = {canonicalize_name(Requirement(text).name) for text in requirements}
    for name in list(names):
        names |= needed(name, ()).keys()
    owners = metadata.packages_distributions()
    return {
        module
        for module, distributions in owners.items()
        if names & {canonicalize_name(each) for each in distributions}
    }


@pytest.fixture(scope="module")
def optional():
    """Every module that is installed here and would not be with the base alone."""
    ours = {"kernels_eval", "tasks", "flows"}
    return metadata.packages_distributions().keys() - modules_of(PROJECT["dependencies"]) - ours


def without(modules, *words, cwd, **env):
    script = [sys.executable, "-c", BLOCKED, json.dumps(sorted(modules)), *words]
    return commands.run(script, commands.environment(CUDA_VISIBLE_DEVICES="", **env), cwd)


def test_the_base_is_small(optional):
    extras = {module for extra in ("batch", "line", "train") for module in EXTRAS[extra]}
    assert extras <= optional and not {"torch", "numpy", "typer", "pydantic"} & optional


def test_every_extra_is_known_by_all_that_it_installs():
    for extra, modules in EXTRAS.items():
        found = [Requirement(text) for text in PROJECT["optional-dependencies"][extra]]
        names = {each.name.replace("-", "_") for each in found if each.name != "concur"}
        # torch brings fsspec
        assert names - {"fsspec"} == set(modules), extra
    assert {extra for needs in NEEDY.values() for extra in needs} <= EXTRAS.keys()


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "config show",
        *[
            pytest.param(words, marks=pytest.mark.slow)
            for words in ("--version", "verify --help", "profiles", "config schema")
        ],
    ],
)
def test_the_base_answers(optional, tmp_path, words):
    done = without(optional, *words.split(), cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_the_base_verifies(optional, tmp_path):
    task = (commands.ROOT / "tasks/sources/bundled/tasks/smooth_l1_rows.py").read_text("utf-8")
    (tmp_path / "task.py").write_text(task)
    (tmp_path / "candidate.py").write_text("class ModelNew(\n")
    done = without(optional, "verify", "task.py", "candidate.py", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["reason"] == "syntax_error"
    assert without(optional, "ls", "--root", ".", cwd=tmp_path).returncode == 0


@pytest.mark.slow
def test_doctor_says_of_the_base_what_is_missing(optional, tmp_path):
    done = without(optional, "doctor", "--json", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("checking"), done.stderr
    missing = {each["name"]: each["fix"] for each in json.loads(done.stdout)["checks"]}
    assert missing["tasks"].endswith(f"pip install '{commands.ROOT}[line]'")


ARGUMENTS = {
    "verify-batch": "c.parquet --tasks t --out o",
    "diff": "a b",
    "import": "source",
    "export": "--as kernelbench --out o",
    "publish": "--out o",
    "show": "abc",
}


def test_a_missing_extra_is_one_line_that_says_which(monkeypatch, tmp_path):
    """Every command that needs one, with nothing of any extra installed."""
    monkeypatch.setattr("flows.extras._installed", lambda module: False)
    monkeypatch.chdir(tmp_path)
    for name, needs in NEEDY.items():
        done = CliRunner().invoke(main, [name, *ARGUMENTS.get(name, "").split()])
        said = " and ".join(f"`{extra}`" for extra in needs)
        word = "extras" if needs[1:] else "extra"
        assert done.stderr == (
            f"error: `concur {name}` needs the {word} {said}: {install_command(*needs)}\n"
        )
        assert (done.exit_code, done.stdout, os.listdir()) == (2, "", [])


def test_one_extra_of_two_is_named_alone_for_this_interpreter_and_this_clone(tmp_path):
    done = without({"prefect", "mlflow"}, "run", cwd=tmp_path)
    install = f"{sys.executable} -m pip install '{commands.ROOT}[line]'"
    assert done.stderr == f"error: `concur run` needs the extra `line`: {install}\n"
    assert done.returncode == 2


def test_a_command_names_the_root_only_where_it_would_take_another(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CONCUR_ROOT", raising=False)
    usual = command_at("env", ".concur")
    assert usual.endswith("concur env") and command_at("env", tmp_path / ".concur") == usual
    assert command_at("env", "other") == f"{usual} --root other"
    assert command_at("env", "s3://bucket/.concur") == f"{usual} --root s3://bucket/.concur"
    monkeypatch.setenv("CONCUR_ROOT", str(tmp_path / ".concur"))
    assert command_at("env", ".concur") == usual
    monkeypatch.setenv("CONCUR_ROOT", "other")
    assert command_at("env", ".concur") == f"{usual} --root .concur"


def test_an_installed_copy_names_where_it_came_from(monkeypatch, tmp_path):
    """A package of this name on an index is a stranger's."""

    class Installed:
        def read_text(self, name):
            return '{"url": "file:///w/concur-0.1.0-py3-none-any.whl"}'

    monkeypatch.setattr("kernels_eval.installation.CHECKOUT", tmp_path)
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Installed())
    wheel = "'concur[line] @ file:///w/concur-0.1.0-py3-none-any.whl'"
    assert install_command("line") == f"{sys.executable} -m pip install {wheel}"


# -- the wheel -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout, unpacked as an installer does."""
    hatchling = pytest.importorskip("hatchling.build")
    place = tmp_path_factory.mktemp("wheel")
    before = Path.cwd()
    os.chdir(commands.ROOT)
    try:
        name = hatchling.build_wheel(str(place))
    finally:
        os.chdir(before)
    with zipfile.ZipFile(place / name) as archive:
        archive.extractall(place / "installed")
    return place / name


def test_the_wheel_holds_what_the_checkout_holds(wheel):
    root = commands.ROOT
    listed = commands.run(
        ["git", "ls-files", "kernels_eval", "tasks", "flows"], dict(os.environ), root
    )
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    data = {
        f"flows/{kind}/{path.name}"
        for kind in ("profiles", "strategies")
        for path in (root / "deployments" / kind).glob("*.yaml")
    }
    assert data and set(listed.stdout.split()) | data <= held
    assert not any(name.startswith(("tests/", "docs/")) for name in held)


def test_the_wheel_alone_answers_and_its_metadata_names_the_extras(wheel, optional, tmp_path):
    installed = wheel.parent / "installed"

    def typed(*words):
        return without(optional, *words, cwd=tmp_path, PYTHONPATH=str(installed))

    assert PROJECT["version"] in typed("--version").stdout
    assert "paper" in typed("profiles").stdout and not typed("config", "schema").stderr
    path = json.loads(typed("profiles", "--json").stdout)["profiles"][0]["path"]
    assert path.startswith(str(installed))
    (found,) = installed.glob("*.dist-info")
    told = (found / "METADATA").read_text("utf-8")
    assert set(EXTRAS) <= set(re.findall(r"^Provides-Extra: (\S+)$", told, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_in_a_fresh_environment_verifies_a_kernel(wheel, tmp_path):
    """What the README's first page says, with the wheel: install, then a verdict."""
    python = tmp_path / "venv/bin/python"
    env = commands.environment(CUDA_VISIBLE_DEVICES="", PYTHONPATH="")
    for words in (
        [sys.executable, "-m", "venv", tmp_path / "venv"],
        [python, "-m", "pip", "install", "-q", "-c", commands.ROOT / "constraints.txt", wheel],
    ):
        done = commands.run([str(word) for word in words], env, tmp_path)
        assert done.returncode == 0, done.stderr
    page = commands.ROOT / "README.md"
    (text,) = [each.text for each in fences() if (each.page, each.title) == (page, "candidate.py")]
    (tmp_path / "candidate.py").write_text(text)
    task = commands.ROOT / "tasks/sources/bundled/tasks/smooth_l1_rows.py"
    words = ["verify", str(task), "candidate.py", "--json"]
    words += [f"--set={limit}=600" for limit in TIME_LIMITS]
    done = commands.run([str(python.with_name("concur")), *words], env, tmp_path)
    assert json.loads(done.stdout)["status"] == "correct", done.stderr
    run = commands.run([str(python.with_name("concur")), "run"], env, tmp_path)
    assert f"{python} -m pip install 'concur[line,train] @ {wheel.as_uri()}'" in run.stderr
    assert run.returncode == 2
