"""`concur doctor`: what counts as missing depends on the profile, and every missing thing comes
with the line that fixes it."""

import os
import re
import sys
from importlib import metadata

import pytest

from flows import doctor
from flows.cli.pages import of_doctor
from flows.doctor import Check, examine, runs
from kernels_eval.compile.cache import BuildCache
from kernels_eval.errors import UsageError
from kernels_eval.installation import install_command
from kernels_eval.source.spec import Build
from tasks.synthesis.config import SynthesisConfig
from tests.support.typed import invoked


@pytest.fixture
def quick(monkeypatch):
    """Questions that start processes are answered at once; the profile's needs are what these tests
    are about."""
    monkeypatch.setattr(
        doctor, "ask", lambda command, **_: "yes" if "torch" in command[-1] else None
    )
    monkeypatch.setattr(doctor.ready, "checks", lambda *_: ())  # tests/flows/test_ready.py
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CONCUR_VLLM_PYTHON", raising=False)


def examined(profile="local", *overrides):
    checks = examine(profile, overrides)
    found = {check.name: check for check in checks}
    assert len(found) == len(checks) >= 12
    for check in checks:
        assert check.found and bool(check.fix) is not check.ok, check
    return found


def refused(look, *arguments):
    with pytest.raises(UsageError) as caught:
        look(*arguments)
    return caught.value


EVERYWHERE = "Python,torch,torch device,C++ compiler,ray,prefect,trl,disk,mlflow"


@pytest.mark.parametrize(
    "profile, override, names, need",
    [
        ("local", "name=mine", EVERYWHERE, "required"),
        ("local", "name=mine", "nvcc,compute-sanitizer,GPUs,vLLM,isolation", "optional"),
        ("local", "tracking.enabled=false", "mlflow", "optional"),
        ("local", "synthesis.sampler=vllm", "vLLM", "required"),
        ("cuda", "name=mine", "nvcc,GPUs", "required"),
        ("cuda", "language=cpp", "GPUs", "optional"),
        ("paper", "name=mine", "nvcc,GPUs", "required"),
    ],
)
def test_what_is_required_follows_the_profile(quick, profile, override, names, need):
    found = examined(profile, override)
    assert {found[name].need for name in names.split(",")} == {need}


def test_a_gpu_that_is_hidden_is_missing_and_stops_only_who_needs_it(quick):
    cuda = examined("cuda")
    assert "--set language=cpp" in cuda["GPUs"].fix and not any(runs(cuda.values()).values())


@pytest.mark.parametrize(
    "missing, able",
    [
        ("", [True, True, True]),
        ("vLLM", [True, True, True]),
        ("trl", [True, True, False]),
        ("prefect", [True, False, False]),
        ("torch", [False, False, False]),
    ],
)
def test_what_lacks_stops_only_what_needs_it(missing, able):
    works = {"torch": "verify", "prefect": "refresh", "trl": "training", "vLLM": None}
    checks = [
        Check(name=name, found="x", ok=name != missing, need="required", work=work)
        for name, work in works.items()
    ]
    assert list(runs(checks).values()) == able


