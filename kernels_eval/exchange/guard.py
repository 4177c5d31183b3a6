"""A verified kernel behind a guard: the `__init__.py` of an exported package.

`Model` is the reference's module. A call runs the kernel where all is as verified: shapes, strides
and dtypes of inputs, values of non-tensors, parameters and buffers, constructor arguments, the
device's architecture, torch's default dtype, and the files. Any other call runs PyTorch's
operators, as do calls that need a gradient, under autocast, or inside torch.func.
`Model().fallback_reason(*inputs)` says why; else it is empty.

`torch.ops.{id}.forward(tensors)` is the kernel as an operator: inputs, parameters and buffers in
order; a list of contiguous outputs. It refuses to be differentiated. `certificate` is the verdict,
with its conditions.
"""

import hashlib
import importlib
import importlib.util
import json
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import cpp_extension

__all__ = ["Model", "certificate", "fallback_reason"]

ALIGNMENT = 64
"""Bytes: torch aligns memory so, and a kernel's vector loads may rely on it."""
HERE = Path(__file__).parent
certificate: dict[str, Any] = json.loads((HERE / "certificate.json").read_text(encoding="utf-8"))
_INPUTS: list[dict[str, Any]] = certificate["interface"]["inputs"]
_STATE: list[dict[str, Any]] = certificate["interface"]["state"]
_OUTPUTS: list[dict[str, Any]] = certificate["interface"]["outputs"]
_TENSORS = [form for form in _INPUTS if "dtype" in form]
_reference = importlib.import_module(".reference", __name__)
_Reference: Any = getattr(_reference, certificate["entry_point"])


def _arguments() -> tuple[list[object], dict[str, object]]:
    made = _reference.get_init_inputs()
    return (made[0], made[1]) if certificate["init_form"] == "args_kwargs" else (list(made), {})


@contextmanager
def _libraries() -> Iterator[None]:
    def provided(name: str, *_: object, **options: object) -> ModuleType | None:
        path = str(HERE / f"{name}.so")
        if not options.get("is_python_module", True):
            torch.ops.load_library(path)
            return None
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    before = {name: getattr(cpp_extension, name) for name in ("load", "load_inline")}
    vars(cpp_extension).update(dict.fromkeys(before, provided))
    try:
        yield
    finally:
        vars(cpp_extension).update(before)


@cache
def _module(kernel: bool, device: str) -> torch.nn.Module:
    args, kwargs = _arguments()
    with _libraries():
        made = importlib.import_module(".candidate", __name__).ModelNew if kernel else _Reference
        found: torch.nn.Module = made(*args, **kwargs).to(device)
    return found


@cache
def fallback_reason() -> str:
    """Why the kernel runs nowhere in this process; empty where it may."""
    for name, digest in certificate["files"].items():
        if hashlib.sha256((HERE / name).read_bytes()).hexdigest() != digest:
            return f"{name} is not the file that was verified"
    for name, here in {
        "torch": torch.__version__.rpartition("+")[0] or torch.__version__,
        "python": sysconfig.get_config_var("SOABI"),
        "machine": platform.machine(),
    }.items():
        if (wanted := certificate["built_for"][name]) not in (None, here):
            return f"it was built for {name} {wanted}, and this is {here}"
    if missing := set(certificate["built_for"]["cpu_flags"]) - set(cpu_flags()):
        return f"this processor lacks {', '.join(sorted(missing))}"
    try:
        if _names(_module(True, "cpu")) != _names(_module(False, "cpu")):
            return "the kernel's parameters are not those of the reference"
    except Exception as error:
        return f"the kernel does not load here: {error}"
    return ""


