"""The `concur` command as a user runs it: what it prints, how it exits, and what it leaves behind
when it refuses."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path

import pytest

from flows.cli.common import exit_statuses
from flows.config import profile_names
from kernels_eval.errors import DeviceError, GpuLostError, SandboxError, ToolchainError, UsageError
from tests.support import commands

TASK = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x + 1.0

def get_inputs():
    return [torch.randn(8, 8)]

def get_init_inputs():
    return []
"""


concur = partial(commands.concur, CUDA_VISIBLE_DEVICES="")
"""The command on a machine that shows no GPU; `cwd` is an empty directory."""


def one_error_line(done: subprocess.CompletedProcess[str]) -> str:
    """The line on stderr of a command that refused: exactly one, no traceback, nothing on
    stdout."""
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(lines)) == (2, "", 1), (
        done.returncode,
        done.stdout,
        done.stderr,
    )
    assert lines[0].startswith("error: ")
    return lines[0]


def test_an_unknown_key_is_2_and_names_the_nearest(tmp_path: Path) -> None:
    line = one_error_line(
        concur("run", "--set", "verification.worker=2", "--set", "root=out", cwd=tmp_path)
    )
    assert "verification.worker" in line and "did you mean verification.workers?" in line
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_profile_is_2_and_lists_those_there_are(tmp_path: Path) -> None:
    line = one_error_line(concur("run", "--profile", "zzz", cwd=tmp_path))
    assert all(name in line for name in profile_names())
    line = one_error_line(concur("doctor", "--profile", "lokal", cwd=tmp_path))
    assert "did you mean local?" in line


def test_a_profile_file_of_the_users_own_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine\nlanguage: fortran\n")
    line = one_error_line(concur("run", "--profile", "mine.yaml", cwd=tmp_path))
    assert "mine.yaml" in line and "language = 'fortran'" in line


@pytest.mark.parametrize("language", ["cuda", "triton"])
def test_a_language_without_its_device_is_2_before_any_work(tmp_path: Path, language: str) -> None:
    line = one_error_line(
        concur("run", "--set", f"language={language}", "--set", "root=out", cwd=tmp_path)
    )
    assert f"{language} kernels need an NVIDIA GPU" in line and "--set language=cpp" in line
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_a_root_that_is_a_file_is_2_and_the_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    line = one_error_line(concur("run", "--set", "root=out", cwd=tmp_path))
    assert "cannot write to root out" in line and "--set root=DIR" in line
    assert (tmp_path / "out").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("root", ["/proc/concur", "/dev/null/concur"])
def test_a_root_that_nobody_can_write_is_2(tmp_path: Path, root: str) -> None:
    line = one_error_line(concur("run", "--set", f"root={root}", cwd=tmp_path))
    assert f"cannot write to root {root}" in line
    assert list(tmp_path.iterdir()) == []


def test_no_arguments_and_wrong_arguments_say_how(tmp_path: Path) -> None:
    done = concur(cwd=tmp_path)
    assert done.returncode == 2 and "Usage:" in done.stdout + done.stderr
    done = concur("run", "--only", "training", cwd=tmp_path)
    assert done.returncode == 2 and "refresh" in done.stderr
    done = concur("verify", "a.py", "b.py", "--language", "rust", cwd=tmp_path)
    assert done.returncode == 2 and all(name in done.stderr for name in ("cpp", "cuda", "triton"))


# -- verify ----------------------------------------------------------------------------------------


def test_verify_on_a_task_without_model_is_2(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK.replace("class Model(", "class Net("))
    (tmp_path / "candidate.py").write_text("class ModelNew: pass\n")
    line = one_error_line(concur("verify", "task.py", "candidate.py", cwd=tmp_path))
    assert "task.py does not define Model" in line


def test_verify_of_a_file_that_is_not_there_is_2(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    line = one_error_line(concur("verify", "task.py", "gone.py", cwd=tmp_path))
    assert "cannot read gone.py" in line


def test_verify_in_cuda_without_a_gpu_is_2(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "candidate.py").write_text("class ModelNew: pass\n")
    line = one_error_line(
        concur("verify", "task.py", "candidate.py", "--language", "cuda", cwd=tmp_path)
    )
    assert "cuda" in line and "GPU" in line


def test_a_kernel_that_fails_is_a_verdict_and_exit_0(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "candidate.py").write_text("class ModelNew(\n")
    done = concur("verify", "task.py", "candidate.py", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert (verdict["status"], verdict["reason"], verdict["timing"]) == (
        "compile_error",
        "syntax_error",
        None,
    )


# -- doctor ----------------------------------------------------------------------------------------


def test_doctor_json_is_one_object_and_the_exit_status_agrees(tmp_path: Path) -> None:
    done = concur("doctor", "--json", "--set", "root=out", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert set(report) == {"profile", "runnable", "checks"} and report["profile"] == "local"
    assert report["runnable"] is all(
        check["ok"] for check in report["checks"] if check["need"] == "required"
    )
    assert done.returncode == (0 if report["runnable"] else 1)
    assert list(tmp_path.iterdir()) == []  # it looks and changes nothing


def test_doctor_is_1_for_the_cuda_profile_without_a_gpu(tmp_path: Path) -> None:
    done = concur("doctor", "--profile", "cuda", "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    gpus = next(check for check in report["checks"] if check["name"] == "GPUs")
    assert report["runnable"] is False
    assert (gpus["ok"], gpus["need"]) == (False, "required") and "language=cpp" in gpus["fix"]


# -- the exit status of what goes wrong later ------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("unreadable", "mend it"), 2),
        (DeviceError("no GPU", "mend it"), 2),
        (GpuLostError("gone", "mend it"), 1),
        (SandboxError("died", "mend it"), 1),
        (ToolchainError("broke", "mend it"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_input_is_2_and_the_machine_is_1(
    error: Exception, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught, exit_statuses():
        raise error
    assert caught.value.code == status
    assert capsys.readouterr().err == f"error: {error}\n" and "(mend it)" in str(error)


def test_an_interrupt_is_130_and_a_bug_is_not_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, exit_statuses():
        raise KeyboardInterrupt
    assert caught.value.code == 130 and "rerun the same command" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError), exit_statuses():
        raise ZeroDivisionError


@pytest.mark.slow
def test_input_that_only_a_stage_can_refuse_is_2_as_well(tmp_path: Path) -> None:
    """Found inside a flow run: Prefect hands the error through, and it still ends in one line that
    names the fix."""
    done = concur(
        "run",
        "--set",
        "root=out",
        "--set",
        "tasks={source: files, location: gone.parquet}",
        cwd=tmp_path,
    )
    assert done.returncode == 2, done.stderr
    assert (
        done.stderr.splitlines()[-1].startswith("error: ")
        and "gone.parquet" in done.stderr.splitlines()[-1]
    )
    assert done.stdout == ""
