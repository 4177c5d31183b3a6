"""Memory that the reference's and a candidate's process both map: the only way in for inputs
(packed values) and out for outputs (bytes).

It is a sealed file, or on a GPU the reference process's device memory (CUDA's virtual memory API).
Copy before reading: the candidate may still be writing.
"""

from __future__ import annotations

import base64
import ctypes
import io
import mmap
import os
import pickle
import struct
from collections.abc import Callable, Sequence
from ctypes import byref
from types import ModuleType
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor

from kernels_eval.config import FENCE, FENCE_BYTES, SHARED_ALIGNMENT
from kernels_eval.model.values import as_tensor, is_array, map_tensors

ARRAY = "array"
"""Where an array of NumPy lies."""
_PINNED, _POSIX_FD, _DEVICE, _READ_WRITE = 1, 1, 1, 3


class HostMemory:
    """A file in memory, by its descriptor, which is closed."""

    def __init__(self, descriptor: int) -> None:
        self.size = os.fstat(descriptor).st_size
        mapping = mmap.mmap(descriptor, self.size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        os.close(descriptor)


class DeviceMemory:
    """Device memory of another process or of this one. Raises OSError where the driver refuses."""

    def __init__(self, size: int = 1, descriptor: int | None = None) -> None:
        """Allocate `size` shareable bytes, or map and close another process's descriptor."""
        torch.cuda.init()
        torch.empty(1, device="cuda")  # makes the primary context current
        mapping = _Mapping(size, descriptor)
        self.size, self.descriptor = mapping.size, mapping.descriptor
        # The tensors keep the mapping: it ends with the last of them.
        self.bytes = torch.as_tensor(mapping, device="cuda")


class _Mapping:
    def __init__(self, size: int, descriptor: int | None) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        location = struct.pack("ii", _DEVICE, torch.cuda.current_device())
        # CUmemAllocationProp: its type, that of handles, where, and what Windows and RDMA need
        prop = struct.pack("ii", _PINNED, _POSIX_FD) + location + bytes(16)
        granularity, none, start = ctypes.c_size_t(), ctypes.c_uint64(0), ctypes.c_size_t(0)
        self._call("GetAllocationGranularity", byref(granularity), prop, 0)
        self.size = -(-max(size, 1) // granularity.value) * granularity.value
        self._length, handle = ctypes.c_size_t(self.size), ctypes.c_uint64()
        exported = ctypes.c_int(-1)
        if descriptor is None:
            self._call("Create", byref(handle), self._length, prop, none)
            self._call("ExportToShareableHandle", byref(exported), handle, _POSIX_FD, none)
        else:
            shared = ctypes.c_void_p(descriptor)
            self._call("ImportFromShareableHandle", byref(handle), shared, _POSIX_FD)
            os.close(descriptor)
        self.descriptor = exported.value
        """For another process; -1 where the memory is another process's."""
        self._address = ctypes.c_uint64()
        access = location + struct.pack("i", _READ_WRITE)
        self._call("AddressReserve", byref(self._address), self._length, start, none, none)
        self._call("Map", self._address, self._length, start, handle, none)
        self._call("SetAccess", self._address, self._length, access, ctypes.c_size_t(1))
        self._call("Release", handle)  # the mapping keeps the memory
        self.__cuda_array_interface__ = {
            "shape": (self.size,),
            "typestr": "|u1",
            "data": (self._address.value, False),
            "version": 3,
        }

    def _call(self, name: str, *arguments: object) -> None:
        result = self._driver[f"cuMem{name}"](*arguments)
        if result:
            raise OSError(result, f"cuMem{name} failed with CUDA error {result}")

    def __del__(self) -> None:
        if hasattr(self, "__cuda_array_interface__"):
            self._driver.cuMemUnmap(self._address, self._length)
            self._driver.cuMemAddressFree(self._address, self._length)


Memory = HostMemory | DeviceMemory


def mapped(descriptor: int, *, on_device: bool, size: int = 0) -> Memory:
    """The memory of a descriptor, which is closed. `size` is needed on a device alone."""
    return DeviceMemory(size, descriptor) if on_device else HostMemory(descriptor)


# -- values ----------------------------------------------------------------------------------------


class _Packer(cloudpickle.Pickler):
    """Pickles a value with its tensors in memory from `base` on; without memory only counts
    bytes.
    """

    def __init__(self, file: io.BytesIO, memory: Memory | None, base: int) -> None:
        super().__init__(file)
        self.memory, self.base, self.used = memory, base, 0

    def persistent_id(self, value: object) -> object:
        place = ""
        if is_array(value):
            value, place = as_tensor(value), ARRAY
        if type(value) is not Tensor or value.layout is not torch.strided:
            return None
        place = place or value.device.type
        found = self.used, value.dtype, tuple(value.shape), value.stride(), place
        if self.memory is not None:
            (target,) = _views(self.memory, *found[:4], base=self.base)
            _fill(target, value.detach())
        # an expanded tensor may be a dense one in another draw
        self.used += padded(max(_span(value), value.numel()) * value.element_size())
        return found


class _Unpacker(pickle.Unpickler):
    def __init__(self, packed: bytes, views: Callable[[Any], list[Tensor]], index: int) -> None:
        super().__init__(io.BytesIO(packed))
        self.views, self.index = views, index

    def persistent_load(self, pid: Any) -> Any:
        found = self.views(pid)[self.index]
        if pid[-1] == ARRAY:
            return found.cpu().numpy()
        return found if found.device.type == pid[-1] else found.to(pid[-1])


def pack(value: object, memory: Memory | None, module: ModuleType, base: int = 0) -> Packed:
    """A value as text for any process, its tensors in `memory` from byte `base` on (dtypes, shapes
    and strides kept), definitions of `module` by value. Raises what pickle raises.
    """
    cloudpickle.register_pickle_by_value(module)
    file = io.BytesIO()
    packer = _Packer(file, memory, base)
    packer.dump(value)
    return Packed(base64.b64encode(file.getvalue()).decode("ascii"), packer.used)


class Packed(NamedTuple):
    """A value without its tensors, and the bytes that these take."""

    text: str
    bytes: int


def unpack(packed: Sequence[str], memory: Memory, count: int = 1, stride: int = 0) -> list[Any]:
    """This many values, tensors in `memory` at multiples of `stride`; the last text repeats. Only
    for what the trusted side packed.
    """
    texts = [base64.b64decode(text) for text in packed]
    made: dict[Any, list[Tensor]] = {}

    def views(pid: Any) -> list[Tensor]:
        if pid not in made:
            made[pid] = _views(memory, *pid[:4], count=count, step=stride)
        return made[pid]

    last = len(texts) - 1
    return [_Unpacker(texts[min(i, last)], views, i).load() for i in range(count)]


def _views(
    memory: Memory,
    offset: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int],
    *,
    base: int = 0,
    count: int = 1,
    step: int = 0,
) -> list[Tensor]:
    """Tensors of one form, `step` bytes apart, by one operation: many small ones must cost
    little.
    """
    if 0 in shape:
        return [torch.empty(shape, dtype=dtype, device=memory.bytes.device)] * count
    return list(_stacked(memory, base + offset, dtype, (count, *shape), stride, step).unbind())


def _stacked(
    memory: Memory,
    offset: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int],
    step: int,
) -> Tensor:
    """Tensors of one form as one tensor whose first dimension has `step` bytes."""
    size = dtype.itemsize
    whole = memory.bytes[: memory.size // size * size].view(dtype)
    return whole.as_strided(shape, (step // size, *stride), offset // size)


def copied(values: Any, fences: Fences | None = None) -> Any:
    """The same values, every tensor in storage of its own, with the same strides, perhaps inside
    `fences`.
    """

    def copy_of(x: Tensor) -> Tensor:
        form = _span(x), x.dtype, x.device
        flat = fences.inside(*form) if fences else _uninitialised(*form)
        return _fill(flat.as_strided(x.shape, x.stride()), x)

    return map_tensors(copy_of, values)


def _uninitialised(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=dtype, device=device)


class Fences:
    """Bytes before and after the memory of tensors: NaN (-1 in integers) for who reads there, and
    changed by who writes. The tensors have storage and alignment as others do.
    """

    def __init__(self) -> None:
        self.around: list[Tensor] = []

    def inside(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised flat tensor between two fences."""
        size = count * dtype.itemsize
        if not size or device.type not in ("cpu", "cuda"):
            return _uninitialised(count, dtype, device)
        whole = _uninitialised(2 * FENCE_BYTES + padded(size), torch.uint8, device)
        for fence in (whole[:FENCE_BYTES], whole[FENCE_BYTES + size :]):
            self.around.append(fence.fill_(FENCE))
        if device.type == "cpu":
            return torch.frombuffer(whole.numpy(), dtype=dtype, count=count, offset=FENCE_BYTES)
        return torch.as_tensor(_Inner(whole, size), device=device).view(dtype)

    def add(self, others: Fences) -> None:
        self.around += others.around

    @property
    def intact(self) -> bool:
        return all(int(fence.min()) == FENCE for fence in self.around)  # the largest byte


class _Inner:
    """A part of a GPU's tensor, as memory of its own."""

    def __init__(self, whole: Tensor, size: int) -> None:
        self.whole = whole
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (whole.data_ptr() + FENCE_BYTES, False),
            "version": 3,
        }


def _span(value: Tensor) -> int:
    if not value.numel():
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))


def _fill(made: Tensor, value: Tensor) -> Tensor:
    target = made
    for dim, step in enumerate(value.stride()):
        if not step and value.numel():  # an expanded dimension: its elements are one
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    target.copy_(value)
    return made


# -- outputs ---------------------------------------------------------------------------------------


def write(memory: Memory, outputs: Sequence[list[Tensor]], skipped: int = 0) -> None:
    """Put all outputs, of one form, into memory as `read` expects, behind `skipped` others; nothing
    where they do not fit.
    """
    step = sum(padded(leaf.nbytes) for leaf in outputs[0])
    if step * (skipped + len(outputs)) > memory.size:
        return  # a wrong shape: the parent sees it in the record and reads nothing
    offset = skipped * step
    for leaves in zip(*outputs, strict=True):
        first = leaves[0]
        if first.numel():
            dense = torch.empty(first.shape, device="meta").stride()
            shape = len(leaves), *first.shape
            target = _stacked(memory, offset, first.dtype, shape, dense, step)
            if first.device == target.device:
                torch.stack(leaves, out=target)
            else:  # host memory takes the place of a device's that cannot be had
                target.copy_(torch.stack(leaves))
        offset += padded(first.nbytes)


def read(memory: Memory, like: list[Tensor], offset: int = 0) -> list[Tensor]:
    """Copies of tensors of the dtypes and shapes of `like`, on its devices."""
    tensors = []
    for wanted in like:
        count = wanted.nbytes
        taken = memory.bytes[offset : offset + count].clone().to(wanted.device)
        tensors.append(taken.view(wanted.dtype).reshape(wanted.shape))
        offset += padded(count)
    return tensors


def calls(memory: Memory, like: Tensor, count: int, *, offset: int, step: int) -> Tensor:
    """One tensor like `like` per output, `step` bytes apart, as rows (count, elements)."""
    return _stacked(memory, offset, like.dtype, (count, like.numel()), (1,), step)


def padded(count: int) -> int:
    """Bytes that a tensor takes up: a multiple of `SHARED_ALIGNMENT`."""
    return -(-count // SHARED_ALIGNMENT) * SHARED_ALIGNMENT
