"""`concur verify` as a user runs it: what it prints and how it exits."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli.common import exit_statuses
from flows.cli.verdict import render
from flows.cli.verify import verify as command
from kernels_eval.languages import languages_of
from kernels_eval.records import Correctness, Language, Verdict
from kernels_eval.toolchain import default_cache
from kernels_eval.verify_file import read_pair
from tasks.sources import bundled
from tasks.synthesis.parsing import parse_response
from tests.support import kernels

ROOT = Path(kernels.__file__).parents[2]


def run(*arguments):
    command = [sys.executable, "-m", "flows.cli.main", "verify", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)


def verify(task, candidate, language=None, *, as_json=False, **options):
    """The same in this process, without a fork server of its own; returns the exit status."""
    asked = {"overrides": ["build.cuda_arch=null"], "language": language, **options}
    try:
        with exit_statuses():
            command(Path(task), Path(candidate), as_json=as_json, **asked)
    except SystemExit as ended:
        return ended.code
    return 0


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "task.py"
    path.write_text(kernels.AFFINE.code)
    return path


@pytest.fixture
def candidate(tmp_path):
    path = tmp_path / "candidate.py"
    path.write_text(kernels.module("return ext.shifted(x)"))
    return path


def test_json_is_exactly_one_object_for_a_kernel_that_is_wrong(
    task, candidate, capfd, judging_here
):
    assert verify(task, candidate, as_json=True) == 0
    printed = capfd.readouterr().out
    record = json.loads(printed)
    assert (record["status"], record["reason"], record["timing"]) == (
        "incorrect",
        "wrong_output",
        None,
    )
    assert printed.strip().count("\n") == 0
    assert Verdict.model_validate(record).task_id == "file/task"


def test_a_correct_kernel_reads_as_a_line_with_its_speedup(task, candidate):
    candidate.write_text(kernels.module("return ext.affine(x)"))
    done = run(task, candidate, "--progress", "--quick")
    assert done.returncode == 0, done.stderr
    stages = [line.split(" s  ", 1)[1] for line in done.stderr.splitlines()]
    assert stages[0] == "screen and build the cpp candidate"
    assert "time reference and candidate" in stages
    lines = done.stdout.splitlines()
    assert lines[0] == "correct (ok)"
    assert lines[1].startswith("  screened only")
    assert lines[2].startswith("  speedup ") and "95 % interval" in lines[2]
    assert any(
        re.search(r"custom kernels \(\d+\.\d% of its time\): affine", line) for line in lines
    )


UNFINISHED = '''import torch
from torch.utils.cpp_extension import load_inline

SOURCE = """
int unfinished() { return 1 }
"""
ext = load_inline("unfinished", cpp_sources=SOURCE, functions=["unfinished"])


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return ext.unfinished()
'''


@pytest.mark.parametrize(
    "text, place",
    [
        (kernels.module("raise ValueError('no')"), 'mine.py", line'),
        (UNFINISHED, "mine.py:5:"),
    ],
)
def test_a_fault_names_the_file_that_was_given(task, tmp_path, capfd, judging_here, text, place):
    """Not the judge's copy of it, which is `candidate.py`."""
    mine = tmp_path / "mine.py"
    mine.write_text(text)
    assert verify(task, mine) == 0
    page = capfd.readouterr().out
    assert place in page and "candidate.py" not in page, page


@pytest.mark.parametrize(
    "asked, status, said",
    [
        ({}, 0, ""),
        ({"check": True}, 1, "not passed: the candidate is incorrect\n"),
        ({"min_speedup": 2}, 1, "not passed: the candidate is incorrect\n"),
    ],
)
def test_the_exit_status_is_the_verdict_s_where_that_is_asked(
    task, candidate, capfd, judging_here, asked, status, said
):
    assert verify(task, candidate, **asked) == status
    assert capfd.readouterr().err == said


def test_a_slow_kernel_does_not_pass_a_speedup(task, candidate, capfd, judging_here):
    candidate.write_text(kernels.module("return ext.affine(x)"))
    assert verify(task, candidate, check=True, quick=True) == 0
    assert verify(task, candidate, min_speedup=1e6, quick=True) == 1
    assert "not passed: the speedup is " in capfd.readouterr().err