def test_without_trl_a_person_reads_that_verify_and_refresh_run(quick, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def absent(name):
        return metadata.version("no-such-trl" if name == "trl" else name)

    monkeypatch.setattr(doctor, "version", absent)
    done = invoked("doctor")
    head = [" ".join(line.split()) for line in done.stdout.split("\nchecks\n")[0].splitlines()]
    assert head[:3] == ["profile local", "verify yes", "refresh yes"]
    assert " ".join(head[3:]) == f"training no, trl: {install_command('train')}"
    assert done.exit_code == 1  # not all that the profile runs


def test_without_a_compiler_the_fix_is_said_and_what_waits_for_it(quick, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    page = " ".join(invoked("doctor").stdout.split("checks")[0].split())
    assert "verify no, C++ compiler: install one (Debian: apt-get install g++) or set CXX" in page
    assert page.endswith("refresh no, first what verify needs training no, first what verify needs")


def test_a_check_that_cannot_import_says_what_is_not_installed():
    def look():
        raise ModuleNotFoundError("No module named 'anyio'", name="anyio")

    found = doctor.check_of(doctor.Probe("models", "refresh", look))
    assert (found.found, found.fix) == ("anyio: not installed", install_command("line"))


def test_a_package_that_is_not_installed_comes_with_its_install_line(quick, monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: metadata.version(f"no-such-{name}"))
    missing = examined()["ray"]
    assert (missing.found, missing.fix) == ("not installed", install_command("batch"))
    monkeypatch.undo()
    assert doctor.package("ray") == metadata.version("ray")


def test_a_machine_without_a_compiler(quick, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = examined("local", f"root={tmp_path}")
    assert re.search(r"g\+\+|CXX", found["C++ compiler"].fix) and not runs(found.values())["verify"]


def test_torch_that_does_not_import_is_said_so(quick, monkeypatch):
    monkeypatch.setattr(doctor, "ask", lambda command, **_: None)
    found = examined()
    assert found["torch device"].found == "torch does not import"
    assert not runs(found.values())["verify"]


def test_a_full_disk_and_a_root_that_is_not_there_yet(monkeypatch, tmp_path):
    deep = tmp_path / "a" / "b"
    # it looks at what exists above, and makes nothing
    assert str(deep) in doctor.disk(str(deep)) and not deep.exists()
    monkeypatch.setattr(doctor, "FREE_DISK_GB", 10**9)
    assert "--set root=DIR" in refused(doctor.disk, str(tmp_path)).hint


@pytest.mark.parametrize(
    "program, answer",
    [("print('noise'); print('answer')", "answer"), ("raise SystemExit(3)", None), ("", None)],
)
def test_a_question_that_fails_is_no_answer(program, answer):
    assert doctor.ask([sys.executable, "-c", program]) == answer


def test_a_question_to_nobody_or_for_too_long_is_no_answer(tmp_path):
    assert doctor.ask([str(tmp_path / "gone")]) is None
    assert doctor.ask([sys.executable, "-c", "input()"], timeout_s=0.0) is None


def test_vllm_is_asked_in_its_own_environment(monkeypatch, tmp_path):
    """$CONCUR_VLLM_PYTHON names an interpreter; ours never imports vLLM."""
    interpreter = tmp_path / "python"
    named = SynthesisConfig(server={"command": f"{interpreter} serve"})
    interpreter.write_text("#!/bin/sh\necho 0.99.1\n")
    interpreter.chmod(0o755)
    monkeypatch.setenv("CONCUR_VLLM_PYTHON", str(interpreter))
    assert doctor.vllm(SynthesisConfig()) == "0.99.1"
    monkeypatch.setenv("CONCUR_VLLM_PYTHON", str(tmp_path / "gone"))
    with pytest.raises(UsageError, match="CONCUR_VLLM_PYTHON"):
        doctor.vllm(SynthesisConfig(sampler="vllm"))
    assert doctor.vllm(named) == "0.99.1", "the profile's comes first"
    monkeypatch.delenv("CONCUR_VLLM_PYTHON")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(UsageError, match="pip install vllm"):
        doctor.vllm(SynthesisConfig())
    interpreter.write_text("#!/bin/sh\nexit 1\n")
    assert refused(doctor.vllm, named).hint == "pip install vllm in its environment"


def test_a_fault_of_a_check_is_its_line(quick, monkeypatch, tmp_path):
    monkeypatch.setenv("CONCUR_VLLM_PYTHON", str(tmp_path / "gone"))
    assert "CONCUR_VLLM_PYTHON" in examined("local", "synthesis.sampler=vllm")["vLLM"].fix


def test_a_profile_that_cannot_be_read_is_an_error_not_a_check():
    with pytest.raises(UsageError, match="unknown key"):
        examine("local", ("rooot=x",))


def test_isolation_is_what_the_sandbox_itself_would_report():
    from kernels_eval.sandbox import layers

    summary, *absent = doctor.isolation()
    assert summary.found.split(", ") == layers.probe() and "fresh_process" in summary.found
    assert summary.need == "optional" and summary.ok is not bool(absent)
    names = [check.name.removeprefix("isolation ") for check in absent]
    assert names == list(layers.missing(layers.probe()))


def test_a_layer_that_is_missing_has_a_line_of_its_own_with_what_would_bring_it(monkeypatch):
    monkeypatch.setenv("CONCUR_ISOLATION_WITHOUT", "namespace:user,landlock")
    checks = {check.name: check for check in doctor.isolation()}
    assert "landlock" not in checks["isolation"].found
    assert "sysctl" in checks["isolation namespace:user"].fix
    assert "5.13" in checks["isolation landlock"].fix
    assert all(check.fix and not check.ok for check in checks.values())


def test_isolation_that_cannot_be_probed_is_not_called_sound(quick):
    (check,) = doctor.isolation()
    assert (check.ok, check.found) == (False, "not probed") and check.fix


def test_a_root_that_this_user_cannot_write(monkeypatch, tmp_path):
    # permissions do not stop root, so the answer is made
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    error = refused(doctor.disk, str(tmp_path / "theirs"))
    assert "not writable" in error.args[0] and "write permission" in error.hint


def test_the_build_cache_is_shown_with_its_size_and_limit(quick, monkeypatch, tmp_path):
    monkeypatch.setenv("CONCUR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CONCUR_CACHE_BYTES", str(3 * 10**9))
    cache = BuildCache(tmp_path / "cache")
    for key in ("aa", "bb"):
        cache.store(key, Build(ok=False, key=key, reason="build_failed"))
    shown = examined()["build cache"]
    said = f"about 2 builds, 0.0 GB, limit 3.0 GB, at {tmp_path / 'cache'}"
    assert (shown.ok, shown.found) == (True, said)
    monkeypatch.setenv("CONCUR_CACHE_BYTES", "0")
    assert "no limit" in examined()["build cache"].found
    monkeypatch.setenv("CONCUR_CACHE_BYTES", "3 GB")
    refused = examined()["build cache"]
    assert "CONCUR_CACHE_BYTES=3 GB" in refused.found and "bytes" in refused.fix


def test_the_page_says_what_a_check_is_needed_for_and_that_unknown_is_no_yes():
    checks = [
        Check(name=name, found=found, ok=True, need="required" if work else "optional", work=work)
        for name, found, work in (
            ("trl", "1.0", "training"),
            ("memory", "unknown: m is not on this machine", "training"),
            ("nvcc", "13.0", None),
        )
    ]
    data = {"profile": "p", "runs": {}, "checks": [check.model_dump() for check in checks]}
    lines = [line.split() for line in of_doctor(data).splitlines()]
    ends = {words[1]: words[-4:-1:2] for words in lines if words[:1] == ["│"]}
    assert ends == {
        "trl": ["yes", "training"],
        "memory": ["unknown", "training"],
        "nvcc": ["yes", "optional"],
    }
