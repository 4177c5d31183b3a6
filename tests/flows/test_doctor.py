"""`concur doctor`: what counts as missing depends on the profile, and every missing thing comes
with the line that fixes it."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from flows.ops import doctor
from flows.ops.doctor import Check, examine, runnable
from kernels_eval.build.cache import BuildCache
from kernels_eval.build.spec import Build
from kernels_eval.errors import UsageError
from tasks.synthesis.config import SynthesisConfig


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions that start processes are answered at once; the profile's needs are what these tests
    are about."""
    monkeypatch.setattr(
        doctor, "ask", lambda command, timeout_s=60.0: "answer" if "torch" in command[-1] else None
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CONCUR_VLLM_PYTHON", raising=False)


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def needs(checks: list[Check], *names: str) -> list[str]:
    return [by_name(checks)[name].need for name in names]


def test_every_check_has_a_name_of_its_own_and_a_fix_exactly_where_it_fails(quick: None) -> None:
    checks = examine("local")
    assert len(by_name(checks)) == len(checks) >= 12
    for check in checks:
        assert check.found
        assert bool(check.fix) is not check.ok, check


def test_what_is_required_follows_the_profile(quick: None, tmp_path: Path) -> None:
    required, optional = "required", "optional"
    everywhere = "Python,torch,torch device,C++ compiler,ray,prefect,trl,disk,mlflow".split(",")
    local = examine("local", (f"root={tmp_path}",))
    assert needs(local, *everywhere) == [required] * len(everywhere)
    assert needs(local, "nvcc", "GPUs", "vLLM", "isolation") == [optional] * 4
    assert needs(examine("local", ("tracking.enabled=false",)), "mlflow") == [optional]
    assert needs(examine("cuda"), "nvcc", "GPUs") == [required] * 2
    assert needs(examine("paper"), "nvcc", "GPUs") == [required] * 2


def test_a_gpu_that_is_hidden_is_missing_and_stops_only_who_needs_it(quick: None) -> None:
    cuda = examine("cuda")
    assert not by_name(cuda)["GPUs"].ok and not runnable(cuda)
    assert "--set language=cpp" in by_name(cuda)["GPUs"].fix
    assert by_name(examine("cuda", ("language=cpp",)))["GPUs"].need == "optional"


def test_only_what_is_required_decides() -> None:
    def check(ok: bool, need: doctor.Need) -> Check:
        return Check(name="x", found="y", ok=ok, need=need)

    assert runnable([check(True, "required"), check(False, "optional")])
    assert not runnable([check(True, "required"), check(False, "required")])


def test_a_package_that_is_not_installed_comes_with_its_install_line(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: metadata.version(f"no-such-{name}"))
    missing = by_name(examine("local"))["ray"]
    assert (missing.ok, missing.found) == (False, "not installed")
    assert missing.fix == "pip install 'ray[default]'"
    monkeypatch.undo()
    assert doctor.package("ray") == (metadata.version("ray"), "")


def test_a_machine_without_a_compiler(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    checks = examine("local", (f"root={tmp_path}",))
    compiler = by_name(checks)["C++ compiler"]
    assert not compiler.ok and not runnable(checks)
    assert "g++" in compiler.fix or "CXX" in compiler.fix


def test_torch_that_does_not_import_is_said_so(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "ask", lambda command, timeout_s=60.0: None)
    checks = examine("local")
    assert by_name(checks)["torch device"].found == "torch does not import" and not runnable(checks)


def test_a_full_disk_and_a_root_that_is_not_there_yet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / "a" / "b"
    # it looks at what exists above, and makes nothing
    assert str(deep) in doctor.disk(str(deep))[0] and not deep.exists()
    monkeypatch.setattr(doctor, "FREE_DISK_GB", 10**9)
    assert "--set root=DIR" in doctor.disk(str(tmp_path))[1]


def test_questions_that_fail_are_no_answer(tmp_path: Path) -> None:
    for program, answer in (
        ("print('noise'); print('answer')", "answer"),
        ("raise SystemExit(3)", None),
        ("", None),
    ):
        assert doctor.ask([sys.executable, "-c", program]) == answer
    assert doctor.ask([str(tmp_path / "gone")]) is None
    assert doctor.ask([sys.executable, "-c", "input()"], timeout_s=0.0) is None


def test_vllm_is_asked_in_its_own_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """$CONCUR_VLLM_PYTHON names an interpreter; ours never imports vLLM."""
    interpreter = tmp_path / "python"
    named = SynthesisConfig(server={"python": str(interpreter)})
    interpreter.write_text("#!/bin/sh\necho 0.99.1\n")
    interpreter.chmod(0o755)
    monkeypatch.setenv("CONCUR_VLLM_PYTHON", str(interpreter))
    assert doctor.vllm(SynthesisConfig()) == ("0.99.1", "")
    monkeypatch.setenv("CONCUR_VLLM_PYTHON", str(tmp_path / "gone"))
    with pytest.raises(UsageError, match="CONCUR_VLLM_PYTHON"):
        doctor.vllm(SynthesisConfig(sampler="vllm"))
    assert doctor.vllm(named) == ("0.99.1", ""), "the profile's comes first"
    monkeypatch.delenv("CONCUR_VLLM_PYTHON")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(UsageError, match="pip install vllm"):
        doctor.vllm(SynthesisConfig())
    interpreter.write_text("#!/bin/sh\nexit 1\n")
    assert doctor.vllm(named)[1] == f"{interpreter} -m pip install vllm"


def test_a_fault_of_a_check_is_its_line(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CONCUR_VLLM_PYTHON", str(tmp_path / "gone"))
    missing = by_name(examine("local", ("synthesis.sampler=vllm",)))["vLLM"]
    assert not missing.ok and "CONCUR_VLLM_PYTHON" in missing.fix and missing.need == "required"


def test_a_profile_that_cannot_be_read_is_an_error_not_a_check() -> None:
    with pytest.raises(UsageError, match="unknown key"):
        examine("local", ("rooot=x",))


def test_isolation_is_what_the_sandbox_itself_would_report() -> None:
    from kernels_eval.isolation import layers

    summary, *absent = doctor.isolation()
    assert summary.found.split(", ") == layers.probe() and "fresh_process" in summary.found
    assert summary.need == "optional" and summary.ok is not bool(absent)
    assert {check.name.removeprefix("isolation ") for check in absent} == set(
        layers.missing(layers.probe())
    )


def test_a_layer_that_is_missing_has_a_line_of_its_own_with_what_would_bring_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CONCUR_ISOLATION_WITHOUT", "namespace:user,landlock")
    checks = by_name(doctor.isolation())
    assert not checks["isolation"].ok and "landlock" not in checks["isolation"].found
    assert (
        "sysctl" in checks["isolation namespace:user"].fix
        and "5.13" in checks["isolation landlock"].fix
    )
    assert all(check.fix and not check.ok for check in checks.values())


def test_isolation_that_cannot_be_probed_is_not_called_sound(quick: None) -> None:
    (check,) = doctor.isolation()
    assert (check.ok, check.found) == (False, "not probed") and check.fix


def test_a_root_that_this_user_cannot_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(
        os, "access", lambda path, mode: asked.append(path) or False
    )  # permissions do not stop root, so the answer is made
    found, fix = doctor.disk(str(tmp_path / "theirs"))
    assert "not writable" in found and "write permission" in fix
    assert asked == [tmp_path]


def test_the_build_cache_is_shown_with_its_size_and_limit(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CONCUR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CONCUR_CACHE_BYTES", str(3 * 10**9))
    cache = BuildCache(tmp_path / "cache")
    for key in ("aa", "bb"):
        cache.store(key, Build(ok=False, key=key, reason="build_failed"))
    shown = by_name(examine("local"))["build cache"]
    assert (
        shown.ok and shown.found == f"about 2 builds, 0.0 GB, limit 3.0 GB, at {tmp_path / 'cache'}"
    )
    monkeypatch.setenv("CONCUR_CACHE_BYTES", "0")
    assert "no limit" in by_name(examine("local"))["build cache"].found
    monkeypatch.setenv("CONCUR_CACHE_BYTES", "3 GB")
    refused = by_name(examine("local"))["build cache"]
    assert not refused.ok and "CONCUR_CACHE_BYTES=3 GB" in refused.found and "bytes" in refused.fix