@pytest.mark.slow
def test_the_script_of_the_documentation_prints_the_verdict(task, candidate):
    page = (ROOT / "docs/how-to/verify-in-python.md").read_text(encoding="utf-8")
    script = candidate.parent / "evaluate.py"
    script.write_text(page.partition('title="evaluate.py"\n')[2].partition("```")[0])
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=candidate.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.stdout, done.stderr) == ("incorrect wrong_output 0.0\n", "")


@pytest.mark.slow
def test_folders_of_the_cache_may_be_links(task, candidate, tmp_path, monkeypatch):
    """On another disk, say. What compilers and children may read follows the links; else every
    kernel would be `build_failed`."""
    candidate.write_text(kernels.module("return ext.affine(x)"))
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    for folder in (cache, elsewhere):
        folder.mkdir()
    own = default_cache()
    (own / "headers").mkdir(parents=True, exist_ok=True)
    (cache / "headers").symlink_to(own / "headers")
    (cache / "extensions").symlink_to(elsewhere)
    monkeypatch.setenv("CONCUR_CACHE", str(cache))
    done = run(task, candidate, "--json")
    assert json.loads(done.stdout)["status"] == "correct", done.stdout
    assert list(elsewhere.rglob("*.so"))


def test_a_candidate_that_is_not_python_is_a_verdict(task, candidate, capsys):
    candidate.write_text("Here is your kernel:\n```python\nclass ModelNew: pass\n```\n")
    assert verify(task, candidate, as_json=True) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["status"], record["reason"]) == ("compile_error", "syntax_error")


@pytest.fixture
def refused(capsys):
    """What one line on stderr says of input that cannot be used."""

    def refused(*paths):
        assert verify(*paths) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1
        return err

    return refused


def test_a_task_without_a_model_names_file_cause_and_fix(task, candidate, refused):
    task.write_text("def get_inputs():\n    return []\n")
    said = refused(task, candidate)
    assert f"{task} does not define Model, get_init_inputs" in said
    assert "a task file defines class Model(nn.Module)" in said


def test_a_task_that_is_not_python_names_the_line(task, candidate, refused):
    task.write_text("class Model(:\n")
    said = refused(task, candidate)
    assert str(task) in said and "line 1" in said and "fix the task file" in said


def test_a_file_that_cannot_be_read_is_named(task, candidate, tmp_path, refused):
    said = refused(task, tmp_path / "nothing.py")
    assert "nothing.py" in said and "No such file" in said and "give the path" in said
    said = refused(tmp_path, task)
    assert str(tmp_path) in said and "Is a directory" in said
    candidate.write_bytes(b"\x7fELF\xff\xfe")
    said = refused(task, candidate)
    assert str(candidate) in said and "not UTF-8" in said


CUDA = """ext = load_inline(name="e", cpp_sources="void f();", cuda_sources=r'''
__global__ void k() {}
''')"""
TRITON = "import triton\n@triton.jit\ndef k(x): pass\n"
CPP = (
    "ext = load_inline(name='e', cpp_sources='// no __global__ here\\nint f();')\n# import triton\n"
)


@pytest.mark.parametrize(
    "source, languages",
    [
        (CUDA, ["cuda"]),
        ("load(name='e', sources=['k.cu'])", ["cuda"]),
        ("load_inline('e', '', '__global__ void k() {}')", ["cuda"]),
        (TRITON, ["triton"]),
        (CPP, ["cpp"]),
        (CPP.replace("cpp_sources", "cuda_sources='', cpp_sources"), ["cpp"]),
        (CPP.replace("cpp_sources", "cuda_sources=None, cpp_sources"), ["cpp"]),
        (kernels.module("return ext.affine(x)"), ["cpp"]),
        (CUDA + "\n" + TRITON, ["cuda", "triton"]),
        ("class ModelNew: pass", []),
        ("class ModelNew(: __global__ ```", ["cuda"]),
    ],
)
def test_the_language_is_read_from_the_source(source, languages):
    assert [language.value for language in languages_of(source)] == languages


def test_every_recorded_kernel_is_read_as_what_it_was_asked_for():
    seen = 0
    for task in bundled.load("train"):
        for language in Language:
            for response in bundled.responses(task.name, language.value):
                if code := parse_response(response).code:
                    assert languages_of(code) == (language,), (task.name, code)
                    seen += 1
    assert seen > 90


