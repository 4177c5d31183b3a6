"""An accepted kernel as a package that anybody can import: the layout of Hugging Face's `kernels`
(huggingface/kernels, `docs/source/kernel-requirements.md`), with an operator of torch and a guard
(`kernels_eval.interchange.guard`, which becomes the package).

Guarantees: the kernel is verified again before it is packed, and the verdict that goes with it is
of the very libraries that are packed: those of a CUDA kernel, which do not count launches as the
verifier's own do, are verified once more; the digest of each file goes with it, too; the package
holds the task's program, to which the guard falls back.
Does not guarantee Hugging Face's limits on symbol versions, nor Python's stable ABI: elsewhere the
guard falls back, and says why.
"""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kernels_eval.build.extensions import Attempt, Builder
from kernels_eval.build.spec import ExtensionSpec
from kernels_eval.checks.trials import ArgumentForm, Interface
from kernels_eval.config import EvalConfig
from kernels_eval.devices import conditions, gpu_arch
from kernels_eval.errors import UsageError
from kernels_eval.evaluator import Evaluator
from kernels_eval.interchange import rendered
from kernels_eval.interchange.definitions import FLAT
from kernels_eval.records import Candidate, KernelTask, Language, Verdict, stable_hash
from kernels_eval.versions import PROTOCOL_VERSION

GUARD = Path(__file__).with_name("guard.py")


class _Shipped(Attempt):
    """A build without the counter of launches: its library needs nothing but torch and CUDA."""

    def _link(self, objects: Sequence[str]) -> list[str]:
        ours = ("-Wl,--wrap=", "-Wl,-rpath,")
        parts = super()._link(objects)
        return [x for x in parts if not x.startswith(ours) and "concur_launch" not in x]


def export_package(
    task: KernelTask,
    candidate: Candidate,
    interface: Interface,
    out: Path,
    *,
    config: EvalConfig | None = None,
    name: str | None = None,
    license: str = "unknown",
) -> dict[str, Any]:
    """Verify a candidate and write its package; returns a summary. Raises UsageError for a kernel
    that is not correct here, and a task that a guard cannot stand before; DeviceError and other
    EvalErrors as the evaluator does."""
    if interface.mutates or not FLAT.fullmatch(interface.structure):
        fault = f"{task.name} changes its inputs, or nests its outputs"
        raise UsageError(f"{fault}: no operator of torch can stand for it", "choose another task")
    if not any(form.dtype for form in interface.inputs):
        raise UsageError(f"{task.name} takes no tensor", "choose another task")
    plain = re.sub(r"[^a-z0-9]+", "-", (name or task.name).lower()).strip("-") or "kernel"
    plain = plain if plain[0].isalpha() else f"kernel-{plain}"
    config = config or EvalConfig()
    build = config.build.model_copy(update={"lite_headers": False})
    config = config.model_copy(update={"build": build})
    module = plain.replace("-", "_")
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held) / "package"
        (folder / module).mkdir(parents=True)
        verdict, specs = _verified(task, candidate, config, folder)
        identity = f"_{module}_{stable_hash([task.code, candidate.code])[:8]}"
        (folder / "reference.py").write_text(task.code, encoding="utf-8")
        (folder / "candidate.py").write_text(candidate.code or "", encoding="utf-8")
        certificate = {
            "id": identity,
            "entry_point": task.entry_point,
            "init_form": task.init_form,
            "task_id": task.task_id,
            "verdict": verdict.model_dump(mode="json"),
            "protocol": {"version": PROTOCOL_VERSION, "config": config.model_dump(mode="json")},
            "conditions": conditions(candidate.language).model_dump(mode="json"),
            "interface": _forms(interface),
            "built_for": _built_for(candidate.language, specs),
            "files": {path.name: _sha256(path).hex() for path in _files(folder)},
        }
        guard = GUARD.read_text(encoding="utf-8").replace("{id}", identity)
        (folder / "__init__.py").write_text(guard, encoding="utf-8")
        beside = rendered("beside.py.j2", id=identity)
        (folder / module / "__init__.py").write_text(beside, encoding="utf-8")
        _write_json(folder / "certificate.json", certificate)
        metadata = _metadata(plain, identity, license, candidate.language, folder)
        _write_json(folder / "metadata.json", metadata)
        target = out / "build" / _variant(candidate.language)
        shutil.copytree(folder, target)
    bounds = (t.speedup_lower, t.speedup_upper) if (t := verdict.timing) else (0.0, 0.0)
    known = {"name": plain, "license": license, "folder": out, "bounds": bounds}
    text = rendered("README.md.j2", **known, task=task, verdict=verdict, inputs=interface.inputs)
    (out / "README.md").write_text(text, encoding="utf-8")
    told = {"folder": str(out), "variant": target.name, "id": identity, "name": plain}
    return {**told, "speedup": verdict.speedup, "device": verdict.device, "task_id": task.task_id}


