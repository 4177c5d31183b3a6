"""Process-wide state that a candidate must leave alone: settings, current stream or device of
torch, and functions replaced from Python; not what native code changes."""

from __future__ import annotations

import builtins
import ctypes
import os
import threading
import time
from collections.abc import Iterator, Mapping

import torch
from torch.utils._device import DeviceContext

from kernels_eval.model.lazy_compiler import wrap_compile, wrap_manual_seed

wrap_compile()
wrap_manual_seed()  # before the functions that are watched are noted
_WATCHED: Mapping[str, tuple[object, str]] = {
    "time": (
        time,
        "perf_counter perf_counter_ns time time_ns monotonic monotonic_ns process_time sleep",
    ),
    "torch": (
        torch,
        "allclose equal isclose manual_seed no_grad empty empty_like zeros randn rand isfinite"
        " isnan",
    ),
    "torch.Tensor": (
        torch.Tensor,
        "__eq__ __ne__ clone detach contiguous numel view copy_ data_ptr to abs all",
    ),
    "torch.cuda": (torch.cuda, "synchronize Event Stream current_stream stream"),
    "torch.cuda.Event": (torch.cuda.Event, "record elapsed_time synchronize query wait"),
    "torch.testing": (torch.testing, "assert_close"),
    "builtins": (builtins, "open type isinstance sum all any len getattr setattr"),
}
_ORIGINAL = {
    (home, name): getattr(owner, name)
    for home, (owner, names) in _WATCHED.items()
    for name in names.split()
}
OWN_OF_TORCH = ("aten.", "prim.", "prims.")
"""Prefixes of torch's own operators' names."""
_ORIGINAL_BASES = (torch.Tensor.__mro__, torch.nn.Module.__mro__, torch.nn.Module.__call__)
CUDA_LIMIT_PERSISTING_L2 = 6  # cudaLimitPersistingL2CacheSize


def snapshot(device: str) -> dict[str, str]:
    """Every watched setting now, but for `replaced_operators`, which takes 50 ms."""
    now = {
        "default_dtype": str(torch.get_default_dtype()),
        "default_device": str(torch.get_default_device()),
        "threads": str(torch.get_num_threads()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "grad_mode": str(torch.is_grad_enabled()),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "tf32": f"{torch.backends.cuda.matmul.allow_tf32} {torch.backends.cudnn.allow_tf32}",
        "cudnn": f"{torch.backends.cudnn.benchmark} {torch.backends.cudnn.enabled}",
        "environment": str(sorted(os.environ.items())),
        "python_threads": str(threading.active_count()),
        "patched": ", ".join(patched()),
        "modes": f"{torch._C._len_torch_dispatch_stack()} {_function_modes()}",
    }
    if device.startswith("cuda"):
        now["current_device"] = str(torch.cuda.current_device())
        now["current_stream"] = str(torch.cuda.current_stream().cuda_stream)
        now["persisting_l2"] = str(_persisting_l2())
    return now


def patched() -> list[str]:
    """Watched functions of torch, time and Python that changed since this module was imported."""
    names = [
        f"{home}.{name}"
        for (home, name), original in _ORIGINAL.items()
        if not _is(getattr(_WATCHED[home][0], name, None), original)
    ]
    if (torch.Tensor.__mro__, torch.nn.Module.__mro__, torch.nn.Module.__call__) != _ORIGINAL_BASES:
        names.append("torch.nn.Module")
    return names


def _function_modes() -> int:
    stack = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return sum(type(mode) is not DeviceContext for mode in stack)


def replaced_operators() -> int:
    """How many of torch's operators and fallback tables changed since import, beside what torch
    registers itself on use.
    """
    return sum(
        _own_lines(text) != _own_lines(_REGISTERED.get(name, ""))
        for name, text in _registrations()
        if hash(text) != _HASHES.get(name)
    )


def _registrations() -> Iterator[tuple[str, str]]:
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(("aten::", "prim::")) or name.partition(".")[0] in _PRIMS:
            yield name, str(torch._C._dispatch_dump(name))
    for name in FALLBACKS:
        yield f"{name}, all", str(torch._C._dispatch_dump_table(name))


def _own_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith(("Meta", "FuncTorchBatched"))]


_PRIMS = frozenset(
    name.partition(".")[0]
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("prims::")
)
FALLBACKS = ("aten::nonzero", "aten::is_leaf")
"""Operators whose tables show fallbacks: of backends, and of everything else."""
_REGISTERED = dict(_registrations())
# Comparing these touches no text in a forked process, which would copy its page.
_HASHES = {name: hash(text) for name, text in _REGISTERED.items()}


def _is(now: object, original: object) -> bool:
    return now is original or (type(now) is type(original) and now == original)


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Settings that differ, as "before -> after" (of the environment only that it changed)."""
    return {
        name: "changed" if name == "environment" else f"{value} -> {after.get(name)}"
        for name, value in before.items()
        if after.get(name) != value
    }


def _persisting_l2() -> int:
    """Bytes of L2 set aside for persisting accesses; -1 where unknown."""
    value = ctypes.c_size_t()
    for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so"):
        try:
            get = ctypes.CDLL(name).cudaDeviceGetLimit
            if get(ctypes.byref(value), CUDA_LIMIT_PERSISTING_L2) == 0:
                return value.value
        except (OSError, AttributeError):
            continue
    return -1