def cpu_flags() -> list[str]:
    """This processor's instruction sets, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])


def _state_of(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _names(module: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in _state_of(module)}


@cache
def _devices() -> tuple[torch.device, ...]:
    capability = certificate["built_for"]["capability"]
    if capability is None:
        return (torch.device("cpu"),)
    numbers = range(torch.cuda.device_count())
    fitting = [n for n in numbers if list(torch.cuda.get_device_capability(n)) == capability]
    return tuple(torch.device("cuda", number) for number in fitting)


def _difference(x: object, form: dict[str, Any], devices: tuple[torch.device, ...]) -> str:
    """How an input differs, or "". Tracing hides addresses: the operator rechecks."""
    if "dtype" not in form:
        same = type(x) is type(form["value"]) and x == form["value"]
        return "" if same else "has another value than was verified"
    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        return "is no plain tensor"
    assert isinstance(x, torch.Tensor)
    if x.layout is not torch.strided or x.is_nested or x.device not in devices:
        return "is on a device, or of a layout, that was not verified"
    if str(x.dtype) != form["dtype"] or list(x.shape) != form["shape"]:
        return "has another shape or dtype than was verified"
    if list(x.stride()) != form["stride"]:
        return "has strides that were not verified"
    if torch.compiler.is_compiling():
        return ""
    if x.storage_offset() or x.is_neg() or x.is_conj():
        return "is a view of another tensor"
    return "begins at an address that torch gives to none" if x.data_ptr() % ALIGNMENT else ""


def _first_difference(
    values: Sequence[object], forms: list[dict[str, Any]], devices: tuple[torch.device, ...]
) -> str:
    for x, form in zip(values, forms, strict=True):
        if found := _difference(x, form, devices):
            return f"{form['name']} {found}"
    return ""


def _apart(tensors: list[torch.Tensor]) -> str:
    """Why these tensors together cannot be the verified call, or ""."""
    if len(tensors) != len(_TENSORS) + len(_STATE):
        return "another number of tensors was verified"
    if len({x.device for x in tensors}) > 1:
        return "the tensors are on several devices"
    if torch.get_default_dtype() is not torch.float32:
        return "torch's default dtype is not the one that was verified"
    return ""


def _called(module: torch.nn.Module, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    left = iter(tensors)
    inputs = [next(left) if "dtype" in form else form["value"] for form in _INPUTS]
    state = {form["name"]: x for form, x in zip(_STATE, left, strict=True)}
    with torch.no_grad(), torch.cuda.device_of(tensors[0]):
        run: Callable[..., Any] = torch.func.functional_call
        found = run(module, state, tuple(inputs)) if state else module(*inputs)
    held = {x.untyped_storage().data_ptr() for x in tensors}
    leaves = list(found) if isinstance(found, list | tuple) else [found]
    return [
        x.clone(memory_format=torch.contiguous_format)
        if x.untyped_storage().data_ptr() in held
        else x.contiguous()
        for x in leaves
    ]


def _run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Kernel or reference. Raises RuntimeError under forward-mode derivatives, which it would
    lose.
    """
    if _forward_derivative():
        raise RuntimeError("the operator has no forward derivative: call Model")
    other = fallback_reason() or _apart(tensors)
    verified = not (other or _first_difference(tensors, [*_TENSORS, *_STATE], _devices()))
    return _called(_module(verified, str(tensors[0].device)), tensors)


_operator = torch.library.custom_op(
    f"{certificate['id']}::forward", _run, mutates_args=(), schema="(Tensor[] tensors) -> Tensor[]"
)


@_operator.register_fake
def _fake(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs without values, of the verified form: Model passes no others here."""
    verified = [(form["shape"], form["dtype"]) for form in (*_TENSORS, *_STATE)]
    if [(list(x.shape), str(x.dtype)) for x in tensors] != verified:
        raise NotImplementedError("the operator is traced for verified shapes alone: call Model")
    return [
        tensors[0].new_empty(form["shape"], dtype=getattr(torch, form["dtype"].partition(".")[2]))
        for form in _OUTPUTS
    ]


class Model(_Reference):
    """The task's module: the kernel where verified, else the reference. Constructor arguments
    default to the task's.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        verified = _arguments()
        if not args and not kwargs:
            args, kwargs = tuple(verified[0]), verified[1]
        super().__init__(*args, **kwargs)
        try:
            same = bool((list(args), kwargs) == verified)
        except Exception:  # of arguments that compare by their elements
            same = False
        other = "" if same else "the constructor's arguments are not those that were verified"
        self._never, self._devices = fallback_reason() or other, _devices()

    def fallback_reason(self, *inputs: object) -> str:
        """Why a call with these inputs runs the reference; empty where it runs the kernel."""
        if self._never or len(inputs) != len(_INPUTS):
            return self._never or "another number of inputs was verified"
        if found := _first_difference(inputs, _INPUTS, self._devices):
            return found
        tensors = self._tensors(inputs)
        state = tensors[len(_TENSORS) :]
        if found := _apart(tensors) or _first_difference(state, _STATE, self._devices):
            return found
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return "its gradient is asked for"
        if torch.is_autocast_enabled(self._devices[0].type):
            return "autocast is on"
        if self.training and any(True for _ in self.buffers()):
            return "training may change its buffers"
        if not self.training and "eval_mode_fails" in certificate["verdict"]["flags"]:
            return "only training mode was verified"
        return ""

    def _tensors(self, inputs: tuple[object, ...]) -> list[torch.Tensor]:
        given = [x for x in inputs if isinstance(x, torch.Tensor)]
        return [*given, *(tensor for _, tensor in _state_of(self))]

    def forward(self, *inputs: object, **named: object) -> object:
        if named or _transformed() or self.fallback_reason(*inputs):
            return super().forward(*inputs, **named)
        found = _operator(self._tensors(inputs))
        return found[0] if certificate["interface"]["structure"] == "." else tuple(found)


def _forward_derivative() -> bool:
    return bool(torch.autograd.forward_ad._current_level >= 0)


def _transformed() -> bool:
    return bool(torch._C._are_functorch_transforms_active()) or _forward_derivative()