@pytest.mark.parametrize("source, name", [(CUDA, "cuda"), (TRITON, "triton")])
def test_a_gpu_kernel_without_a_gpu_says_so_and_a_contradiction_is_one_error(
    task, candidate, monkeypatch, capsys, source, name
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    candidate.write_text(source)
    for language in (None, name):
        assert verify(task, candidate, language) == 2
        said = capsys.readouterr().err
        assert f"candidate.py: {name} kernels need an NVIDIA GPU" in said
        assert "or choose cpp" in said and said.count("\n") == 1
    assert verify(task, candidate, "cpp") == 2
    said = capsys.readouterr().err
    assert f"is written in {name}, but --language says cpp (leave out --language)" in said


def test_two_languages_need_a_choice_and_none_is_said(task, candidate, monkeypatch, capsys):
    candidate.write_text(CUDA + "\n" + TRITON)
    assert verify(task, candidate) == 2
    assert "holds cuda and triton kernels (choose one with --language)" in capsys.readouterr().err
    candidate.write_text("class ModelNew: pass")
    said = []
    assert read_pair(str(task), str(candidate), None, said.append)[1].language is Language.CPP
    assert len(said) == 1 and "shows no language" in said[0] and "verified as cpp" in said[0]
    native = candidate.with_suffix(".cu")
    assert verify(task, native) == 2
    assert "candidate.cu is not a Python module" in capsys.readouterr().err


@pytest.mark.slow
def test_candidate_text_cannot_drive_the_terminal(task, candidate):
    candidate.write_text(kernels.module("raise ValueError('\\x1b[2J\\x1b]0;owned\\x07 wiped')"))
    done = run(task, candidate)
    assert done.returncode == 0 and "wiped" in done.stdout
    assert "\x1b" not in done.stdout and "\x07" not in done.stdout


@pytest.mark.parametrize(
    "source, reason, said",
    [
        ("\n", "no_code_block", "candidate.py is empty"),
        ("import torch  # ModelNew\n", "missing_model_new", "does not define ModelNew"),
        ("class Model: pass\n", "missing_model_new", "does not define ModelNew"),
    ],
)
def test_a_file_without_a_model_is_a_verdict_and_nothing_runs(
    task, candidate, capsys, monkeypatch, source, reason, said
):
    monkeypatch.setattr("subprocess.Popen", None)
    candidate.write_text(source)
    assert verify(task, candidate) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"no_code ({reason}): ") and said in printed.out
    assert "(write class ModelNew(nn.Module) with the arguments" in printed.out
    assert printed.err == ""


def test_an_error_is_printed_once_and_no_device_is_not_called_none():
    fields = {"candidate_id": "c", "task_id": "t", "language": "cpp"}
    numbers = {"trials": 7, "rms_error": 0.995, "reference_rms_error": 1e-7}
    wrong = Verdict(
        status="incorrect",
        reason="wrong_output",
        detail="relative RMS error 9.95e-01, worst element 3.32e+00 on declared inputs",
        correctness=Correctness(**numbers),
        device="cpu",
        **fields,
    )
    assert render(wrong).count("relative RMS error") == 1 and "  device cpu; build" in render(wrong)
    assert (
        render(wrong.model_copy(update={"detail": ""})).count("relative RMS error 9.95e-01 (") == 1
    )
    unbuilt = Verdict(status="compile_error", reason="build_failed", build_s=2.5, **fields)
    assert "device" not in render(unbuilt) and "build 2.5 s" in render(unbuilt)


def test_a_cached_build_is_told_from_one_that_took_time():
    finding = {"candidate_id": "c", "task_id": "t", "language": "cpp", "reason": "wrong_output"}
    built = Verdict(status="incorrect", build_tier="lite", build_s=17.5, **finding)
    assert "build 17.5 s, run" in render(built)
    assert "build cached, run" in render(built.model_copy(update={"build_cached": True}))
    rejected = built.model_copy(update={"build_tier": None})
    assert "build 17.5 s (nothing built)" in render(rejected)
    failed = {"status": "compile_error", "reason": "build_failed", "build_tier": "full"}
    unbuilt = Verdict(**finding | failed, build_s=20.6)
    assert "build 20.6 s (with all" in render(unbuilt)
