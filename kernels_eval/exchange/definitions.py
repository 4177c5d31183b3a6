"""Our tasks and candidates as definitions and solutions of FlashInfer-Bench and SOL-ExecBench: our
programs, called by a `run`, with weights of one seed. Raises ValueError where their form cannot
hold a task."""

from __future__ import annotations

import re

from kernels_eval.exchange import rendered
from kernels_eval.exchange.flashinfer import (
    Definition,
    Solution,
    Suite,
    TensorSpec,
    Workload,
    WorkloadInput,
)
from kernels_eval.protocol import ArgumentForm, Interface
from kernels_eval.records import Candidate, KernelTask, stable_hash

DRAWN = ("float32", "float16", "bfloat16")
FLAT = re.compile(r"\.|\(\.(,\.)*\)")
"""Structures of outputs that are a tensor, or a flat list of them."""
INPUTS = "concur_inputs"


def definition_of(task: KernelTask, interface: Interface, suite: Suite) -> Definition:
    if not FLAT.fullmatch(interface.structure) or interface.mutates:
        raise ValueError("its outputs are nested, or it changes its inputs")
    names = [form.name for form in interface.inputs]
    if len(set(names)) < len(names) or not all(map(str.isidentifier, names)):
        raise ValueError("its inputs have no names of their own")
    if suite == "flashinfer" and (other := [x.name for x in interface.inputs if not _drawn(x)]):
        raise ValueError(f"input {other[0]!r} cannot be drawn as FlashInfer-Bench does")
    of_sol = suite == "sol"
    known = {"code": task.code, "task": task, "model": task.entry_point, "inputs_too": of_sol}
    sizes = {f"n{size}": {"type": "const", "value": size} for size in _sizes(interface)}
    row = {
        "name": file_name(task.task_id),
        "op_type": file_name(task.source),
        "axes": sizes,
        "inputs": {form.name: _spec(form) for form in interface.inputs},
        "outputs": {form.name: _spec(form) for form in interface.outputs},
        "reference": rendered("run.py.j2", names=names, **known),
        "description": task.name,
    }
    return Definition.model_validate(row | {"custom_inputs_entrypoint": INPUTS} if of_sol else row)


def workload_of(task: KernelTask, interface: Interface, suite: Suite) -> Workload:
    """The declared inputs, as drawn by the suite (FlashInfer-Bench) or by the task (SOL)."""
    kinds = {}
    for form in interface.inputs:
        if suite == "sol":
            kind: dict[str, object] = {"type": "custom"}
        elif form.dtype:
            kind = {"type": "random"}
        else:
            kind = {"type": "scalar", "value": form.value}
        kinds[form.name] = WorkloadInput.model_validate(kind)
    return Workload(axes={}, inputs=kinds, uuid=stable_hash([task.task_id, task.code]))


def solution_of(
    candidate: Candidate, task: KernelTask, interface: Interface, name: str, device: str
) -> Solution:
    program = f"\n_task = {{}}\nexec({task.code!r}, _task)\n"
    code = f"{candidate.code}{program}get_init_inputs = _task['get_init_inputs']"
    known = {"code": code, "task": task, "model": "ModelNew", "inputs_too": False}
    run = rendered("run.py.j2", names=[form.name for form in interface.inputs], **known)
    return Solution.model_validate(
        {
            "name": name,
            "definition": file_name(task.task_id),
            "author": candidate.generator or "unnamed",
            "spec": {
                "languages": [str(candidate.language) if candidate.language.jit else "python"],
                "target_hardware": [device or "cpu"],
                "entry_point": "main.py::run",
                "dependencies": [],
                "destination_passing_style": False,
            },
            "sources": [{"path": "main.py", "content": run}],
        }
    )


def written(record: Definition | Workload | Solution, suite: Suite) -> dict[str, object]:
    row = record.model_dump(mode="json", exclude_unset=True)
    if isinstance(record, Solution):
        spec, languages = row["spec"], row["spec"].pop("languages")
        if suite == "flashinfer":
            spec["language"] = languages[0]
        else:
            spec["languages"] = ["pytorch" if x == "python" else x for x in languages]
            spec["target_hardware"] = ["LOCAL"]
    return row


def _drawn(form: ArgumentForm) -> bool:
    if form.dtype is None:
        return form.value is not None and not isinstance(form.value, str)
    return form.dtype.removeprefix("torch.") in DRAWN


def _sizes(interface: Interface) -> list[int]:
    forms = (*interface.inputs, *interface.outputs)
    return sorted({size for form in forms for size in form.shape or ()})


def _spec(form: ArgumentForm) -> TensorSpec:
    kinds = {bool: "bool", int: "int64", float: "float32"}
    dtype = (form.dtype or kinds.get(type(form.value), "")).removeprefix("torch.")
    shape = None if form.shape is None else tuple(f"n{size}" for size in form.shape)
    return TensorSpec(shape=shape, dtype=dtype)


def file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text).strip(".")[:120] or "unnamed"
