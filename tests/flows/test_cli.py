"""The `concur` command as a user runs it: what it prints, how it exits, and what it leaves behind
when it refuses."""

import json
import os
from functools import partial

import pytest
import yaml
from click.testing import CliRunner

from flows.cli.common import exit_statuses
from flows.cli.main import main
from flows.config import profile_names
from kernels_eval.errors import DeviceError, GpuLostError, SandboxError, ToolchainError, UsageError
from tests.support import commands
from tests.support.programs import ADDS_ONE

FILES = {
    "task.py": ADDS_ONE,
    "net.py": ADDS_ONE.replace("class Model(", "class Net("),
    "candidate.py": "class ModelNew: pass\n",
    "cuda.py": "SOURCE = '__global__ void k() {}'\n",
    "broken.py": "class ModelNew(\n",
    "mine.yaml": "name: mine\nlanguage: fortran\n",
    "taken": "mine",
}

REFUSED = yaml.safe_load((commands.ROOT / "tests/data/refusals.yaml").read_text("utf-8"))

concur = partial(commands.concur, CUDA_VISIBLE_DEVICES="")
"""The command in a process of its own, on a machine that shows no GPU."""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current directory: only FILES are in it. No GPU is visible."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in list(os.environ):
        if name.startswith(commands.FOREIGN):
            monkeypatch.delenv(name)
    return tmp_path


@pytest.mark.parametrize("command, said", REFUSED.items())
def test_unusable_input_is_2_in_one_line_and_changes_nothing(here, command, said):
    done = CliRunner().invoke(main, command.split())
    lines = done.stderr.splitlines()
    assert (done.exit_code, done.stdout, len(lines)) == (2, "", 1), (done.output, done.exception)
    assert lines[0].startswith("error: ") and all(part in lines[0] for part in said)
    assert {path.name: path.read_text() for path in here.iterdir()} == FILES


def one_error_line(done):
    """The line on stderr of a command that refused: exactly one, no traceback, nothing on
    stdout."""
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(lines)) == (2, "", 1), (done.stdout, done.stderr)
    return lines[0]


def test_the_refusal_of_a_profile_names_them_all():
    assert set(REFUSED["run --profile zzz"]) == set(profile_names())


def test_a_process_refuses_as_the_function_does(tmp_path):
    line = one_error_line(concur("run", "--set", "verification.worker=2", cwd=tmp_path))
    assert line.startswith("error: ") and "did you mean verification.workers?" in line


@pytest.mark.parametrize(
    "command, said",
    [
        ("", ["Usage:"]),
        ("run --only training", ["refresh"]),
        ("verify a.py b.py --language rust", ["cpp", "cuda", "triton"]),
    ],
)
def test_no_arguments_and_wrong_arguments_say_how(command, said):
    done = CliRunner().invoke(main, command.split())
    assert done.exit_code == 2 and all(part in done.output for part in said)


NEEDED = {
    "publish": ["--out", "o"],
    "verify": ["task.py", "candidate.py"],
    "verify-batch": ["c", "--tasks", "t", "--out", "o"],
}


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "x"])
def test_every_number_of_an_option_is_finite(number):
    floats = [
        (name, option.opts[0])
        for name, command in main.commands.items()
        for option in command.params
        if "float" in str(option.type_descriptor.annotation)
    ]
    assert ("serve", "--drain-s") in floats
    for command, name in floats:
        done = CliRunner().invoke(main, [command, *NEEDED.get(command, ()), name, number])
        assert done.exit_code == 2 and f"Invalid value for '{name}'" in done.output


def test_a_port_that_is_none_is_refused():
    for port in ("0", "65536"):
        done = CliRunner().invoke(main, ["serve", "--port", port])
        assert done.exit_code == 2 and "Invalid value for '--port'" in done.output


def test_a_kernel_that_fails_is_a_verdict_and_exit_0(here):
    done = concur("verify", "task.py", "broken.py", "--json", cwd=here)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    found = (verdict["status"], verdict["reason"], verdict["timing"])
    assert found == ("compile_error", "syntax_error", None)


# -- doctor ----------------------------------------------------------------------------------------


def test_doctor_json_is_one_object_and_the_exit_status_agrees(tmp_path):
    done = concur("doctor", "--json", "--set", "root=out", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert set(report) == {"profile", "runnable", "runs", "checks"}
    assert report["profile"] == "local"
    required = [check["ok"] for check in report["checks"] if check["need"] == "required"]
    assert report["runnable"] is report["runs"]["training"] is all(required)
    assert done.returncode == (0 if report["runnable"] else 1)
    assert list(tmp_path.iterdir()) == []  # it looks and changes nothing


@pytest.mark.slow
def test_doctor_is_1_for_the_cuda_profile_without_a_gpu(tmp_path):
    done = concur("doctor", "--profile", "cuda", "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    gpus = next(check for check in report["checks"] if check["name"] == "GPUs")
    assert (report["runnable"], gpus["ok"], gpus["need"]) == (False, False, "required")
    assert "language=cpp" in gpus["fix"]


# -- the exit status of what goes wrong later ------------------------------------------------------


@pytest.mark.parametrize(
    "error, status",
    [(UsageError, 2), (DeviceError, 2), (GpuLostError, 1), (SandboxError, 1), (ToolchainError, 1)],
)
def test_input_is_2_and_the_machine_is_1(error, status, capsys):
    raised = error("unreadable", "mend it")
    with pytest.raises(SystemExit) as caught, exit_statuses():
        raise raised
    assert caught.value.code == status
    assert capsys.readouterr().err == f"error: {raised}\n" and "(mend it)" in str(raised)


def test_an_interrupt_is_130_and_a_bug_is_not_hidden(capsys):
    with pytest.raises(SystemExit) as caught, exit_statuses():
        raise KeyboardInterrupt
    assert caught.value.code == 130 and "rerun the same command" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError), exit_statuses():
        raise ZeroDivisionError


@pytest.mark.slow
def test_input_that_only_a_stage_can_refuse_is_2_as_well(tmp_path):
    """Found inside a flow run: Prefect hands the error through, and it still ends in one line that
    names the fix."""
    tasks = "tasks={source: files, location: gone.parquet}"
    done = concur("run", "--set", "root=out", "--set", tasks, cwd=tmp_path)
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert last.startswith("error: ") and "gone.parquet" in last