def _verified(
    task: KernelTask, candidate: Candidate, config: EvalConfig, folder: Path
) -> tuple[Verdict, list[ExtensionSpec]]:
    """The verdict of a correct candidate, and what it asks to build; the libraries that the verdict
    is of go to `folder`."""
    with Evaluator(candidate.language, config, cuda_arch=gpu_arch()) as evaluator:
        preparer = evaluator.preparer
        prepared = preparer.prepare(candidate, task)
        verdict = _correct(evaluator.run(task, candidate, prepared))
        specs = preparer.requested(candidate, task) if prepared.libraries else []
        if len({spec.name for spec in specs}) < len(specs):
            raise UsageError("two of its extensions have one name", "name each its own")
        with tempfile.TemporaryDirectory(dir=preparer.builder.work_root) as work:
            if any(spec.uses_cuda for spec in specs):
                made = {spec.key: _shipped(preparer.builder, spec, work) for spec in specs}
                prepared = prepared.model_copy(update={"libraries": made})
                verdict = _correct(evaluator.run(task, candidate, prepared))
            for spec in specs:
                shutil.copyfile(prepared.libraries[spec.key], folder / f"{spec.name}.so")
    return verdict, specs


def _correct(verdict: Verdict) -> Verdict:
    if verdict.correct_custom:
        return verdict
    raise UsageError(
        f"{verdict.candidate_id} is not correct here: {verdict.status.value}"
        f" ({verdict.reason.value}) {verdict.detail}",
        "export a kernel that `concur verify` finds correct on this machine",
    )


def _shipped(builder: Builder, spec: ExtensionSpec, work: str) -> str:
    place, limit = Path(work) / spec.name, builder.config.timeout_s
    made = _Shipped(spec, "full", place, builder.prepared, limit, builder.confine).build()
    if not made.ok:
        raise UsageError(f"extension {spec.name} does not build: {made.log[:500]}")
    return made.path


def _built_for(language: Language, specs: Sequence[ExtensionSpec]) -> dict[str, Any]:
    """What a process must be to run the kernel; None where it may be any."""
    from torch import __version__ as torch

    tuned = any(flag.startswith("-m") for spec in specs for flag in spec.extra_cflags)
    arch = gpu_arch() if language.needs_gpu else None
    return {
        "torch": torch.partition("+")[0] if specs else None,
        "python": sysconfig.get_config_var("SOABI") if specs else None,
        "machine": platform.machine() if specs else None,
        "cpu_flags": _cpu_flags() if tuned else [],
        "capability": [int(part) for part in arch.split(".")] if arch else None,
    }


def _cpu_flags() -> list[str]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])


def _variant(language: Language) -> str:
    """The build variant's name, as `kernels` reads it."""
    from torch import __version__ as torch

    if language.jit:
        return "torch-cuda"
    major, minor, *_ = torch.split(".")
    cuda = conditions(language).cuda.replace(".", "") if language.needs_gpu else ""
    backend = f"cu{cuda}" if cuda else "cpu"
    return f"torch{major}{minor}-cxx11-{backend}-{platform.machine()}-{sys.platform}"


def _metadata(
    name: str, identity: str, license: str, language: Language, folder: Path
) -> dict[str, Any]:
    backend: dict[str, Any] = {"type": "cpu"}
    if language.needs_gpu:
        backend = {"type": "cuda", "archs": [gpu_arch()]}
    digests = {
        path.relative_to(folder).as_posix(): base64.b64encode(_sha256(path)).decode()
        for path in _files(folder)
    }
    return {
        "name": name,
        "id": identity,
        "version": 0,
        "license": license,
        "python-depends": [],
        "backend": backend,
        "digest": {"algorithm": "sha256", "files": digests},
    }


def _forms(interface: Interface) -> dict[str, Any]:
    """The interface as the guard reads it: a tensor has no value, and what is none has no dtype."""

    def rows(forms: Iterable[ArgumentForm]) -> list[dict[str, Any]]:
        parts = ({"value"} if form.dtype else {"shape", "stride", "dtype"} for form in forms)
        return [form.model_dump(exclude=part) for form, part in zip(forms, parts, strict=True)]

    groups = {name: rows(getattr(interface, name)) for name in ("inputs", "state", "outputs")}
    return {**groups, "structure": interface.structure}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sha256(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
