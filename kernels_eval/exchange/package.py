"""An accepted kernel as an importable package: the layout of Hugging Face's `kernels`
(huggingface/kernels, `docs/source/kernel-requirements.md`), an operator of torch and a guard. The
verdict is of the very libraries packed, verified again without launch counters."""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kernels_eval.compile.extensions import Attempt, Builder
from kernels_eval.config import EvalConfig
from kernels_eval.devices import conditions, gpu_arch
from kernels_eval.errors import UsageError
from kernels_eval.evaluator import Evaluator
from kernels_eval.exchange import rendered
from kernels_eval.exchange.definitions import FLAT
from kernels_eval.protocol import ArgumentForm, Interface
from kernels_eval.records import Candidate, KernelTask, Language, Verdict, stable_hash
from kernels_eval.sandbox.deaths import retried
from kernels_eval.sandbox.trees import named, temporary_tree
from kernels_eval.source.spec import ExtensionSpec
from kernels_eval.versions import PROTOCOL_VERSION

GUARD = Path(__file__).with_name("guard.py")


class _Shipped(Attempt):
    """A build without the launch counter: its library needs only torch and CUDA."""

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
) -> dict[str, object]:
    """Verify a candidate and write its package; returns a summary. Raises UsageError for a kernel
    that is not correct here, and a task that a guard cannot support; DeviceError and other
    EvalErrors as the evaluator does."""
    if interface.mutates or not FLAT.fullmatch(interface.structure):
        fault = f"{task.name} changes its inputs, or nests its outputs"
        raise UsageError(f"{fault}: no operator of torch can stand for it", "choose another task")
    if not any(form.dtype for form in interface.inputs):
        raise UsageError(f"{task.name} takes no tensor", "choose another task")
    plain = re.sub(r"[^a-z0-9]+", "-", (name or task.name).lower()).strip("-") or "kernel"
    plain = plain if plain[0].isalpha() else f"kernel-{plain}"
    module = plain.replace("-", "_")
    known = {
        "name": plain,
        "license": license,
        "id": f"_{module}_{stable_hash([task.code, candidate.code])[:8]}",
    }
    config = config or EvalConfig()
    build = config.build.model_copy(update={"lite_headers": False})
    config = config.model_copy(update={"build": build})
    target = out / "build" / _variant(candidate.language)
    with temporary_tree("package-") as held:
        folder = held / "package"
        folder.mkdir()
        verdict, specs = retried(lambda: _verified(task, candidate, config, folder))
        certificate = {
            "verdict": verdict.model_dump(mode="json"),
            "protocol": {"version": PROTOCOL_VERSION, "config": config.model_dump(mode="json")},
            "conditions": conditions(candidate.language).model_dump(mode="json"),
            "interface": _forms(interface),
            "built_for": _built_for(candidate.language, specs),
        }
        _fill(folder, module, task, candidate, certificate, known)
        shutil.copytree(folder, target)
    timing = verdict.timing
    text = rendered(
        "README.md.j2",
        **known,
        task=task,
        verdict=verdict,
        inputs=interface.inputs,
        bounds=(timing.speedup_lower, timing.speedup_upper) if timing else (0.0, 0.0),
        folder=out.name,
    )
    (out / "README.md").write_text(text, encoding="utf-8")
    return {
        **known,
        "variant": target.name,
        "speedup": verdict.speedup,
        "speedup_lower": timing and timing.speedup_lower,
        "speedup_upper": timing and timing.speedup_upper,
        "device": verdict.device,
        "folder": str(out),
        "task_id": task.task_id,
    }


def _fill(
    folder: Path,
    module: str,
    task: KernelTask,
    candidate: Candidate,
    certificate: Mapping[str, object],
    known: dict[str, str],
) -> None:
    def put(name: str, text: str) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")

    def put_json(name: str, value: object) -> None:
        put(name, json.dumps(value, indent=2, sort_keys=True) + "\n")

    put("reference.py", task.code)
    put("candidate.py", candidate.code or "")
    of_task = task.model_dump(mode="json", include={"task_id", "entry_point", "init_form"})
    digests = {path.name: _sha256(path).hex() for path in _files(folder)}
    put_json("certificate.json", {**of_task, **certificate, "id": known["id"], "files": digests})
    put("__init__.py", GUARD.read_text(encoding="utf-8").replace("{id}", known["id"]))
    put(f"{module}/__init__.py", rendered("beside.py.j2", id=known["id"]))
    put_json("metadata.json", known | _metadata(candidate.language, folder))


def _verified(
    task: KernelTask, candidate: Candidate, config: EvalConfig, folder: Path
) -> tuple[Verdict, list[ExtensionSpec]]:
    with Evaluator(candidate.language, config, cuda_arch=gpu_arch()) as evaluator:
        preparer = evaluator.preparer
        prepared = preparer.prepare(candidate, task)
        verdict = _correct(evaluator.run(task, candidate, prepared))
        specs = [*prepared.specs]
        if len({spec.name for spec in specs}) < len(specs):
            raise UsageError("two of its extensions have one name", "name each its own")
        with temporary_tree("ship-", preparer.builder.work_root) as work:
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


def _shipped(builder: Builder, spec: ExtensionSpec, work: Path) -> str:
    place, limit = work / spec.name, builder.config.timeout_s
    made = _Shipped(spec, "full", place, builder.prepared, limit, builder.confine).build()
    if not made.ok:
        raise UsageError(f"extension {spec.name} does not build: {made.log[:500]}")
    return made.path


def _built_for(language: Language, specs: Sequence[ExtensionSpec]) -> dict[str, object]:
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
    from torch import __version__ as torch

    if language.jit:
        return "torch-cuda"
    major, minor, *_ = torch.split(".")
    cuda = conditions(language).cuda.replace(".", "") if language.needs_gpu else ""
    backend = f"cu{cuda}" if cuda else "cpu"
    return f"torch{major}{minor}-cxx11-{backend}-{platform.machine()}-{sys.platform}"


def _metadata(language: Language, folder: Path) -> dict[str, object]:
    digests = {
        path.relative_to(folder).as_posix(): base64.b64encode(_sha256(path)).decode()
        for path in _files(folder)
    }
    gpu = {"type": "cuda", "archs": [gpu_arch()]}
    return {
        "version": 0,
        "python-depends": [],
        "backend": gpu if language.needs_gpu else {"type": "cpu"},
        "digest": {"algorithm": "sha256", "files": digests},
    }


def _forms(interface: Interface) -> dict[str, object]:
    def rows(forms: Iterable[ArgumentForm]) -> list[dict[str, object]]:
        parts = ({"value"} if form.dtype else {"shape", "stride", "dtype"} for form in forms)
        return [form.model_dump(exclude=part) for form, part in zip(forms, parts, strict=True)]

    groups = {name: rows(getattr(interface, name)) for name in ("inputs", "state", "outputs")}
    return {**groups, "structure": interface.structure}


def _files(folder: Path) -> list[Path]:
    return named(folder, "*")


def _sha256(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()
